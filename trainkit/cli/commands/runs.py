"""`trainkit runs`: run directories listed, shown and pruned."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from trainkit.cli.diagnostics import one_line, write_text
from trainkit.cli.options import Command, CommandGroup, Json, Root, Run
from trainkit.errors import MachineError, UsageError
from trainkit.recipe.secrets import mask_words
from trainkit.text import join_names, pluralize, table

if TYPE_CHECKING:
    from trainkit.runner.rundir.layout import AttemptLayout
    from trainkit.runner.rundir.listing import RunInfo
    from trainkit.runner.watch.hang_cause import DumpFile
    from trainkit.schedulers.jobs.run_state import RunState


_LAST = 10  # lines of a log
_WIDEST = 32  # characters of a program's name in a list
app = typer.Typer(
    name="runs",
    cls=CommandGroup,
    help="List, show and prune run directories.",
    no_args_is_help=True,
    add_completion=False,
)

Name = Annotated[str | None, Argument(metavar="[NAME]", help="Only runs of this name.")]


@app.command("list", cls=Command)
def list_runs(
    name: Name = None,
    root: Root = "runs",
    everywhere: Annotated[bool, Option("--all", help="All runs of this user on this machine, in any folder.")] = False,
    as_json: Json = False,
) -> None:
    """List runs, oldest first: state, exit code, steps, loss, evaluation, program, strategy, launcher, folder.

    Example: trainkit runs list quickstart
    """
    from trainkit.runner.report.summary import described_evaluation
    from trainkit.runner.rundir import listing
    from trainkit.schedulers.jobs.run_state import Jobs, state_of

    roots, jobs = known_roots() if everywhere else [root], Jobs()
    runs = sorted((run for each in roots for run in listing.list_runs(each, name)), key=lambda run: run.layout.id)
    found = [(run, state_of(run.layout, jobs)) for run in runs]
    if as_json:
        sys.stdout.write(json.dumps([as_data(run, state) for run, state in found], indent=2) + "\n")
        return
    if not found:
        write_text(f"no runs in {join_names(roots) or 'any folder'}\n")
        return
    rows: list[tuple[str, ...]] = [
        ("STARTED", "STATE", "EXIT", "STEPS", "LOSS", "EVALUATION", "PROGRAM", "STRATEGY", "LAUNCHER", "RUN")
    ]
    for run, state in found:
        started = f"{datetime.fromtimestamp(run.started):%Y-%m-%d %H:%M:%S}" if run.started else "-"
        loss, steps = run.summary.get("final_loss"), "-" if state.step is None else str(state.step)
        shown, code = f"{loss:.4f}" if isinstance(loss, float) else "-", str(exit_code_of(state))
        launched = (run.program, run.launched.get("strategy", ""), run.launched.get("launcher", ""))
        names = (one_line(each)[:_WIDEST] or "-" for each in launched)
        evaluated = one_line(described_evaluation(run.layout))[:_WIDEST] or "-"
        told = (started, state.word.replace("_", " "), code, steps, shown, evaluated)
        rows.append((*told, *names, str(run.layout.root)))
    write_text(table(rows))


def exit_code_of(state: RunState) -> int | str:
    """Of a run that is over; a dash where there is none."""
    return "-" if state.exit_code is None or not state.is_over else state.exit_code


def known_roots() -> list[str]:
    """Folders in which runs of this user lie, as each run has noted it."""
    from trainkit.runner.rundir.create import remembered_roots

    return remembered_roots(os.environ)


@app.command("show", cls=Command)
def show(
    run: Run = None,
    root: Root = "runs",
    as_json: Json = False,
) -> None:
    """Show how a run ended: who ended it and why, its program and summary, the last lines of its logs.

    Example: trainkit runs show quickstart
    """
    from trainkit.runner.report.summary import render_summary
    from trainkit.runner.rundir.code_state import read_code
    from trainkit.schedulers.jobs.run_state import state_of

    info = find_run(run, root)
    state = state_of(info.layout)
    if as_json:
        code = read_code(info.layout)
        sys.stdout.write(json.dumps({**as_data(info, state), "code": code and code._asdict()}, indent=2) + "\n")
        return
    why = f": {state.why}" if state.why else ": no reason recorded" if state.is_over and state.exit_code else ""
    step = f", step {state.step}" if state.step is not None and not state.is_over else ""
    write_text(one_line(f"{state.word.replace('_', ' ')}{step}, exit code {exit_code_of(state)}{why}") + "\n")
    kind = ", ".join(filter(None, (info.launched.get(name) for name in ("program", "strategy", "launcher"))))
    own = info.argv if info.launched.get("program") != "builtin" else ()
    program = shlex.join(mask_words(own)) or info.program
    write_text(one_line(f"program: {program or '-'}" + (f" ({kind})" if kind else "")) + "\n")
    if code := read_code(info.layout):
        write_text(one_line(f"code: {code}") + "\n")
    if info.summary:
        write_text(render_summary(info.summary, info.layout.root) + "\n")
    write_text("".join(f"{line}\n" for line in ends_of_logs(info)))


def ends_of_logs(info: RunInfo) -> Iterator[str]:
    """The last lines of the rank that failed, else of rank 0, and where its logs are; of a launcher where none ran."""
    from trainkit.runner.report.progress import last_lines

    for attempt in info.layout.attempts[-1:]:
        rank = info.rank or 0
        logs = [attempt.log(rank, stream) for stream in ("out", "err")]
        logs = [log for log in logs if log.exists()] or [each for each in (attempt.launcher_log,) if each.exists()]
        for log in logs:
            lines = last_lines(log, _LAST)
            yield f"{'last lines of' if lines else 'nothing in'} {log}" + (":" if lines else "")
            yield from (f"  | {one_line(line.expandtabs())}" for line in lines)


@app.command("prune", cls=Command)
def prune(
    name: Name = None,
    root: Root = "runs",
    keep: Annotated[int, Option("--keep", min=0, help="How many of the newest runs of each name to keep.")] = 5,
    yes: Annotated[bool, Option("--yes", help="Remove without asking.")] = False,
) -> None:
    """Remove old run directories. A run that is, or may be, running or queued is never removed.

    Example: trainkit runs prune --keep 3
    """
    from trainkit.runner.rundir import listing
    from trainkit.schedulers.jobs.run_state import older, prunable, remove_run

    runs = listing.list_runs(root, name)
    chosen = prunable(runs, keep)
    if stay := len(older(runs, keep)) - len(chosen):
        why = "runs that may still be running, whose scheduler does not answer, of other users, or behind links"
        write_text(f"{pluralize(stay, 'older run')} {'stays' if stay == 1 else 'stay'}: {why}\n")
    if not chosen:
        write_text("nothing to remove\n")
        return
    write_text("".join(f"{run.layout.root}\n" for run in chosen))
    if not yes:
        what = "this run" if len(chosen) == 1 else f"these {len(chosen)} runs"
        try:
            yes = typer.confirm(f"remove {what} with all checkpoints?")
        except typer.Abort as abort:  # Ctrl-D leaves the cursor behind the question
            sys.stdout.write("\n")
            raise UsageError("nothing is removed without an answer", hint="--yes removes without asking") from abort
    if not yes:
        write_text("nothing removed\n")
        return
    removed = 0
    for run in chosen:
        try:
            removed += remove_run(run.layout)
        except OSError as error:
            sys.stderr.write(f"{run.layout.root} cannot be removed: {error.strerror}: {error.filename}\n")
    write_text(f"removed {removed} of {len(chosen)} runs\n")


def find_run(word: str | None, root: str) -> RunInfo:
    """The run that a word means: a run directory, the id of a run under the root, a name for its newest run, or a job.

    Without a word the newest of all. UsageError for an array job of several.
    """
    found, is_array = find_runs(word, root)
    if is_array:
        several = join_names([job_of(run) for run in found])
        raise UsageError(f"{word} is an array job of {pluralize(len(found), 'run')}", hint=f"name one: {several}")
    return found[0]


def find_runs(word: str | None, root: str) -> tuple[list[RunInfo], bool]:
    """The same, where all runs of an array job may be meant; and whether it is one's number."""
    from trainkit.runner.rundir import listing

    if word is None:
        if not (runs := listing.list_runs(root)):
            raise UsageError(f"no runs in {root}", hint="name the folder of the runs with --root, or a run directory")
        return runs[-1:], False
    # A path first: a name may be that of a folder here. ValueError is a NUL byte in the word.
    with contextlib.suppress(OSError, ValueError):
        if listing.is_run(Path(word)):
            return [listing.read_run(Path(word))], False
    runs = listing.list_runs(root)
    if named := [run for run in runs if word in (run.layout.id, run.layout.name)]:
        return named[-1:], False
    for searched in itertools.chain([runs], runs_with_jobs(word)):
        if named := [run for run in searched if is_of_job(run, word)]:
            return named[-1:], False
        if tasks := tasks_of(word, searched):
            return tasks, True
    what = f"{word} is neither a run directory nor a run in {root}"
    raise UsageError(what, hint="`trainkit runs list` shows them")


def runs_with_jobs(number: str) -> Iterator[list[RunInfo]]:
    """Where else the run of a job may be: in folders that runs have noted, and in the one that its scheduler knows."""
    from trainkit.runner.rundir.listing import list_runs
    from trainkit.schedulers.jobs.run_state import root_of_job, schedulers_with_job

    if any(schedulers_with_job(number)):
        runs = [run for root in known_roots() for run in list_runs(root)]
        yield sorted(runs, key=lambda run: run.layout.id)
        if root := root_of_job(number):
            yield list_runs(str(root))


def job_of(run: RunInfo) -> str:
    """The number of its job; empty for a run that was not submitted."""
    from trainkit.schedulers.jobs.records import submitted

    found = submitted(run.layout.root)
    return found[1].job if found else ""


def is_of_job(run: RunInfo, word: str) -> bool:
    """Whether a run was submitted as the job that a word names."""
    from trainkit.schedulers.jobs.records import submitted

    return (found := submitted(run.layout.root)) is not None and found[0].is_named(found[1].job, word)


def tasks_of(word: str, runs: Sequence[RunInfo]) -> list[RunInfo]:
    """The runs of an array job that a word names, by their tasks; none where it names none."""
    from trainkit.schedulers.jobs.records import submitted

    found: dict[int, RunInfo] = {}
    for run in runs:
        if (known := submitted(run.layout.root)) and (task := known[0].task_of(known[1].job)):
            array, number = task
            if known[0].is_named(array, word):
                found[number] = run
    return [run for _, run in sorted(found.items())]


def as_data(run: RunInfo, state: RunState) -> dict[str, Any]:
    return {
        "path": str(run.layout.root),
        "name": run.layout.name,
        "state": state.word,
        "exit_code": state.exit_code if state.is_over else None,
        "why": state.why,
        "step": state.step,
        "started": run.started,
        "ended": run.ended,
        "launched": dict(run.launched),
        "argv": mask_words(run.argv),
        "summary": dict(run.summary),
    }


ANSWER_SECONDS = 30.0  # the guardian looks once a second, and waits twelve for other nodes
LOOK_SECONDS = 0.1
STILL_SECONDS = 10.0  # a run whose ranks have all moved since is called one that moves


def dump(
    run: Run = None,
    root: Root = "runs",
    as_json: Json = False,
) -> None:
    """Show what every rank of a running run is doing, and save their stacks. The run continues.

    Example: trainkit dump quickstart
    """
    from trainkit.decode import DecodeError, decode
    from trainkit.runner.watch.hang_cause import DumpFile, describe
    from trainkit.schedulers.jobs.run_state import state_of

    layout = find_run(run, root).layout
    # Whether a run of another machine is still there cannot be seen from here: its guardian answers, or does not.
    found = state_of(layout)
    if found.is_over or not layout.attempts:
        what = f"{layout.root} is not running: it is {found.word.replace('_', ' ')}"
        raise UsageError(what, hint="`trainkit runs list` shows those that are")
    attempt = layout.attempts[-1]
    answer = ask(attempt)
    try:
        account: DumpFile = decode(DumpFile, answer)
    except DecodeError as error:
        raise MachineError(f"the answer in {attempt.root / 'dumps'} is not the guardian's: {error}") from error
    if as_json:
        import json

        sys.stdout.write(json.dumps(answer, indent=2) + "\n")
        return
    write_text("".join(f"{one_line(describe(each))}\n" for each in account.ranks))
    write_text(f"{one_line(_outcome(account))}\n{attempt.root / 'dumps'}\n")


def _outcome(account: DumpFile) -> str:
    """Which rank blocks the run, if it does not move."""
    seconds = min((each.seconds for each in account.ranks if each.is_rank), default=None)
    missing = f"; {', '.join(account.missing)} did not answer" if account.missing else ""
    if seconds is None:
        return f"no rank runs{missing}"
    return account.line if seconds > STILL_SECONDS else f"the run moves{missing}"


def ask(attempt: AttemptLayout) -> dict[str, Any]:
    """Leave an order for the run's guardian, and wait for what it finds. Raises MachineError without an answer."""
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
        raise MachineError(why, hint="a dump requires write access to the run directory") from error
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
        hint="check that it still runs; on several nodes, that node 0 sees this folder",
    )


def remove(order: Path, run: str) -> None:
    """Take an order back that nobody has taken, and the folder with it."""
    from trainkit.files import remove_file

    with contextlib.suppress(OSError):
        remove_file(order, below=run)
        order.parent.rmdir()
