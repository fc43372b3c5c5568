"""Run checks: side by side with a time limit each, or the fast ones one after another before a run."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from trainkit.doctor.check import Check, CheckResult, Finding, skipped
from trainkit.doctor.commands import Commands
from trainkit.doctor.host import Host, Target, this_host
from trainkit.errors import Diagnostic
from trainkit.machine.facts import Facts

LAST = 1.0  # seconds for checks that were given up to tidy


@dataclass
class _Call:
    """One check that runs in a thread, which may be left behind: nothing can end a thread that hangs in the system."""

    check: Check
    host: Host
    target: Target
    found: CheckResult | None = None
    error: BaseException | None = None
    started: float = 0.0  # on the monotonic clock; 0.0 before the start
    ended: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Begin, in a thread."""
        self.started = time.monotonic()
        threading.Thread(target=self._work, name=f"doctor: {self.check.name}", daemon=True).start()

    def _work(self) -> None:
        try:
            self.found = apply(self.check, self.host, self.target)
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread, which raises it
            self.error = error
        finally:
            self.ended.set()

    def wait(self, deadline: float) -> None:
        """Until it has ended, but not beyond the deadline (on the monotonic clock)."""
        self.ended.wait(max(deadline - time.monotonic(), 0))

    def result(self, deadline: float) -> CheckResult:
        """Wait for it, but not beyond its limit or the deadline."""
        self.wait(min(self.started + self.check.limit, deadline))
        if self.error is not None:
            raise self.error
        if self.found is None:
            seconds = time.monotonic() - self.started
            what = f"no answer within {seconds:.0f} s, given up: something that it looks at hangs"
            return CheckResult(self.check.name, self.check.title, (Finding("warning", what),), seconds)
        return self.found


def examine(
    checks: Iterable[Check],
    host: Host,
    target: Target,
    longest: float,
    close: Callable[[], None] = lambda: None,
) -> tuple[CheckResult, ...]:
    """What every check finds, in the order of `checks`, after at most `longest` seconds.

    close: ends the commands that checks are waiting for, when all is done or when the user interrupts it.
    """
    deadline = time.monotonic() + longest
    calls = [_Call(check, host, target) for check in checks]
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


def apply(check: Check, host: Host, target: Target) -> CheckResult:
    """What one check finds; an error of the system is a finding too."""
    started = time.monotonic()
    try:
        why = check.unneeded(target)
        findings = (skipped(why),) if why else tuple(check.run(host, target))
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        findings = (Finding("warning", f"cannot be examined: {error.strerror or error}{where}"),)
    return CheckResult(check.name, check.title, findings, time.monotonic() - started)


def examine_before_run(checks: Iterable[Check], facts: Facts, target: Target) -> tuple[Diagnostic, ...]:
    """Problems as errors, warnings as warnings; notes are the doctor's alone."""
    host = this_host(facts, Commands({}), Path.cwd(), dict(os.environ))
    results = [apply(check, host, target) for check in checks]
    return tuple(
        Diagnostic(
            "error" if finding.level == "problem" else "warning",
            f"{result.title}: {finding.what}",
            why="; ".join(finding.evidence),
            hint=_hint(finding),
        )
        for result in results
        for finding in result.findings
        if finding.level in ("problem", "warning")
    )


def _hint(finding: Finding) -> str:
    """The first fix, with the comment of its line in parentheses."""
    if not finding.fix:
        return ""
    command, _, comment = finding.fix[0].partition("      # ")
    return f"{command} ({comment})" if comment else command
