"""All checks, and how they run: side by side with a time limit each, or the fast ones one by one before a run."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from trainkit.doctor.check import NEEDS, Check, CheckResult, Commands, Finding, Host, Target, ok, skipped, this_host
from trainkit.doctor.checks import compilers, containers, gpus, limits, network, packages, stale_settings
from trainkit.errors import Diagnostic
from trainkit.machine.facts import Facts

LAST = 1.0  # seconds for checks that were given up to tidy


def plan_blockers(host: Host, target: Target) -> Finding | list[Finding]:
    """What the plan itself finds missing on this machine: GPUs, packages, whatever stops `trainkit run`."""
    blockers = target.plan.blockers if target.plan else ()
    found = [Finding("problem", each.what, (), (each.hint,) if each.hint else ()) for each in blockers]
    return found or ok("this machine can run it, as far as the plan can tell")


# name, title, seconds after which it is given up, function; in the order in which they are shown.
_TABLE = (
    Check("plan", "plan", 1.0, plan_blockers, needs="plan"),  # not fast: `trainkit run` shows the blockers itself
    Check("container", "container", 12.0, containers.container, fast=True, needs="container"),
    Check("interpreter", "interpreter", 3.0, packages.interpreter, fast=True),
    Check("packages", "packages", 8.0, packages.packages),
    Check("cuda-libraries", "CUDA libraries", 6.0, packages.cuda_libraries, needs="cuda"),
    Check("driver", "NVIDIA driver", 4.0, gpus.driver, fast=True, needs="cuda"),
    Check("gpu-health", "GPU health", 2.0, gpus.health, fast=True, needs="cuda"),
    Check("toolkits", "CUDA toolkits", 10.0, compilers.toolkits, needs="compiles_cuda"),
    Check("toolkit-version", "CUDA of torch and toolkit", 10.0, compilers.toolkit_version, needs="compiles_cuda"),
    Check("host-compiler", "compiler for CUDA", 10.0, compilers.host_compiler, needs="compiles_cuda"),
    Check("build-tools", "build tools", 15.0, compilers.build_tools, needs="builds"),
    Check("deepspeed-ops", "DeepSpeed ops", compilers.OPS_LIMIT + 1, compilers.deepspeed_ops, needs="builds_ops"),
    Check("collectives", "collectives", network.COLLECTIVES_LIMIT + 1, network.collectives, needs="several"),
    Check("shared-memory", "shared memory", 2.0, limits.shared_memory, fast=True),
    Check("limits", "file and process limits", 2.0, limits.processes, fast=True),
    Check("disk-space", "disk space", 3.0, limits.disk_space, fast=True),
    Check("write-speed", "write speed", 8.0, limits.write_speed),
    Check("ports", "ports", 3.0, network.ports, fast=True),
    Check("host-names", "host names", network.NAMES_LIMIT + 1, network.host_names, needs="several"),
    Check("settings", "stale settings", 3.0, stale_settings.settings, fast=True),
)
CHECKS: Mapping[str, Check] = {check.name: check for check in _TABLE}
FAST: tuple[Check, ...] = tuple(check for check in _TABLE if check.fast)


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
    """All of them; those of the plan and of its container only where there is one."""
    return tuple(each for each in _TABLE if each.needs not in ("plan", "container") or getattr(target, each.needs))
