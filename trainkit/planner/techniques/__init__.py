"""The techniques of the built-in trainer: what each does to speed and to memory, as one table.

A plan lists those in force from it, and the README's table is made from it.
"""

from __future__ import annotations

from trainkit.optimizers import optimizer
from trainkit.plan.context import Context
from trainkit.plan.model import TechniqueInForce
from trainkit.planner.techniques import on_a_device, over_ranks
from trainkit.planner.techniques.technique import Technique, value_of

__all__ = ["TECHNIQUES", "Technique", "techniques_in_force"]

TECHNIQUES: tuple[Technique, ...] = (*on_a_device.ROWS, *over_ranks.ROWS)


def techniques_in_force(context: Context) -> tuple[TechniqueInForce, ...]:
    """What the plan lists. A program of the user's own has none that are known of."""
    if context.recipe.program.kind != "builtin":
        return ()
    chosen = [row for row in TECHNIQUES if row.is_in_force(context)]
    found = [TechniqueInForce(row.key, _value(context, row.key), row.speed, row.memory) for row in chosen]
    kind = optimizer(context.recipe.optimizer.name)
    return (TechniqueInForce("optimizer.name", context.recipe.optimizer.name, kind.speed, kind.state), *found)


def _value(context: Context, key: str) -> str:
    """The value as a recipe writes it."""
    value = value_of(context, key)
    return str(value).lower() if isinstance(value, bool) else str(value)
