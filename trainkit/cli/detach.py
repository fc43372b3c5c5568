"""`trainkit run --detach`: the same command in a session of its own, which says when its run has begun."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainkit.cli.diagnostics import write_text
from trainkit.errors import UsageError
from trainkit.files import parse_json
from trainkit.runner.report.console import lead_output
from trainkit.runner.supervisor.processes import spawn
from trainkit.schedulers.registry import place_in

if TYPE_CHECKING:
    from trainkit.recipe.resolved import Resolved
    from trainkit.runner.rundir.layout import RunLayout

OPTION = "--tell"  # the descriptor to tell, for the process that is started


def start(words: Sequence[str]) -> int:
    """Start `trainkit run WORDS` on its own, and wait until its run has begun, or waits for GPUs; the exit code.

    Where it cannot start, it has said why itself, on this terminal, and its exit code is returned. Until then Ctrl-C
    ends it; from then on neither this process nor its terminal has a part in it.
    """
    reader, writer = os.pipe()
    nothing = os.open(os.devnull, os.O_RDONLY)
    argv = (sys.executable, "-P", "-m", "trainkit", "run", OPTION, str(writer), *words)
    pid = spawn(argv, os.environ, (nothing, 1, 2), new_session=True, inherit=(writer,))
    os.close(nothing)
    os.close(writer)
    try:
        with os.fdopen(reader, "rb") as told:
            said = told.readline()
    except KeyboardInterrupt:
        os.kill(pid, signal.SIGINT)
        os.waitpid(pid, 0)
        raise
    if not said:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return code if code >= 0 else 128 - code
    begun = parse_json(said)
    write_text(how_to_follow(begun["run"], begun["id"], begun["waits"]))
    return 0


def how_to_follow(root: str, short_id: str, waits: str = "") -> str:
    """Where a run is that is left to itself, for people. waits: for what, if it has to."""
    follow = f"`trainkit logs {short_id} -f` follows it, `trainkit cancel {short_id}` ends it"
    return "".join(f"{line}\n" for line in (f"run directory: {root}", waits, follow) if line)


def refuse(resolved: Resolved, *, detached: bool) -> None:
    """Raise UsageError for a run that cannot be left to itself (detached), or that Python cannot start."""
    if detached and place_in(os.environ) is not None:
        what = "a run inside a job cannot be detached: its scheduler ends it with the job's script"
        raise UsageError(what, hint="leave --detach out; or `trainkit submit` queues it as a job of its own")
    nodes = resolved.recipe.nodes.count
    if nodes > 1 and detached:
        what = f"a run on {nodes} nodes cannot be detached: its nodes could not be found again"
        raise UsageError(what, hint="`trainkit submit` gives it to a scheduler, or starts all nodes through ssh")
    if nodes > 1:
        hint = "`trainkit submit` in a terminal, or `trainkit run` in the job"
        raise UsageError(f"a run from Python is on this machine alone, and nodes.count is {nodes}", hint=hint)


class Teller:
    """The other end: when the run begins, or waits, it tells who has started this process where the run is, once.

    detached: it also leads the output away, into the run directory. Else errors may be told by the same descriptor.
    """

    def __init__(self, fd: int, *, detached: bool) -> None:
        try:
            mode = os.fstat(fd).st_mode
        except OSError:
            mode = 0
        if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
            raise UsageError(f"{OPTION} is for trainkit itself", hint="leave it out")
        os.set_inheritable(fd, False)  # a process of the run would keep the reader waiting
        self._fd, self._detached, self._has_told = fd, detached, False

    def __call__(self, layout: RunLayout, waits: str) -> None:
        """Tell it, for the first time. waits: for what, if the run has to."""
        if self._has_told:
            return
        self._has_told = True
        if self._detached:
            lead_output(layout.job_output, layout.root)
        said = json.dumps({"run": str(layout.root), "id": layout.short_id, "waits": waits})
        with contextlib.suppress(OSError):  # who started it is gone already; the run goes on, or is being ended
            os.write(self._fd, said.encode() + b"\n")
