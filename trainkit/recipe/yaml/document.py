"""A text as it was read: plain values, a position for each, and what was wrong; and how texts may differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainkit.recipe.yaml.syntax import Mark, Problem


@dataclass(frozen=True)
class Dialect:
    """What a text may contain beyond plain YAML, by dotted path.

    modifiers: whether `name+` and `name!` address `name`.
    open: paths of mappings whose keys are the user's own words, taken literally.
    verbatim: paths below which plain scalars of the given types keep the characters as written (`1.10`).
    root: the path at which the whole text stands.
    nested: path of a mapping each of whose entries is such a text again, with paths of its own.
    """

    root: str = ""
    modifiers: bool = False
    open: frozenset[str] = frozenset()
    verbatim: Mapping[str, tuple[type, ...]] = field(default_factory=dict)
    nested: str = ""

    def inner(self, path: str) -> str:
        """The path as the innermost text that it lies in counts it."""
        if self.nested and path.startswith(f"{self.nested}."):
            return path.removeprefix(f"{self.nested}.").partition(".")[2]
        return path


PLAIN = Dialect()


@dataclass(frozen=True)
class Document:
    """A text as read. `values` and `keys` hold positions by dotted path; list elements stand under their index."""

    tree: Any
    values: Mapping[str, Mark]
    keys: Mapping[str, Mark]
    lines: tuple[str, ...]
    errors: tuple[Problem, ...]
    warnings: tuple[Problem, ...]


def printable(line: str) -> str:
    """The line, cut to a length that can be shown, with control characters made visible."""
    return "".join(char if char.isprintable() or char == "\t" else "\ufffd" for char in line[:500])
