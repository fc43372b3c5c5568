"""One row of the table from recipe to TrainingArguments: the recipe's keys, the field, and its value."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trainkit.frameworks.hf_trainer.versions import NEWEST_SEEN
from trainkit.plan.context import Context

Value = bool | int | float | str | list[str] | Mapping[str, object] | None


@dataclass(frozen=True, slots=True)
class Unfit:
    """A setting for which Trainer has no counterpart: why, and what to do."""

    why: str
    instead: str


@dataclass(frozen=True, slots=True)
class Row:
    """One field of TrainingArguments.

    field: its newest name. keys: the recipe keys that decide it; the first is named in messages.
    value: what the recipe makes of it; None says nothing.
    always: given to the program even where no layer sets a key, because the plan decides it.
    owned: the plan speaks of it, so the program's own arguments may not say otherwise, set or not.
    """

    field: str
    keys: tuple[str, ...]
    value: Callable[[Context], Value | Unfit]
    always: Callable[[Context], bool] = lambda context: False
    owned: bool = False


def plain(field: str, key: str, *, owned: bool = False) -> Row:
    """A field that takes the value of one key as it is."""
    return Row(field, (key,), lambda context: setting(context, key), owned=owned)


def setting(context: Context, key: str) -> Value:
    """The recipe's value at a key, defaults included; None where the chosen kind of a section has no such key."""
    found: object = context.recipe
    for name in key.split("."):
        found = getattr(found, name, None)
    return found  # type: ignore[return-value]  # rows name settings with values of these types


def given(context: Context, *keys: str) -> bool:
    """Whether a layer sets one of the keys, or a name of the user's own below it."""
    return any(set_below(context, key) for key in keys)


def set_below(context: Context, key: str) -> tuple[str, ...]:
    """The keys at and below a key that layers set: `optimizer.args` is set by `optimizer.args.momentum`."""
    history = context.resolved.history
    found = (each for each in history if each == key or each.startswith(f"{key}."))
    return tuple(each for each in found if context.resolved.given(each))


def version(context: Context) -> str:
    """The installed transformers; the newest that the tables know where it is missing, which blocks the run."""
    return context.facts.packages.get("transformers", NEWEST_SEEN)


def words(value: Value) -> tuple[str, ...]:
    """A value as HfArgumentParser reads it."""
    if isinstance(value, list):
        return tuple(value)
    return (json.dumps(value),) if isinstance(value, Mapping) else (str(value),)
