"""The checks that take milliseconds, called by `trainkit run` before anything starts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from trainkit.doctor.check import Check
from trainkit.doctor.checks import (
    ceilings,
    disk_space,
    driver,
    gpu_health,
    interpreter,
    ports,
    settings,
    shared_memory,
)
from trainkit.doctor.commands import Commands
from trainkit.doctor.examine import apply
from trainkit.doctor.here import surroundings_here
from trainkit.doctor.surroundings import Aim
from trainkit.doctor.verdict import Finding, Verdict
from trainkit.errors import Diagnostic
from trainkit.machine.facts import Facts

# The fast ones of all_checks.CHECKS; listed here too, so that a run does not load the others.
FAST: Mapping[str, Check] = {
    "interpreter": interpreter,
    "driver": driver,
    "gpu-health": gpu_health,
    "shared-memory": shared_memory,
    "limits": ceilings,
    "disk-space": disk_space,
    "ports": ports,
    "settings": settings,
}


def look(facts: Facts, aim: Aim) -> tuple[Diagnostic, ...]:
    """Problems as errors, warnings as warnings; notes are the doctor's alone."""
    surroundings = surroundings_here(facts, Commands({}), Path.cwd(), dict(os.environ))
    findings = (apply(name, check, surroundings, aim) for name, check in FAST.items())
    return tuple(diagnostic for finding in findings for diagnostic in _diagnostics(finding))


def _diagnostics(finding: Finding) -> Iterator[Diagnostic]:
    for verdict in finding.verdicts:
        if verdict.level == "problem":
            yield Diagnostic("error", f"{finding.title}: {verdict.what}", why=_why(verdict), hint=_hint(verdict))
        elif verdict.level == "warning":
            yield Diagnostic("warning", f"{finding.title}: {verdict.what}", why=_why(verdict), hint=_hint(verdict))


def _why(verdict: Verdict) -> str:
    return "; ".join(verdict.evidence)


def _hint(verdict: Verdict) -> str:
    """The first remedy; the comment of its line in words."""
    if not verdict.fix:
        return ""
    command, _, comment = verdict.fix[0].partition("      # ")
    return f"{command} ({comment})" if comment else command
