"""What is asked: topics, their questions with choices, and why an answer is not accepted."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from trainkit.machine.facts import Facts
from trainkit.machine.selection import allocation
from trainkit.recipe.paths import Files
from trainkit.recipe.schema.fields import Setting, schema, tagged_sections
from trainkit.recipe.validate import choices, default_kind


@dataclass(frozen=True)
class Choice:
    """One thing to choose. word: what one types.

    sets: what it means in the recipe; reason: why one would choose it, for the recipe's comment.
    refused: why it cannot be chosen with the answers so far; remark: what this machine lacks for it.
    """

    word: str
    note: str
    sets: Settings
    reason: str
    refused: str = ""
    remark: str = ""


@dataclass(frozen=True)
class Question:
    """One question. topic: the name of what it settles; why: what `?` shows.

    default: the answer of Enter, as one would type it; empty where there is none. source: where that came from.
    expected: what may be typed besides the choices; empty where there is nothing else.
    """

    text: str
    why: tuple[str, ...] = ()
    choices: tuple[Choice, ...] = ()
    default: str = ""
    source: str = ""
    expected: str = ""
    topic: str = ""


@dataclass(eq=False)
class AnswerError(ValueError):
    """Why an answer is not accepted: what is wrong, what to do, and why."""

    what: str
    hint: str = ""
    why: str = ""


def _no_text(view: View, text: str) -> tuple[Settings, str]:
    hint = "type one of the words that are shown, or their first letters"
    raise AnswerError(f"{text!r} is none of the choices", hint)


@dataclass(frozen=True)
class Topic:
    """One thing to settle. keys: the settings that settle it; where one of them is given, nothing is asked.

    open: whether the answers so far leave it open; ask: the question; read: what a typed text sets, with the reason.
    explains: the settings that `?` describes; the keys, where none are named.
    planned: whether the planner says of each choice if it can be taken.
    """

    name: str
    keys: tuple[str, ...]
    open: Callable[[View], bool]
    ask: Callable[[View], Question]
    read: Callable[[View, str], tuple[Settings, str]] = _no_text
    explains: tuple[str, ...] = ()
    planned: bool = True


def offered(view: View, key: str, notes: Callable[[str], str]) -> tuple[Choice, ...]:
    """A choice for each value of a setting, with a note on it that is also the reason."""
    return tuple(Choice(value, notes(value), {key: value}, notes(value)) for value in view.values(key))


Settings = Mapping[str, Any]  # by dotted key


@dataclass(frozen=True)
class Answer:
    """What was answered to a topic, as typed, and what it sets."""

    topic: str
    typed: str
    sets: Settings
    reason: str


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
    def _said(self) -> Settings:
        merged: dict[str, Any] = {}
        for answer in self.answers:
            merged.update(answer.sets)
        return {**merged, **self.given}

    @cached_property
    def chosen(self) -> Settings:
        """What answers and given settings say; a later answer wins over an earlier one, a given setting over both.

        A setting of another kind, answered before the kind was changed, means nothing.
        """
        return {key: value for key, value in self._said.items() if key.endswith(".kind") or self.declared(key)}

    def kind(self, section: str) -> str:
        """The kind of a tagged section; empty for any other."""
        if section not in tagged_sections():
            return ""
        key = f"{section}.kind"
        return str(self._said.get(key) or self.base.values.get(key) or default_kind(section))

    def declared(self, key: str) -> Setting | None:
        """The setting as the kind of its section declares it; None where that kind lacks it."""
        kind = self.kind(key.partition(".")[0])
        setting = schema().setting(key, kind)
        return setting if setting and setting.variant in ("", kind) else None

    def get(self, key: str) -> Any:
        """The value of a setting as the recipe would have it now; None where the section's kind has no such setting."""
        section, _, name = key.partition(".")
        if key in self.chosen:
            return self.chosen[key]
        # Settings of the base that belong to another kind are dropped with the kind.
        alike = name == "kind" or self.kind(section) in ("", self.base.values.get(f"{section}.kind"))
        if alike and key in self.base.values:
            return self.base.values[key]
        setting = self.declared(key)
        return setting.default if setting else None

    def values(self, key: str) -> list[Any]:
        """The literal values of a setting; the kinds, for the kind of a tagged section."""
        section, _, name = key.rpartition(".")
        if name == "kind" and section in tagged_sections():
            return list(schema().sections[section].kinds)
        setting = self.declared(key)
        return choices(setting.annotation) if setting else []

    def meaning(self, key: str, value: Any) -> str:
        """The part of the schema's description about one value, without the final dot; empty where there is none."""
        section, _, name = key.rpartition(".")
        if name == "kind" and section in tagged_sections():
            kind = schema().setting(key, str(value))
            return kind.description.rstrip(".") if kind else ""
        setting = self.declared(key)
        described = setting.description if setting else ""
        found = re.search(rf"(?:^|[.;,:] )`{re.escape(str(value))}`:? (.*?)(?:[.;](?: |$)|, `|$)", described)
        return found[1].replace("`", "").removeprefix("is ") if found else ""

    def written(self, key: str) -> bool:
        """Whether the recipe must say it: what was chosen is neither the base's value nor the default."""
        if key not in self.chosen:
            return False
        kind_key = f"{key.partition('.')[0]}.kind"
        kind = {kind_key: self.chosen[kind_key]} if kind_key in self.chosen and key != kind_key else {}
        return not same(self.chosen[key], replace(self, answers=(), given=kind).get(key))

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
        # On a CPU two ranks are the fewest that a strategy other than `single` is tried with.
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


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The settings of a recipe's tree by dotted key; unknown keys are left out."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key in schema().settings:
            yield key, value
        elif isinstance(value, Mapping):
            yield from flatten(value, f"{key}.")


def same(one: Any, other: Any) -> bool:
    """Whether two values are the same to a recipe, where `true` is not 1."""
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)
