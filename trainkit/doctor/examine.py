"""Run the checks side by side, each with a time limit; one that hangs is given up and said to have hung."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from trainkit.doctor.check import Check
from trainkit.doctor.surroundings import Aim, Surroundings
from trainkit.doctor.verdict import Finding, Verdict, skipped

LAST = 1.0  # seconds for checks that were given up to tidy


@dataclass
class _Call:
    """One check on its way, in a thread that may be left behind: nothing can end a thread that hangs in the system."""

    name: str
    check: Check
    surroundings: Surroundings
    aim: Aim
    finding: Finding | None = None
    error: BaseException | None = None

    started: float = 0.0  # on the monotonic clock; 0.0 before the start
    ended: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Begin, in a thread."""
        self.started = time.monotonic()
        threading.Thread(target=self._work, name=f"doctor: {self.name}", daemon=True).start()

    def _work(self) -> None:
        try:
            self.finding = apply(self.name, self.check, self.surroundings, self.aim)
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread, which raises it
            self.error = error
        finally:
            self.ended.set()

    def wait(self, deadline: float) -> None:
        """Until it has ended, but not beyond the deadline (on the monotonic clock)."""
        self.ended.wait(max(deadline - time.monotonic(), 0))

    def result(self, deadline: float) -> Finding:
        """Wait for it, but not beyond its limit or the deadline."""
        self.wait(min(self.started + self.check.LIMIT, deadline))
        if self.error is not None:
            raise self.error
        if self.finding is None:
            seconds = time.monotonic() - self.started
            what = f"no answer within {seconds:.0f} s, given up: something that it looks at hangs"
            return Finding(self.name, self.check.TITLE, (Verdict("warning", what),), seconds)
        return self.finding


def examine(
    checks: Mapping[str, Check],
    surroundings: Surroundings,
    aim: Aim,
    longest: float,
    close: Callable[[], None] = lambda: None,
) -> tuple[Finding, ...]:
    """What every check finds, in the order of `checks`, after at most `longest` seconds.

    close: ends the commands that checks are waiting for, when all is done or when the user interrupts it.
    """
    deadline = time.monotonic() + longest
    calls = [_Call(name, check, surroundings, aim) for name, check in checks.items()]
    try:
        for call in calls:
            call.start()
        return tuple(call.result(deadline) for call in calls)
    finally:
        close()
        end = time.monotonic() + LAST
        for call in calls:  # each may have a command to end and a file to remove
            if call.started:
                call.wait(end)


def apply(name: str, check: Check, surroundings: Surroundings, aim: Aim) -> Finding:
    """What one check finds; what the system refuses it is a finding too."""
    started = time.monotonic()
    try:
        why = check.needs(aim)
        verdicts = (skipped(why),) if why else tuple(check.run(surroundings, aim))
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        verdicts = (Verdict("warning", f"it cannot be examined: {error.strerror or error}{where}"),)
    return Finding(name, check.TITLE, verdicts, time.monotonic() - started)
