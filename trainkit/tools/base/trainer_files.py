"""Another trainer's file read key by key: what each key becomes in a recipe, or why it becomes nothing.

A tool's table is a mapping of `Key`. What several keys mean together its module reads first; `TrainerFile.finish` reads
what is left by the table, and names all that has no counterpart.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from trainkit.recipe.assignment import Assignment
from trainkit.recipe.merge import value_at
from trainkit.recipe.secrets import is_secret_name
from trainkit.text import join_names
from trainkit.tools.base.fields import UNSET, Settings, Unsupported
from trainkit.tools.base.imported_recipe import ForeignFile, ImportContext, ImportedRecipe

# Of a file that a tool is thought to have written at least so many keys are the tool's.
LEAST_KNOWN = 0.5


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A value without a counterpart, and why the training is the same without it, or how it differs."""

    why: str


Decoded = Settings | LeftOut | Unsupported


@dataclass(frozen=True, slots=True)
class Key:
    """One key of another trainer's file.

    name: dotted. decode: its value -> settings of the recipe, none of them where trainkit does that anyway; `LeftOut`;
    or `Unsupported`, where trainkit would train something else.
    """

    name: str
    decode: Callable[[Any], Decoded]


def maps(name: str, key: str, values: Mapping[Any, Any] | None = None) -> Key:
    """A key with the value of a recipe key as it is, or by a table of `values`, outside of which it is unsupported."""

    def decode(value: Any) -> Decoded:
        if values is None:
            return {key: value}
        if isinstance(value, list | Mapping) or value not in values:
            known = join_names([str(each) for each in values], 8)
            return Unsupported(f"the built-in trainer has {known}")
        return {key: values[value]}

    return Key(name, decode)


def left_out(why: str, *names: str) -> tuple[Key, ...]:
    """Keys without which the training is the same, or of which it is said how it differs."""
    return tuple(Key(name, lambda value: LeftOut(why)) for name in names)


def refused(why: str, *names: str) -> tuple[Key, ...]:
    """Keys that ask for what the built-in trainer cannot train, unless they switch it off."""
    return tuple(Key(name, lambda value: Unsupported(why)) for name in names)


def accepted(name: str, why: str, *values: Any) -> Key:
    """A key that says with these values what trainkit does anyway, and with others what it cannot train."""
    return Key(name, lambda value: {} if any(value == each for each in values) else Unsupported(why))


def table(*keys: Key | Sequence[Key]) -> Mapping[str, Key]:
    """The keys by name."""
    flat = [each for given in keys for each in ((given,) if isinstance(given, Key) else given)]
    return {each.name: each for each in flat}


_OFF: Final[tuple[Any, ...]] = (None, False, "", [], {}, "no", "none", "None")


def is_off(value: Any) -> bool:
    """Whether a value says nothing, or switches off what the key is for. 0 is a number."""
    return any(value is each for each in (None, False)) or (not isinstance(value, bool | int) and value in _OFF)


def shown(name: str, value: Any) -> str:
    """A key with its value; of a mapping the names in it, of a secret and of a list nothing."""
    if isinstance(value, Mapping) and value:
        return f"{name} ({', '.join(map(str, value))})"[:200]
    return (
        name if value is None or isinstance(value, list | Mapping) or is_secret_name(name) else f"{name} {value}"[:80]
    )


def likeness(tree: Mapping[str, Any], known: Collection[str], typical: Collection[str], least: int = 2) -> float:
    """The share of a file's keys that are a tool's; 0 below half of them, or with fewer than `least` typical ones.

    known, typical: names at the top of the file, the first with all of the second.
    """
    share = sum(str(name) in known for name in tree) / max(1, len(tree))
    return share if share >= LEAST_KNOWN and sum(name in tree for name in typical) >= least else 0.0


@dataclass
class TrainerFile:
    """A file of another trainer on its way into the draft.

    tool: as people write it. command: that starts the tool itself, in front of the file. keys: the tool's table.
    """

    tool: str
    command: str
    keys: Mapping[str, Key]
    draft: ImportedRecipe
    context: ImportContext
    source: ForeignFile
    _read: set[str] = field(default_factory=set)
    _off: list[str] = field(default_factory=list)
    _left: dict[str, list[str]] = field(default_factory=dict)  # names with values, by the reason
    _from: dict[str, dict[str, None]] = field(default_factory=dict)  # the file's names, by section of the recipe

    def get(self, name: str, default: Any = None) -> Any:
        """The value at a dotted name, without reading it."""
        found = value_at(self.source.tree, name)
        return default if found is None else found

    def take(self, name: str, default: Any = None) -> Any:
        """The value at a dotted name, which is read with that, and all below it."""
        self._read.add(name)
        if (found := value_at(self.source.tree, name, UNSET)) is not UNSET and is_off(found):
            self._note_off(name)
        return self.get(name, default)

    def put(self, name: str, settings: Settings, reason: str = "") -> None:
        """Set what a key means. reason: a comment, where that is not plain."""
        self._read.add(name)
        if not settings:
            self._note_off(name)
        last, renamed = name.rpartition(".")[2], []
        for key, value in settings.items():
            self.draft.put_checked(Assignment(key, value, self.source.at(name)), reason)
            renamed += [] if last in key.split(".") else [key]
        if renamed:
            section = renamed[0].partition(".")[0]
            self._from.setdefault(section, {})[f"{name} is {' and '.join(renamed)}"] = None

    def leave(self, name: str, why: str) -> None:
        """Name a key that has no counterpart. why: the training is the same without it, or how it differs."""
        self._read.add(name)
        self._left.setdefault(why, []).append(shown(name, self.get(name)))

    def leave_unread(self, why: str, *names: str) -> None:
        """Name those of the keys that nothing has read."""
        for name in names:
            if name not in self._read and (value := self.get(name)) is not None:
                self._note_off(name) if is_off(value) else self.leave(name, why)

    def refuse(self, name: str, why: str, instead: str = "") -> None:
        """Note an error: with this key trainkit's own trainer would train something else."""
        self._read.add(name)
        way = f"launch {self.tool} itself, under trainkit: trainkit run {self.command} {shlex.quote(self.source.path)}"
        hint = f"{instead}; or {way}" if instead else way
        what = f"{shown(name, self.get(name))} is not for trainkit's own trainer"
        self.draft.fail(what, self.source.at(name), hint, why)

    def assume(self, settings: Settings, by: str = "") -> None:
        """Set what the tool takes where the file is silent and trainkit would take something else.

        by: whose defaults these are, where they are not the tool's own.
        """
        silent = {key: value for key, value in settings.items() if self.draft.get(key) is None}
        for key, value in silent.items():
            section = key.partition(".")[0]
            names = ", ".join(each.partition(".")[2] for each in silent if each.partition(".")[0] == section)
            self.draft.set(key, value, self.source.at(""), f"not in the file, and {by or self.tool}'s default: {names}")

    def finish(self) -> None:
        """Read what is left by the table, and name everything that is not in the recipe."""
        for name in [*self._unread()]:
            self._by_table(name)
        for why, names in self._left.items():
            self.draft.remark(f"Left out: {', '.join(names)}: {why}.")
        if self._off:
            self.draft.remark(f"Off, empty, or as trainkit has it: {', '.join(dict.fromkeys(self._off))}.")
        for section, renamed in self._from.items():
            first = next((key for key in self.draft.settings if key.partition(".")[0] == section), "")
            known, said = self.draft.reasons.get(first), ", ".join(renamed)
            self.draft.reasons[first] = f"{known}; {said}" if known else said

    def _unread(self) -> Iterator[str]:
        """Names of the table, where they are in the file, and of every other leaf."""

        def below(tree: Mapping[str, Any], above: str) -> Iterator[str]:
            for key, value in tree.items():
                name = f"{above}.{key}" if above else str(key)
                if name in self._read:
                    continue
                if name not in self.keys and isinstance(value, Mapping) and value and self._below(f"{name}."):
                    yield from below(value, name)
                else:
                    yield name

        yield from below(self.source.tree, "")

    def _below(self, inner: str) -> bool:
        return any(each.startswith(inner) for each in (*self.keys, *self._read))

    def _by_table(self, name: str) -> None:
        value, key = self.get(name), self.keys.get(name)
        if value is None or (key is None and is_off(value)):
            self._note_off(name)
        elif key is None:
            self.leave(name, f"no key of {self.tool} that trainkit knows")
        else:
            found = key.decode(value)
            if isinstance(found, LeftOut):
                self._note_off(name) if is_off(value) else self.leave(name, found.why)
            elif isinstance(found, Unsupported):
                self._note_off(name) if is_off(value) else self.refuse(name, found.why, found.instead)
            else:
                self.put(name, found)

    def _note_off(self, name: str) -> None:
        self._read.add(name)
        self._off.append(name)
