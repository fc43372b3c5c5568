"""What the plan itself finds missing on this machine: cards, packages, whatever stops `trainkit run`."""

from __future__ import annotations

from trainkit.doctor.check import Check, Finding, ok
from trainkit.doctor.host import Host, Target


def run(host: Host, target: Target) -> list[Finding]:
    """One problem for each blocker of the plan."""
    assert target.plan is not None
    blockers = [notice for notice in target.plan.notices if notice.severity == "blocker"]
    fixes = [notice.hint.removeprefix("Run: ").rstrip(".") for notice in blockers]
    found = [
        Finding("problem", notice.what.rstrip("."), (), (fix,) if fix else ())
        for notice, fix in zip(blockers, fixes, strict=True)
    ]
    return found or [ok("this machine can run it, as far as the plan can tell")]


def _unneeded(target: Target) -> str:
    return "" if target.plan else "no recipe is named"


PLAN_BLOCKERS = Check("plan", "plan", 1.0, run, _unneeded)  # not fast: `trainkit run` shows the blockers itself
