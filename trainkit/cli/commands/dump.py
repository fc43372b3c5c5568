"""`trainkit dump`: what the ranks of a running run are doing now, with their stacks, and who holds it up."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.cli.commands.runs import find_run
from trainkit.cli.diagnostics import one_line, write_text
from trainkit.cli.options import Json, Root, Run
from trainkit.errors import MachineError, UsageError

if TYPE_CHECKING:
    from trainkit.runner.rundir.layout import AttemptLayout
    from trainkit.runner.watch.judge import Account

ANSWER_SECONDS = 30.0  # the guardian looks once a second, and waits twelve for other nodes
LOOK_SECONDS = 0.1
STILL_SECONDS = 10.0  # a run whose ranks have all moved since is called one that moves


def dump(
    run: Run = None,
    root: Root = "runs",
    as_json: Json = False,
) -> None:
    """Say what every rank of a running run is doing, and write down their stacks. The run goes on.

    Example: trainkit dump quickstart
    """
    from trainkit.decode import DecodeError, decode
    from trainkit.jobs.states import state_of
    from trainkit.runner.watch.judge import Account, describe

    layout = find_run(run, root).layout
    # Whether a run of another machine is still there cannot be seen from here: its guardian answers, or does not.
    found = state_of(layout)
    if found.is_over or not layout.attempts:
        what = f"{layout.root} is not running: it is {found.word.replace('_', ' ')}"
        raise UsageError(what, hint="`trainkit runs list` shows those that are")
    attempt = layout.attempts[-1]
    answer = ask(attempt)
    try:
        account: Account = decode(Account, answer)
    except DecodeError as error:
        raise MachineError(f"the answer in {attempt.root / 'dumps'} is not the guardian's: {error}") from error
    if as_json:
        import json

        sys.stdout.write(json.dumps(answer, indent=2) + "\n")
        return
    write_text("".join(f"{one_line(describe(each))}\n" for each in account.ranks))
    write_text(f"{one_line(_outcome(account))}\n{attempt.root / 'dumps'}\n")


def _outcome(account: Account) -> str:
    """Who holds the run up, where it stands still."""
    seconds = min((each.seconds for each in account.ranks if each.is_rank), default=None)
    missing = f"; {', '.join(account.missing)} did not answer" if account.missing else ""
    if seconds is None:
        return f"no rank runs{missing}"
    return account.line if seconds > STILL_SECONDS else f"the run moves{missing}"


def ask(attempt: AttemptLayout) -> dict[str, Any]:
    """Leave an order for the run's guardian, and wait for what it finds. Raises MachineError where nobody answers."""
    from trainkit.files import make_folder, parse_json, publish, read_whole
    from trainkit.runner.rundir.records import DUMPS, ORDERS, run_of

    token, orders = os.urandom(16).hex(), attempt.root / ORDERS
    answer, order = attempt.root / DUMPS / "asked.json", orders / "dump"
    run = run_of(str(attempt.root))
    try:
        make_folder(orders, below=run)
        publish(order, token, below=run)
    except OSError as error:
        why = f"{orders} cannot be written: {error.strerror}"
        raise MachineError(why, hint="only whoever may write to the run directory can ask for a dump") from error
    until = time.monotonic() + ANSWER_SECONDS
    try:
        while time.monotonic() < until:
            with contextlib.suppress(OSError, ValueError):  # there is none yet
                account = parse_json(read_whole(answer, below=run))
                if isinstance(account, dict) and account.get("asked") == token:
                    return account
            time.sleep(LOOK_SECONDS)
    finally:
        remove(order, run)
    raise MachineError(
        f"the run's guardian has not answered for {ANSWER_SECONDS:.0f} s",
        hint="see whether it still runs; on several nodes, whether node 0 sees this folder",
    )


def remove(order: Path, run: str) -> None:
    """Take an order back that nobody has taken, and the folder with it."""
    from trainkit.files import remove_file

    with contextlib.suppress(OSError):
        remove_file(order, below=run)
        order.parent.rmdir()
