"""The command line's named flags as one table: most read off the schema, the rest with a reader of their own."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from trainkit.errors import Diagnostic, Origin
from trainkit.recipe.assignment import Assignment, read_value
from trainkit.recipe.fields import Setting, schema
from trainkit.recipe.files import Files
from trainkit.recipe.wanted import choices, takes_switch

Takes = Literal["value", "switch", "optional"]


@dataclass(frozen=True)
class Use:
    """One flag as it was used. value: its text, None for a bare flag; current: the weaker layers' value at a key."""

    name: str
    value: str | None
    origin: Origin
    cwd: str
    files: Files
    current: Callable[[str], Any]
    given: frozenset[str]  # names of all flags on this command line

    def assign(self, key: str, value: Any) -> Assignment:
        """The assignment of a value to a key, with this flag as origin."""
        return Assignment(key, value, self.origin)

    def error(self, what: str, hint: str, *, why: str = "", key: str = "", origin: Origin | None = None) -> Diagnostic:
        """An error at this flag, or at a place in the file that it names."""
        return Diagnostic("error", what, key, origin or self.origin, why, hint)


Outcome = tuple[list[Assignment], list[Diagnostic]]
Reader = Callable[[Use], Outcome]


@dataclass(frozen=True)
class Flag:
    """One named flag. keys: the recipe keys that it sets; read: what a use of it means."""

    name: str
    takes: Takes
    keys: tuple[str, ...]
    help: str
    read: Reader
    unit: str = ""
    metavar: str = ""


@dataclass(frozen=True)
class FlagHelp:
    """What help and reference text say of a flag."""

    flag: str  # with dashes, and what it takes
    keys: tuple[str, ...]
    help: str
    unit: str


def setting_reader(key: str) -> Reader:
    """Set a key to the flag's value, read as a dotted override reads it."""

    def read(use: Use) -> Outcome:
        value, found = read_value(key, use.value or "", use.origin)
        return ([] if any(each.severity == "error" for each in found) else [use.assign(key, value)]), found

    return read


def switch_reader(key: str) -> Reader:
    """Set a yes-or-no key."""
    return lambda use: ([use.assign(key, switched_on(use))], [])


def switched_on(use: Use) -> bool:
    """Whether a switch is meant to be on: bare, or with a true word."""
    return use.value is None or use.value.lower() == "true"


@cache
def flags() -> Mapping[str, Flag]:
    """Every named flag by its name with underscores."""
    from trainkit.recipe.flag_readers import SPECIAL

    table = {setting.flag: _derived(setting) for setting in schema().all_settings() if setting.flag}
    table.update({flag.name: flag for flag in SPECIAL})
    return dict(sorted(table.items()))


def flag_reference(width: int = 100) -> str:
    """All flags as text of at most `width` columns: what each takes, what it means, which recipe keys it sets."""
    return "".join(f"  {each.flag}\n{_indented(each, width)}\n" for each in flag_table())


def _indented(flag: FlagHelp, width: int) -> str:
    unit = f" [{flag.unit}]" if flag.unit else ""
    parts = (f"{flag.help}{unit}", f"sets {', '.join(flag.keys)}")
    indent = " " * 6
    return "\n".join(
        textwrap.fill(part, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
        for part in parts
    )


def flag_table() -> tuple[FlagHelp, ...]:
    """All flags with what they take, the keys they set, help and unit, in alphabetical order."""
    return tuple(FlagHelp(_usage(flag), flag.keys, flag.help, flag.unit) for flag in flags().values())


def _usage(flag: Flag) -> str:
    metavar = flag.metavar or "VALUE"
    return {"value": f"--{flag.name} {metavar}", "switch": f"--{flag.name}", "optional": f"--{flag.name} [{metavar}]"}[
        flag.takes
    ]


def _derived(setting: Setting) -> Flag:
    if takes_switch(setting):
        return Flag(
            setting.flag, "switch", (setting.key,), setting.description, switch_reader(setting.key), setting.unit
        )
    options = [str(choice) for choice in choices(setting.annotation)]
    metavar = "|".join(options) if 1 < len(options) <= 6 else setting.key.rpartition(".")[2].upper()
    return Flag(
        setting.flag, "value", (setting.key,), setting.description, setting_reader(setting.key), setting.unit, metavar
    )
