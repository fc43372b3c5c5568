"""What accelerate is given, by file or by flag, under one name each: the base of everything that reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainkit.errors import Origin
from trainkit.frameworks.accelerate.fields import SETTINGS
from trainkit.frameworks.base.draft import Draft, ImportContext
from trainkit.frameworks.base.fields import Unsupported
from trainkit.recipe.layers.assignment import Assignment

BY_NAME = {each.name: each for each in SETTINGS}
# Names that older versions used, and today's.
RENAMED = {alias: each.name for each in SETTINGS for alias in each.aliases}
NOTHING: tuple[Any, ...] = (None, [], {}, "")


@dataclass(frozen=True, slots=True)
class ConfigValue:
    """One value, where it is given, and whether by a flag (a file's value of some keys is never applied)."""

    value: Any
    origin: Origin
    flag: bool = False


@dataclass
class ImportedConfig:
    """Everything that accelerate is given. values: by the file's dotted names; used: names that have been understood.

    program: whether a program is named; without one, the recipe is for the built-in trainer.
    """

    draft: Draft
    context: ImportContext
    values: dict[str, ConfigValue]
    program: bool = False
    used: set[str] = field(default_factory=set)

    def get(self, name: str) -> Any:
        """The value under a name, None where there is none; it counts as understood."""
        self.used.add(name)
        return self.values[name].value if name in self.values else None

    def by_flag(self, name: str) -> bool:
        """Whether a flag gives the value."""
        return name in self.values and self.values[name].flag

    def origin(self, name: str) -> Origin:
        """Where the value under a name is given."""
        return self.values[name].origin

    def below(self, section: str) -> dict[str, ConfigValue]:
        """What a nested mapping holds, by name."""
        start = f"{section}."
        return {name.removeprefix(start): value for name, value in self.values.items() if name.startswith(start)}

    def take(self, name: str, reason: str = "") -> None:
        """Set what a value means by the table; one that means nothing in a recipe is an error."""
        value = self.get(name)
        settings = {} if value is None else BY_NAME[name].decode(value)
        if isinstance(settings, Unsupported):
            what = f"{name.rpartition('.')[2]} {value} cannot be taken over"
            self.draft.fail(what, self.origin(name), settings.instead, settings.why)
            return
        for key, each in settings.items():
            self.put(name, key, each, reason)

    def put(self, name: str, key: str, value: Any, reason: str = "") -> None:
        """Set a key to what a name means, or note what is wrong with the value."""
        self.used.add(name)
        self.draft.put_checked(Assignment(key, value, self.origin(name)), reason)

    def remark(self, name: str, text: str) -> None:
        """Note something on a value, which with this is understood."""
        self.used.add(name)
        place = "" if self.by_flag(name) else f"{self.origin(name).place}: "
        self.draft.remark(f"{place}{text}")


def flattened(tree: Mapping[str, Any], at: Callable[[str], Origin]) -> dict[str, ConfigValue]:
    """The values of a file, by dotted name of today. at: the place of a name."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= (
            {f"{name}.{below}": each for below, each in value.items()} if isinstance(value, Mapping) else {name: value}
        )
    return {RENAMED.get(name, name): ConfigValue(each, at(name)) for name, each in found.items() if each not in NOTHING}
