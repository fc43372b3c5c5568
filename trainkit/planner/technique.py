"""One row of the table of techniques, and the ways to tell whether a plan has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trainkit.plan.context import Context

InForce = Callable[[Context], bool]
# A plan has a line for its strategy and its optimizer whatever they are, so no row of theirs adds another.
LISTED_ANYWAY = ("strategy.kind", "optimizer.name")


@dataclass(frozen=True, slots=True)
class Technique:
    """One technique.

    choice: how a recipe asks for it, from the key on; flag: how a command line does. when: to use it.
    device: the only one on which it does anything. in_force: whether a plan has it, where the choice alone does not
    tell. Several rows may be for the values of one key.
    """

    choice: str
    speed: str
    memory: str
    when: str
    flag: str = ""
    device: str = ""
    in_force: InForce | None = None

    @property
    def key(self) -> str:
        """The recipe key."""
        return self.choice.partition(":")[0]

    def is_in_force(self, context: Context) -> bool:
        """Whether a plan has it."""
        if self.key in LISTED_ANYWAY or self.device not in ("", context.topology.device):
            return False
        value = self.choice.partition(": ")[2]
        chosen = self.in_force or (has(self.key) if value in ("true", "n") else has(self.key, value))
        return chosen(context)


def value_of(context: Context, key: str) -> object:
    """The value at a dotted key, the plan's own where the recipe leaves it open; None for no such setting."""
    decided = {"batch.accumulation": context.batch.accumulation, "precision.dtype": context.dtype}
    if key in decided:
        return decided[key]
    found: object = context.recipe
    for name in key.split("."):
        found = getattr(found, name, None)
    return found


def has(key: str, *values: object) -> InForce:
    """Whether the setting has one of the values; without values, whether it is on at all."""
    return lambda context: value_of(context, key) in values if values else bool(value_of(context, key))


def compiled_with(key: str, *values: object) -> InForce:
    """Whether the model is compiled, with one of these values."""
    return lambda context: context.recipe.efficiency.compile.enabled and has(key, *values)(context)


def packs(context: Context) -> bool:
    """Labelled texts are a sample each, whatever the setting says."""
    return has("data.packing")(context) and getattr(context.recipe.model, "task", "") != "sequence_classification"
