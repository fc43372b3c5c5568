"""One named flag of the command line: what it is called, what it takes, and what a use of it means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from trainkit.errors import Diagnostic, Origin
from trainkit.recipe.layers.assignment import Assignment, read_value
from trainkit.recipe.layers.paths import Files

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
