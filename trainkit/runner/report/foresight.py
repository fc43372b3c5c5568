"""What a run took, beside what its plan foresaw."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainkit.foresight.calibration import Record
from trainkit.launch_plan.model import Foresight, Plan
from trainkit.text import format_memory

Summary = Mapping[str, Any]
# Measured -> what was foreseen of it, and how it is called.
FIGURES: Mapping[str, tuple[str, str]] = {
    "allocated": ("allocated", "allocated"),
    "reserved": ("reserved", "reserved"),
    "total": ("total", "in all"),
    "step": ("step", "a step"),
}


def compared(plan: Plan, summary: Summary) -> dict[str, Any] | None:
    """Foreseen, measured and the error of each as a share; None for a run of which nothing was foreseen or measured."""
    found = plan.foresight
    measured = _measured(plan, summary)
    if found is None or not measured:
        return None
    foreseen = {name: getattr(found, FIGURES[name][0]) for name in measured}
    errors = {name: round(foreseen[name] / value - 1, 4) for name, value in measured.items() if foreseen[name]}
    return {"basis": found.basis, "foreseen": foreseen, "measured": measured, "error": errors}


def _measured(plan: Plan, summary: Summary) -> dict[str, float]:
    """Bytes of the rank that took most, and seconds of a step."""
    ranks = [each for each in summary.get("memory") or () if isinstance(each, Mapping)]
    found: dict[str, float] = {}

    def most(name: str) -> int:
        return max((each[name] for each in ranks if isinstance(each.get(name), int)), default=0)

    if plan.cards:
        found = {"allocated": most("peak_allocated"), "reserved": most("peak_reserved")}
        if not plan.shares_cards:
            found["total"] = max((summary.get("gpu_memory_occupied") or {}).values(), default=0)
    else:
        found["total"] = most("rss")
    samples, size = summary.get("samples_per_second"), summary.get("global_batch")
    if isinstance(samples, int | float) and samples and isinstance(size, int):
        found["step"] = float(f"{size / samples:.4g}")
    return {name: value for name, value in found.items() if value}


def record(plan: Plan, foresight: Mapping[str, Any]) -> Record | None:
    """What is kept of a run for the next on the same device."""
    found: Foresight | None = plan.foresight
    if found is None:
        return None
    measured = foresight["measured"]
    held = measured.get("reserved", 0) if plan.cards else found.allocated
    alone = "total" in measured and (plan.cards or found.basis == "traced")
    return Record(
        seconds=measured.get("step", 0.0) if plan.topology.world_size == 1 else 0.0,
        foreseen=found.step or 0.0,
        beside=max(0, int(measured["total"] - held)) if alone else 0,
        allocated=int(measured.get("allocated", 0)),
        allocated_foreseen=found.allocated,
        work=dict(found.work),
    )


def rows(foresight: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    """(label, words) for the page of a run."""
    if not foresight:
        return
    for name, value in foresight["measured"].items():
        foreseen, error = foresight["foreseen"].get(name), foresight["error"].get(name)
        if foreseen is None or error is None:
            continue
        shown = [f"{each:.3g} s" if name == "step" else format_memory(each) for each in (foreseen, value)]
        yield f"Foreseen, {FIGURES[name][1]}", f"{shown[0]}, measured {shown[1]} ({error:+.1%}; {foresight['basis']})"
