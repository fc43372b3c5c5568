"""The batch triangle as far as one layer can contradict itself; planner/batch.py solves it with the number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainkit.errors import Diagnostic
from trainkit.recipe.layers.layer import Layer
from trainkit.recipe.layers.merge import Merge, value_at
from trainkit.recipe.resolved import Entry

CORNERS = ("batch.global", "batch.micro", "batch.accumulation")
# Where the weakest layer gives several corners, the first of these gives way.
GIVES_WAY = ("accumulation", "global", "micro")


def contradictions(layers: Sequence[Layer], state: Merge) -> list[Diagnostic]:
    """An error where one layer gives all three corners, all three count, and they cannot agree.

    global = micro x accumulation x ranks. Without knowing the ranks, global must be a multiple of micro x accumulation;
    with them (`nodes.count` x `nodes.processes_per_node`, where both are numbers) the product must be equal. Corners
    from different layers are left to planning, where the weakest gives way.
    """
    winners = [state.history[corner][-1] for corner in CORNERS if state.history.get(corner)]
    if len(winners) < 3 or len({entry.origin.strength for entry in winners}) > 1:
        return []
    total, micro, accumulation = (entry.value for entry in winners)
    if not all(type(value) is int and value > 0 for value in (total, micro, accumulation)):
        return []
    ranks = _ranks(state.tree)
    product = micro * accumulation
    if total % product == 0 and (ranks is None or total == product * ranks):
        return []
    others = ", ".join(
        f"{corner} at {entry.origin.place}" for corner, entry in zip(CORNERS[1:], winners[1:], strict=True)
    )
    fit = f"{product} * ranks" if ranks is None else f"{product * ranks} with {ranks} rank{'s' if ranks > 1 else ''}"
    return [
        Diagnostic(
            "error",
            f"batch.global {total}, batch.micro {micro} and batch.accumulation {accumulation} contradict each other",
            CORNERS[0],
            winners[0].origin,
            why=f"global = micro * accumulation * ranks, and {micro} * {accumulation} makes {fit} ({others})",
            hint="give any two of the three; the third follows",
        )
    ]


def yielding_corner(history: Mapping[str, Sequence[Entry]]) -> str | None:
    """The corner (`accumulation`) that gives way where several layers give all three; None where nothing needs to."""
    winners = {name: history.get(f"batch.{name}", ()) for name in GIVES_WAY}
    strengths = {name: entries[-1].origin.strength for name, entries in winners.items() if _is_number(entries)}
    if len(strengths) < len(GIVES_WAY) or len(set(strengths.values())) == 1:
        return None
    weakest = min(strengths.values())
    return next(name for name in GIVES_WAY if strengths[name] == weakest)


def _is_number(entries: Sequence[Entry]) -> bool:
    return bool(entries) and not entries[-1].dropped and type(entries[-1].value) is int


def _ranks(tree: Mapping[str, Any]) -> int | None:
    """The number of ranks where the recipe alone says it."""
    if value_at(tree, "strategy.kind") == "single":
        return 1
    nodes, processes = value_at(tree, "nodes.count"), value_at(tree, "nodes.processes_per_node")
    nodes = 1 if nodes is None else nodes
    return nodes * processes if type(nodes) is int and type(processes) is int else None
