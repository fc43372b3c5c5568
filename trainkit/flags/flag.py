"""One named flag of the command line: how it is used, which keys it sets, and how a use of it is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from trainkit.errors import Diagnostic, Origin
from trainkit.recipe.layers.assignment import Assignment, read_value
from trainkit.recipe.layers.paths import Files

ON, OFF = ("true", "1", "yes"), ("false", "0", "no")  # values of a switch


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

    @property
    def on(self) -> bool:
        """Whether a switch is meant to be on: bare, or with a true word."""
        return self.value is None or self.value.lower() in ON


Outcome = tuple[list[Assignment], list[Diagnostic]]
Reader = Callable[[Use], Outcome]


@dataclass(frozen=True)
class Flag:
    """One named flag.

    usage: `--bf16` is a switch, `--seed SEED` takes a value, `--profile [STEPS]` may take one.
    keys: the recipe keys that it sets. read: what a use of it means.
    """

    usage: str
    keys: tuple[str, ...]
    help: str
    read: Reader
    unit: str = ""

    @property
    def name(self) -> str:
        """The name with underscores, without dashes."""
        return self.usage[2:].partition(" ")[0]

    @property
    def takes(self) -> Literal["value", "switch", "optional"]:
        """Whether a value follows."""
        metavar = self.usage.partition(" ")[2]
        return "optional" if metavar.startswith("[") else "value" if metavar else "switch"


def setting_reader(key: str, modifier: str = "") -> Reader:
    """Set a key to the flag's value, read as YAML. modifier: that of a dotted override."""

    def read(use: Use) -> Outcome:
        value, found = read_value(key, use.value or "", use.origin)
        failed = any(each.severity == "error" for each in found)
        return ([] if failed else [Assignment(key, value, use.origin, modifier)]), found

    return read


def switch_reader(key: str) -> Reader:
    """Set a key that is true or false."""
    return lambda use: ([use.assign(key, use.on)], [])
