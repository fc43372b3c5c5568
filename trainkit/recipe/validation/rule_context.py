"""What a rule over settings may look at, and how it says what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trainkit.errors import Diagnostic, Origin
from trainkit.recipe.layers.merge import value_at
from trainkit.recipe.layers.paths import Files
from trainkit.recipe.validation.validate import Locate

# Key and value of program.script or program.module -> its program.kind, with what tells it; empty where nothing does.
KindOf = Callable[[str, str], str]


def no_kind(key: str, target: str) -> str:
    """For callers who look into no program."""
    return ""


@dataclass(frozen=True)
class Context:
    """What a rule may look at: the merged tree above defaults, places, and whether files exist."""

    tree: Mapping[str, Any]
    defaults: Mapping[str, Any]
    locate: Locate
    files: Files
    absolute: Callable[[str], str]
    broken: frozenset[str] = frozenset()  # keys with an error of their own
    incomplete: bool = False  # whether a layer could not be read, and what it gives is not known
    kind_of: KindOf = no_kind

    def get(self, key: str) -> Any:
        """The value at a key, or its default. It may be of a wrong type: that is reported elsewhere."""
        value = value_at(self.tree, key)
        return value_at(self.defaults, key) if value is None else value

    def unknown(self, key: str) -> bool:
        """Whether no layer gives the key, and one that could not be read may have meant to."""
        return self.incomplete and value_at(self.tree, key) is None

    def whole(self, key: str) -> int | None:
        """The value at a key if it is a whole number."""
        value = self.get(key)
        return value if type(value) is int else None

    def error(self, key: str, what: str, hint: str, *, why: str = "", at: Origin | None = None) -> Diagnostic:
        """An error at a key's place."""
        return Diagnostic("error", what, key, at or self.locate(key), why, hint)
