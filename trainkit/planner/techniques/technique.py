"""One row of the table of techniques, and the ways to tell whether a plan has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trainkit.plan.context import Context
from trainkit.recipe.schema import Recipe

Chosen = Callable[[Context], bool]


@dataclass(frozen=True, slots=True)
class Technique:
    """One technique.

    choice: how a recipe asks for it, from the key on; flag: how a command line does. when: to use it.
    in_force: whether a plan has it. Several rows may stand for the values of one key.
    """

    choice: str
    flag: str
    speed: str
    memory: str
    when: str
    in_force: Chosen

    @property
    def key(self) -> str:
        """The recipe key."""
        return self.choice.partition(":")[0]


def setting_of(recipe: Recipe, key: str) -> object:
    """The value at a dotted key; None where the section has no such setting."""
    found: object = recipe
    for name in key.split("."):
        found = getattr(found, name, None)
    return found


def has(key: str, *values: object) -> Chosen:
    """Whether the setting has one of the values; without values, whether it is on at all."""

    def chosen(context: Context) -> bool:
        value = setting_of(context.recipe, key)
        return value in values if values else bool(value)

    return chosen


def computes_in(dtype: str) -> Chosen:
    """Whether that is the plan's number format."""
    return lambda context: context.dtype == dtype


def on_cuda(chosen: Chosen) -> Chosen:
    """The same, where the plan has cards."""
    return lambda context: context.topology.device == "cuda" and chosen(context)
