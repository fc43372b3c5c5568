"""The batch triangle as far as one layer can contradict itself; planner/batch.py solves it with the number of ranks."""

from __future__ import annotations

from collections.abc import Mapping

from trainkit.errors import Diagnostic
from trainkit.recipe.layers.merge import Merge
from trainkit.text import counted

# Where layers of equal strength disagree, the first of these gives way.
GIVES_WAY = ("accumulation", "global", "micro")


def contradictions(state: Merge) -> list[Diagnostic]:
    """An error where one layer gives all three corners, all three count, and they cannot agree.

    global = micro x accumulation x ranks. Without knowing the ranks, global must be a multiple of micro x accumulation;
    with them (`nodes.count` x `nodes.processes_per_node`, where both are numbers) the product must be equal. Corners
    from different layers are left to planning, where the weakest gives way.
    """
    corners = [f"batch.{name}" for name in ("global", "micro", "accumulation")]
    winners = [state.history[corner][-1] for corner in corners if state.history.get(corner)]
    if len(winners) < 3 or len({entry.origin.strength for entry in winners}) > 1:
        return []
    total, micro, accumulation = (entry.value for entry in winners)
    if not all(type(value) is int and value > 0 for value in (total, micro, accumulation)):
        return []
    processes = 1 if state.get("strategy.kind") == "single" else state.get("nodes.processes_per_node")
    nodes = 1 if state.get("strategy.kind") == "single" else state.get("nodes.count") or 1
    ranks = nodes * processes if type(nodes) is int and type(processes) is int else None  # which the recipe alone says
    product = micro * accumulation
    if total % product == 0 and (ranks is None or total == product * ranks):
        return []
    given = (f"{key} at {entry.origin.place}" for key, entry in zip(corners[1:], winners[1:], strict=True))
    fit = f"{product} * ranks" if ranks is None else f"{product * ranks} with {counted(ranks, 'rank')}"
    what = f"batch.global {total}, batch.micro {micro} and batch.accumulation {accumulation} contradict each other"
    why = f"global = micro * accumulation * ranks, and {micro} * {accumulation} makes {fit} ({', '.join(given)})"
    hint = "give any two of the three; the third follows"
    return [Diagnostic("error", what, corners[0], winners[0].origin, why, hint)]


def yielding_corner(strengths: Mapping[str, int]) -> str | None:
    """The corner that gives way, by the strength of what gives each; None unless three disagree in it."""
    if len(strengths) < len(GIVES_WAY) or len(set(strengths.values())) == 1:
        return None
    return next(name for name in GIVES_WAY if strengths[name] == min(strengths.values()))
