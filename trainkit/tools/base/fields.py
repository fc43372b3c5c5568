"""What a row of a foreign tool's table is: the tool's name of a setting, and the way from the recipe to it and back.

A tool's table is the only place that knows its keys. Rendering, import, export, the answer to "what reaches the
program", the proof's expectations, flags and documentation tables are all read off it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, TypeVar

from trainkit.launch_plan.context import Context
from trainkit.machine.facts import at_least

Settings = Mapping[str, Any]  # values by recipe key


class Unset(Enum):
    """The one value that means: nothing is said."""

    UNSET = "unset"


UNSET: Final = Unset.UNSET


@dataclass(frozen=True, slots=True)
class Unsupported:
    """Why a value has no counterpart on the other side, and what to do about it."""

    why: str
    instead: str = ""


@dataclass(frozen=True, slots=True)
class Field:
    """One setting of a foreign tool.

    name: as the tool's newest version writes it (`zero_optimization.stage`, `per_device_train_batch_size`).
    keys: the recipe keys that it stands for; the first is named in messages. Empty: the tool's own affair.
    encode: recipe -> the tool's value; UNSET says nothing. decode: the tool's value -> settings of the recipe.
    default: what the tool takes where nothing is said, so that "not said" can be told from "said".
    since, until: the first version of the tool that has the field, and the first that no longer has it.
    aliases: older or other names, newest first. help: one line for tables, where the recipe's own will not do.
    """

    name: str
    keys: tuple[str, ...] = ()
    encode: Callable[[Context], Any] = lambda context: UNSET
    decode: Callable[[Any], Settings | Unsupported] = lambda value: Unsupported("a recipe has no such setting")
    default: Any = UNSET
    since: str = ""
    until: str = ""
    aliases: tuple[str, ...] = ()
    help: str = ""

    def known_to(self, version: str) -> bool:
        """Whether a version of the tool has the field; an unknown version is taken for the newest."""
        if not version:
            return not self.until
        return (not self.since or at_least(version, self.since)) and not (self.until and at_least(version, self.until))


def same(key: str) -> tuple[Callable[[Context], Any], Callable[[Any], Settings]]:
    """Encoder and decoder of a field whose value is that of one recipe key as it is."""
    return (lambda context: setting(context, key)), (lambda value: {key: value})


def boolean(key: str, yes: Any = True, no: Any = False) -> Callable[[Any], Settings | Unsupported]:
    """Decoder of a yes-or-no field. yes, no: what the key is set to; UNSET sets nothing."""

    def decode(value: Any) -> Settings | Unsupported:
        if not isinstance(value, bool):
            return Unsupported("true or false is expected", "write true or false without quotes")
        meant = yes if value else no
        return {} if meant is UNSET else {key: meant}

    return decode


def setting(context: Context, key: str) -> Any:
    """The recipe's value at a key, defaults included; UNSET where the chosen kind of a section has no such key."""
    found: Any = context.recipe
    for name in key.split("."):
        if not hasattr(found, name):
            return UNSET
        found = getattr(found, name)
    return found


def chosen(context: Context, key: str) -> Any:
    """The recipe's value at a key; UNSET also where it is null, which leaves the choice to the tool."""
    found = setting(context, key)
    return UNSET if found is None else found


def is_set(context: Context, *keys: str) -> bool:
    """Whether a layer gives one of the keys, or something below it."""
    return any(keys_set_below(context, key) for key in keys)


def keys_set_below(context: Context, key: str) -> tuple[str, ...]:
    """The keys at and below a key that layers give: `optimizer.args` is given by `optimizer.args.momentum`."""
    history = context.resolved.history
    found = (each for each in history if each == key or each.startswith(f"{key}."))
    return tuple(each for each in found if context.resolved.given(each))


FieldT = TypeVar("FieldT", bound=Field)


def by_name(fields: Iterable[FieldT]) -> Mapping[str, FieldT]:
    """The fields by every name that they have or had."""
    return {name: field for field in fields for name in (*field.aliases, field.name)}
