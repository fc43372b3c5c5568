"""One technique of the built-in trainer: how a recipe asks for it, what it does, and whether a plan has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trainkit.plan.context import Context
from trainkit.recipe.schema.fields import schema

# A plan has a line for its strategy and its optimizer whatever they are, so no row of theirs adds another.
LISTED_ANYWAY = ("strategy.kind", "optimizer.name")


@dataclass(frozen=True, slots=True)
class Technique:
    """One technique.

    choice: how a recipe asks for it, from the key on. when: to use it. other_flag: how a command line asks for it,
    where that is not the flag of the key. device: the only one on which it does anything. also: another value that
    means it. in_force: whether a plan has it, where the choice alone does not tell. A key may have several rows.
    """

    choice: str
    speed: str
    memory: str
    when: str
    other_flag: str = ""
    device: str = ""
    also: str = ""
    in_force: Callable[[Context], bool] | None = None

    @property
    def key(self) -> str:
        """The recipe key."""
        return self.choice.partition(":")[0]

    @property
    def flag(self) -> str:
        """How a command line asks for it; empty where it has no way."""
        setting, value = schema().settings[self.key][0], self.choice.partition(": ")[2]
        if value.startswith("zero") or setting.variant.startswith("zero"):
            return "--deepspeed FILE"
        own = f"--{setting.flag}{'' if value == 'true' else f' {value}'}" if setting.flag else ""
        return self.other_flag or own

    def is_in_force(self, context: Context) -> bool:
        """Whether a plan has it."""
        if self.key in LISTED_ANYWAY or self.device not in ("", context.topology.device):
            return False
        if self.key.startswith("efficiency.compile.") and not context.recipe.efficiency.compile.enabled:
            return False
        if self.in_force:
            return self.in_force(context)
        asked, chosen = self.choice.partition(": ")[2], value_of(context, self.key)
        return bool(chosen) if asked in ("true", "n") else chosen in (asked, self.also or asked)


def value_of(context: Context, key: str) -> object:
    """The value at a dotted key, the plan's own where the recipe leaves it open; None for no such setting."""
    found: object = context.recipe
    for name in key.split("."):
        found = getattr(found, name, None)
    return {"batch.accumulation": context.batch.accumulation, "precision.dtype": context.dtype}.get(key, found)
