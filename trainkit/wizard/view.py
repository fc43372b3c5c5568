"""What is known when a question is asked: the machine, the recipe to start from, given settings, and the answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from trainkit.machine.facts import Facts
from trainkit.machine.selection import allocation
from trainkit.recipe.layers.paths import Files
from trainkit.recipe.schema.fields import schema, tagged_sections
from trainkit.wizard.question import Answer
from trainkit.wizard.recipe_values import Settings, belongs, same, section_kind


@dataclass(frozen=True)
class Base:
    """The recipe that the result extends. path: absolute, or the name of a shipped one; empty where there is none.

    name: as the user called it.
    """

    path: str = ""
    name: str = ""
    values: Settings = field(default_factory=dict)  # what it sets, by dotted key, defaults included


@dataclass(frozen=True)
class View:
    """Everything that a question may depend on.

    machine: gives the facts, which the first question does without.
    given: settings from files and flags; they win over answers.
    files: to look at the recipe's files; cwd: where relative paths start; environ: for references in the base.
    pending: settings that are still to be asked about.
    """

    machine: Callable[[], Facts]
    files: Files
    cwd: str
    base: Base = Base()
    given: Settings = field(default_factory=dict)
    answers: tuple[Answer, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    pending: frozenset[str] = frozenset()

    @property
    def facts(self) -> Facts:
        """The machine that the recipe is for."""
        return self.machine()

    @cached_property
    def chosen(self) -> Settings:
        """What answers and given settings say; a later answer wins over an earlier one, a given setting over both."""
        merged: dict[str, Any] = {}
        for answer in self.answers:
            merged.update(answer.sets)
        merged.update(self.given)
        return {key: value for key, value in merged.items() if belongs(key, merged, self.base.values)}

    def get(self, key: str) -> Any:
        """The value of a setting as the recipe would have it now; None where the section's kind has no such setting."""
        if key in self.chosen:
            return self.chosen[key]
        if self.extends(key):
            return self.base.values[key]
        section = key.partition(".")[0]
        kind = self.kind(section)
        if kind and key == f"{section}.kind":
            return kind
        setting = schema().setting(key, kind)
        return setting.default if setting and setting.variant in ("", kind) else None

    def extends(self, key: str) -> bool:
        """Whether the recipe that is extended says this: its settings of another kind are dropped with the kind."""
        section = key.partition(".")[0]
        alike = key == f"{section}.kind" or self.kind(section) == self.base.values.get(f"{section}.kind", "")
        return key in self.base.values and (section not in tagged_sections() or alike)

    def kind(self, section: str) -> str:
        """The kind of a tagged section; empty for any other."""
        return section_kind(section, self.chosen, self.base.values)

    def written(self, key: str) -> bool:
        """Whether the recipe must say it: what was chosen is neither the base's value nor the default."""
        if key not in self.chosen:
            return False
        kind_key = f"{key.partition('.')[0]}.kind"
        kind = {} if key == kind_key else {kind_key: self.chosen[kind_key]} if kind_key in self.chosen else {}
        return not same(self.chosen[key], replace(self, answers=(), given=kind).get(key))

    def answered(self, topic: str) -> Answer | None:
        """The answer to a topic."""
        return next((each for each in self.answers if each.topic == topic), None)

    def supposing(self, sets: Settings) -> View:
        """The same with one more, nameless answer."""
        return replace(self, answers=(*self.answers, Answer("", "", sets, "")))

    @property
    def device(self) -> str:
        """The kind of device, as planning would choose it."""
        given = str(self.get("devices.type"))
        if self.get("devices.select") == "none":
            return "cpu"
        if given != "auto":
            return given
        if not isinstance(self.get("devices.select"), str) or allocation(self.facts):
            return "cuda"
        return "mps" if self.facts.mps and not self.facts.gpus else "cpu"

    @property
    def processes(self) -> int:
        """Processes on each machine, as planning would count them."""
        explicit, select = self.get("nodes.processes_per_node"), self.get("devices.select")
        if isinstance(explicit, int):
            return explicit
        if self.device != "cuda":
            return 1 if self.device == "mps" or self.get("strategy.kind") == "single" else 2
        if isinstance(select, (list, int)):
            return len(select) if isinstance(select, list) else select
        if select == "auto" and self.get("strategy.kind") == "single":
            return 1
        return max(len(allocation(self.facts)), 1)

    @property
    def ranks(self) -> int:
        """Processes over all machines."""
        return int(self.get("nodes.count")) * self.processes

    @property
    def builtin(self) -> bool:
        """Whether the program is trainkit's own trainer."""
        return bool(self.get("program.kind") == "builtin")
