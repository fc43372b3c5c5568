"""Names that are imported when they are first used: registries that point upward, and tables that few plans need."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")


def load(place: str) -> Any:
    """The module at ``package.module``, or what ``package.module:name`` names in it."""
    module, _, name = place.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


def call(place: str) -> Callable[..., Any]:
    """A function that imports the one at a place when it is called."""

    def later(*given: Any, **named: Any) -> Any:
        return load(place)(*given, **named)

    return later


class Registry(Mapping[str, T]):
    """A dictionary from names to what is at a place, imported at first use. The order is that of the places."""

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = dict(places)
        self._loaded: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        if name not in self._loaded:
            self._loaded[name] = load(self._places[name])
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    # Mapping's own would import what is asked for, only to see whether it is there.
    def __contains__(self, name: object) -> bool:
        return name in self._places


@contextmanager
def without_plugins() -> Iterator[None]:
    """Have pydantic build models without plugins, of which the recipe's have none.

    What it imports to look for them in all installed packages takes a sixth of the time that loading the schema does.
    """
    name = "pydantic.plugin._loader"
    there, nothing = sys.modules.get(name), ModuleType(name)
    nothing.get_plugins = tuple  # type: ignore[attr-defined]
    sys.modules[name] = nothing
    try:
        yield
    finally:  # a user's script in this process may want its plugins
        del sys.modules[name]
        if there is not None:
            sys.modules[name] = there
