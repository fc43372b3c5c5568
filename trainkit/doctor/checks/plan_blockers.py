"""What the plan itself says that this machine lacks: cards, packages, whatever stops `trainkit run`."""

from __future__ import annotations

from trainkit.doctor.check import Check, Finding, ok
from trainkit.doctor.host import Host, Target


def run(host: Host, target: Target) -> list[Finding]:
    """One problem for each blocker of the plan."""
    assert target.plan is not None
    blockers = [notice for notice in target.plan.notices if notice.severity == "blocker"]
    found = [
        Finding("problem", notice.what.rstrip("."), (), (_pasted(notice.hint),) if notice.hint else ())
        for notice in blockers
    ]
    return found or [ok("this machine can run it, as far as the plan can tell")]


def _pasted(hint: str) -> str:
    return hint.removeprefix("Run: ").rstrip(".")


def _unneeded(target: Target) -> str:
    return "" if target.plan else "no recipe is named"


PLAN_BLOCKERS = Check("plan", "plan", 1.0, run, _unneeded)  # not fast: `trainkit run` shows the blockers itself
