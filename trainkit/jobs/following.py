"""Follow a run by its files, over all its attempts, to its end: `logs`, and `submit --wait`."""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainkit.errors import MachineError, UsageError
from trainkit.jobs.batch import read_plan
from trainkit.jobs.pods import show_output
from trainkit.jobs.records import read_submission
from trainkit.jobs.states import state_of
from trainkit.runner.report.progress import Tail
from trainkit.runner.rundir.layout import AttemptLayout, RunLayout
from trainkit.runner.rundir.listing import read_status
from trainkit.runner.rundir.records import Status, read_records

LOOK_SECONDS = 0.5
PAUSES = 4  # how much longer than a look the pause after it is at least: one over thousands of logs takes a while
ASK_SECONDS = 15.0  # between questions to the scheduler, whether it still knows the job
SETTLE_SECONDS = 1.0  # for the last lines of a run that has ended


@dataclass(frozen=True, slots=True)
class Wanted:
    """Whose output: of a rank, of a node's launcher, of all ranks, or (by default) what the run itself has shown.

    attempt: of which start; None is the newest, and while one follows each new one as well.
    """

    rank: int | None = None
    node: int | None = None
    every: bool = False
    attempt: int | None = None


class Logs:
    """The files of what is wanted, each from where it was left."""

    def __init__(self, layout: RunLayout, wanted: Wanted) -> None:
        self._layout, self._wanted = layout, wanted
        self._tails: dict[Path, Tail] = {}
        self._rest: dict[Path, bytes] = {}
        self._hosts: dict[tuple[Path, int], str] = {}
        self._asked: set[Path] = set()  # attempts whose records were read in this look
        self._said: set[str] = set()  # what could not be read
        self._first = max(1, len(layout.attempts))

    def show(self) -> bool:
        """Print what is new; whether there was anything."""
        any_new = False
        self._asked.clear()
        for path, prefix in self._files():
            tail = self._tails.setdefault(path, Tail(path, kept=not self._wanted.every))
            while data := tail.read():
                any_new = True
                sys.stdout.buffer.write(self._prefixed(path, prefix, data) if prefix else data)
            if tail.refusal and tail.refusal not in self._said:
                self._said.add(tail.refusal)
                sys.stderr.write(f"{tail.refusal}\n")
        sys.stdout.flush()
        return any_new

    def finish(self) -> None:
        """Print what is new, and last lines that are not whole."""
        self.show()
        unended = {path: rest for path, rest in self._rest.items() if rest}
        for path, prefix in self._files() if unended else ():
            if path in unended:
                sys.stdout.buffer.write(b"%s %s\n" % (prefix.encode(), unended[path]))
        self._rest.clear()
        sys.stdout.flush()

    def _prefixed(self, path: Path, prefix: str, data: bytes) -> bytes:
        *lines, self._rest[path] = (self._rest.get(path, b"") + data).split(b"\n")
        return b"".join(b"%s %s\n" % (prefix.encode(), line) for line in lines)

    def _files(self) -> Iterator[tuple[Path, str]]:
        wanted = self._wanted
        output = self._layout.root / "job.out"
        if wanted == Wanted() and output.exists():
            yield output, ""
            return
        for attempt in self._layout.attempts:
            number = int(attempt.root.name)
            if number < self._first if wanted.attempt is None else number != wanted.attempt:
                continue
            yield from self._of_attempt(attempt)

    def _of_attempt(self, attempt: AttemptLayout) -> Iterator[tuple[Path, str]]:
        wanted = self._wanted
        if wanted.node is not None:
            yield AttemptLayout(attempt.root, wanted.node).launcher_log, ""
        elif wanted.every:
            for path in sorted(attempt.logs.glob("rank-*.*"), key=lambda path: (_rank_of(path), path.suffix)):
                yield path, f"[{_rank_of(path)} {self._host(attempt, _rank_of(path))}]"
        else:
            for stream in ("out", "err"):
                yield attempt.log(wanted.rank or 0, stream), ""

    def _host(self, attempt: AttemptLayout, rank: int) -> str:
        """The host of a rank, by its record."""
        if (attempt.root, rank) not in self._hosts and attempt.root not in self._asked:
            self._asked.add(attempt.root)
            try:
                found = {(attempt.root, each.rank): each.host for each in read_records(str(attempt.root))}
            except OSError:
                found = {}
            self._hosts |= found
        return self._hosts.get((attempt.root, rank), "?")


def _rank_of(path: Path) -> int:
    number = path.stem.removeprefix("rank-")
    return int(number) if number.isdecimal() else 0


def show_logs(layout: RunLayout, wanted: Wanted, *, follow: bool) -> int:
    """Print the output; follow: until the run has ended, whose exit code it returns."""
    if in_pods(layout):
        if wanted.rank is not None or wanted.attempt is not None:
            what = "output of single ranks and of earlier attempts is in the run directory on the pods' volume"
            raise UsageError(what, hint="--node N shows what a pod says, --all what all say; or read it with `attach`")
        return show_output(layout, None if wanted.every else wanted.node or 0, follow=follow)
    refuse_absent(layout, wanted, follow=follow)
    logs = Logs(layout, wanted)
    if follow:
        return until_end(layout, logs)
    logs.finish()
    return 0


def refuse_absent(layout: RunLayout, wanted: Wanted, *, follow: bool) -> None:
    """UsageError for a rank or a node that the run has none of, or an attempt that is not there (yet, to follow)."""
    try:
        topology = read_plan(layout).topology
        most_of = {"rank": topology.world_size, "node": topology.nodes}
    except MachineError:  # a damaged plan: the logs are shown all the same
        most_of = {}
    numbers = [int(each.root.name) for each in layout.attempts]
    for name, number in (("rank", wanted.rank), ("node", wanted.node)):
        most = most_of.get(name)
        if number is not None and most is not None and number >= most:
            hint = f"its {name}s are 0 to {most - 1}" if most > 1 else f"its only {name} is 0"
            raise UsageError(f"{layout.root} has no {name} {number}", hint=hint)
    if wanted.attempt is not None and wanted.attempt not in numbers and not follow:
        hint = f"its attempts are {', '.join(map(str, numbers))}" if numbers else "it has not started yet"
        raise UsageError(f"{layout.root} has no attempt {wanted.attempt}", hint=hint)


def in_pods(layout: RunLayout) -> bool:
    """Whether this is but the record of a run in pods, whose output Kubernetes has."""
    submission = read_submission(layout.root)
    return submission is not None and submission.scheduler == "kubernetes" and not layout.attempts


def wait_for(layout: RunLayout, *, show: bool) -> int:
    """The run's exit code, once it has ended. show: print what it says meanwhile."""
    if show and in_pods(layout):
        return show_output(layout, 0, follow=True)
    return until_end(layout, Logs(layout, Wanted()) if show else None)


def until_end(layout: RunLayout, logs: Logs | None) -> int:
    """Wait for the end, over all attempts; the run's exit code."""
    asked = time.monotonic()
    submission = read_submission(layout.root)
    while True:
        began = time.monotonic()
        status = read_status(layout) or Status()
        over = status.state == "ended" and (submission is None or status.outcome is not None)
        if logs:
            logs.show()
            refuse_unread()
        if over:
            time.sleep(SETTLE_SECONDS if logs else 0)
            if logs:
                logs.finish()
            return status.exit_code or 0
        if time.monotonic() - asked > ASK_SECONDS:
            asked = time.monotonic()
            found = state_of(layout)
            if found.is_over and not _ended_meanwhile(layout):
                sys.stderr.write(f"{found.word.replace('_', ' ')}: {found.why}\n")
                return found.exit_code if found.exit_code is not None else 1
        time.sleep(max(LOOK_SECONDS, PAUSES * (time.monotonic() - began)))


def refuse_unread() -> None:
    """BrokenPipeError where nobody can read what is printed any more, though there is nothing to print now."""
    waiting = select.poll()
    waiting.register(1, 0)  # an error is told in any case (poll(2))
    if any(event & select.POLLERR for _, event in waiting.poll(0)):
        raise BrokenPipeError


def _ended_meanwhile(layout: RunLayout) -> bool:
    return (read_status(layout) or Status()).outcome is not None
