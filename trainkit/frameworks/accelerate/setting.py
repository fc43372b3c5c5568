"""One setting of `Accelerator()`: the variable that it reads, and the same in accelerate's config file."""

from __future__ import annotations

from dataclasses import dataclass

from trainkit.plan.context import Context
from trainkit.plan.model import Variable

Written = bool | int | str


@dataclass(frozen=True, slots=True)
class Setting:
    """A value, as the environment has it and as the file has it.

    variable: its name, and value: its parts. key: of the file, dotted; empty where only the environment carries it.
    written: the value in the file. keys: recipe keys that made it; rule: why, where none did.
    """

    variable: str
    value: tuple[str | Variable, ...]
    key: str = ""
    written: Written = ""
    keys: tuple[str, ...] = ()
    rule: str = ""


def given(context: Context, key: str) -> bool:
    """Whether a layer sets the key."""
    return context.resolved.given(key) is not None


def word(value: Written) -> str:
    """A value as accelerate launch writes most of them into the environment."""
    return str(value).lower() if isinstance(value, bool) else str(value)
