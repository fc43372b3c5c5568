"""All checks, and how they run: side by side with a time limit each, or the fast ones one by one before a run.

A new check takes its module in `checks/` and its name here, at its place in the order in which they are shown.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from trainkit.doctor.check import NEEDS, Check, CheckResult, Commands, Finding, Host, Target, ok, skipped, this_host
from trainkit.doctor.checks.compilers import BUILD_TOOLS, DEEPSPEED_OPS, HOST_COMPILER, TOOLKIT_VERSION, TOOLKITS
from trainkit.doctor.checks.containers import CONTAINER
from trainkit.doctor.checks.gpus import DRIVER, GPU_HEALTH
from trainkit.doctor.checks.limits import DISK_SPACE, PROCESS_LIMITS, SHARED_MEMORY, WRITE_SPEED
from trainkit.doctor.checks.network import COLLECTIVES, HOST_NAMES, PORTS
from trainkit.doctor.checks.packages import CUDA_LIBRARIES, INTERPRETER, PACKAGES
from trainkit.doctor.checks.stale_settings import STALE_SETTINGS
from trainkit.errors import Diagnostic
from trainkit.machine.facts import Facts

LAST = 1.0  # seconds for checks that were given up to tidy


def plan_blockers(host: Host, target: Target) -> Finding | list[Finding]:
    """What the plan itself finds missing on this machine: cards, packages, whatever stops `trainkit run`."""
    if target.plan is None:
        return skipped("no recipe is named")
    found = [Finding("problem", each.what, (), (each.hint,) if each.hint else ()) for each in target.plan.blockers]
    return found or ok("this machine can run it, as far as the plan can tell")


PLAN_BLOCKERS = Check("plan", "plan", 1.0, plan_blockers)  # not fast: `trainkit run` shows the blockers itself
_ORDER = (
    PLAN_BLOCKERS, CONTAINER, INTERPRETER, PACKAGES, CUDA_LIBRARIES, DRIVER, GPU_HEALTH, TOOLKITS, TOOLKIT_VERSION,
    HOST_COMPILER, BUILD_TOOLS, DEEPSPEED_OPS, COLLECTIVES, SHARED_MEMORY, PROCESS_LIMITS, DISK_SPACE, WRITE_SPEED,
    PORTS, HOST_NAMES, STALE_SETTINGS,
)  # fmt: skip
CHECKS: Mapping[str, Check] = {check.name: check for check in _ORDER}
FAST: tuple[Check, ...] = tuple(check for check in _ORDER if check.fast)


def examine(
    checks: Sequence[Check],
    host: Host,
    target: Target,
    longest: float,
    close: Callable[[], None] = lambda: None,
) -> tuple[CheckResult, ...]:
    """What every check finds, in the order of `checks`, after at most `longest` seconds.

    close: ends the commands that checks are waiting for, when all is done or when the user interrupts it.
    """
    started = time.monotonic()
    found: dict[Check, CheckResult | BaseException] = {}
    # Daemonic: nothing can end a thread that hangs in the system.
    threads = [
        threading.Thread(target=_work, args=(each, host, target, found), name=f"doctor: {each.name}", daemon=True)
        for each in checks
    ]
    results = []
    try:
        for thread in threads:
            thread.start()
        for check, thread in zip(checks, threads, strict=True):
            thread.join(max(started + min(check.limit, longest) - time.monotonic(), 0))
            seconds = time.monotonic() - started
            late = f"no answer within {seconds:.0f} s, given up: something that it looks at hangs"
            result = found.get(check) or CheckResult(check.name, check.title, (Finding("warning", late),), seconds)
            if isinstance(result, BaseException):
                raise result
            results.append(result)
        return tuple(results)
    finally:
        close()
        end = time.monotonic() + LAST
        for thread in threads:  # each may have a command to end and a file to remove
            if thread.ident:
                thread.join(max(end - time.monotonic(), 0))


def _work(check: Check, host: Host, target: Target, found: dict[Check, CheckResult | BaseException]) -> None:
    try:
        found[check] = apply(check, host, target)
    except BaseException as error:  # noqa: BLE001 - handed to the caller's thread, which raises it
        found[check] = error


def apply(check: Check, host: Host, target: Target) -> CheckResult:
    """What one check finds; an error of the system is a finding too."""
    started = time.monotonic()
    try:
        lacks = check.needs and not getattr(target, check.needs)
        found = skipped(NEEDS[check.needs]) if lacks else check.run(host, target)
        findings = (found,) if isinstance(found, Finding) else tuple(found)
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        findings = (Finding("warning", f"cannot be examined: {error.strerror or error}{where}"),)
    return CheckResult(check.name, check.title, findings, time.monotonic() - started)


def examine_before_run(checks: Iterable[Check], facts: Facts, target: Target) -> tuple[Diagnostic, ...]:
    """Problems as errors, warnings as warnings; notes are the doctor's alone."""
    # Of the fast checks only that of a container starts commands, and waits for each.
    host = this_host(facts, Commands({}), Path.cwd(), dict(os.environ))
    found = []
    for result in (apply(check, host, target) for check in checks):
        for finding in result.findings:
            if finding.level in ("problem", "warning"):
                severity: Literal["error", "warning"] = "error" if finding.level == "problem" else "warning"
                # Of the commands to paste the first one has room here, its comment in parentheses.
                command, _, comment = (*finding.fix, "")[0].partition("      # ")
                hint = f"{command} ({comment})" if comment else command
                what, why = f"{result.title}: {finding.what}", "; ".join(finding.evidence)
                found.append(Diagnostic(severity, what, why=why, hint=hint))
    return tuple(found)


def checks_for(target: Target) -> tuple[Check, ...]:
    """All of them; that of the plan only where there is one, and that of its container only where it has one."""
    boxed = target.plan is not None and target.plan.container is not None
    left = {*(() if target.plan else (PLAN_BLOCKERS,)), *(() if boxed else (CONTAINER,))}
    return tuple(check for check in _ORDER if check not in left)
