"""What a check is, and what it returns: findings with evidence and fix."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from trainkit.doctor.host import Host, Target

Level = Literal["ok", "skipped", "note", "warning", "problem"]
LEVELS: tuple[Level, ...] = ("ok", "skipped", "note", "warning", "problem")  # from harmless to worst


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found.

    what: a clause without a period; evidence: paths, versions, values, a line each; fix: commands to paste.
    """

    level: Level
    what: str
    evidence: tuple[str, ...] = ()
    fix: tuple[str, ...] = ()


def ok(what: str, *evidence: str) -> Finding:
    """Nothing is wrong."""
    return Finding("ok", what, evidence)


def skipped(why: str) -> Finding:
    """Not examined, and why."""
    return Finding("skipped", why)


NO_CUDA = skipped("the plan uses no CUDA card")
NO_CUDA_BUILDS = skipped("the plan compiles nothing for CUDA cards")


def worst(levels: Iterable[Level]) -> Level:
    """The worst level; ok where there is none. A check that was skipped in part was not skipped."""
    found = set(levels)
    if found == {"skipped"}:
        return "skipped"
    return max(found - {"skipped"}, key=LEVELS.index, default="ok")


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What one check found, and in how many seconds."""

    name: str
    title: str
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def level(self) -> Level:
        """The worst of its findings."""
        return worst(finding.level for finding in self.findings)


@dataclass(frozen=True, slots=True)
class Check:
    """One independent check. title: what is examined, for people; limit: seconds after which it is given up.

    run: at least one finding; what the system refuses (OSError) becomes one.
    fast: it takes milliseconds, so `trainkit run` calls it before the start.
    """

    name: str
    title: str
    limit: float
    run: Callable[[Host, Target], Iterable[Finding]]
    fast: bool = False


def requirement_level(target: Target) -> Level:
    """How bad it is that something is missing: a problem for a plan that needs it, a warning without a recipe."""
    return "warning" if target.anything else "problem"
