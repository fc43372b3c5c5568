"""The flags of launchers and of scripts: how they are declared, taken from a command, and read into a recipe."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from trainkit.errors import Origin
from trainkit.launch_plan.context import Context
from trainkit.launch_plan.provenance import Source, Token, module, token
from trainkit.recipe.interpolation import interpolated
from trainkit.recipe.schema.launching import program_argv
from trainkit.recipe.secrets import secret_arguments
from trainkit.recipe.suggestions import did_you_mean
from trainkit.tools.base.fields import UNSET, Field, Settings, Unsupported, by_name
from trainkit.tools.base.imported_recipe import ImportedFlag, ImportedRecipe, argv_origin

TRUE = ("true", "yes", "y", "1", "t")  # as HfArgumentParser reads them
FALSE = ("false", "no", "n", "0", "f")


@dataclass(frozen=True, slots=True)
class ScriptFlag:
    """A flag with the words that follow it. name: with underscores; empty for words in front of the first flag."""

    name: str
    values: tuple[str, ...]
    words: tuple[str, ...]  # as they stood

    @property
    def origin(self) -> Origin:
        """The place of these words."""
        return argv_origin(*self.words)

    @property
    def switch(self) -> bool | None:
        """What a yes-or-no flag says, as HfArgumentParser reads it; None where it says something else."""
        word = " ".join(self.values).lower()
        return True if word in ("", *TRUE) else False if word in FALSE else None


def script_flags(words: Sequence[str]) -> Iterator[ScriptFlag]:
    """The words in order; from a bare `--` on they are one flag without a name."""
    start, name = 0, ""
    for position, word in enumerate((*words, "--")):
        if not word.startswith("--") and position < len(words):
            continue
        if position > start:
            taken = tuple(words[start:position])
            _, equals, value = taken[0].partition("=")
            yield ScriptFlag(name, ((value,) if equals else ()) + taken[1:] if name else (), taken)
        if word == "--":
            if position < len(words):
                yield ScriptFlag("", (), tuple(words[position:]))
            return
        start, name = position, word[2:].partition("=")[0].replace("-", "_")


def as_arguments(words: Sequence[str]) -> Mapping[str, object] | list[str]:
    """The words as program.args: by name where this gives exactly these words again, else word for word."""
    named: dict[str, object] = {}
    for flag in script_flags(words):
        if not flag.name.isidentifier() or flag.name in named:
            return list(words)
        values = list(flag.values)
        named[flag.name] = True if not values else values[0] if len(values) == 1 else values
    return named if named and program_argv(named) == list(words) else list(words)


def secret_flags(words: Sequence[str]) -> list[str]:
    """The flags whose values are secrets, without their dashes."""
    return [held.name for held in secret_arguments(words).values() if held.name]


_PLACEHOLDER = re.compile(r"\{[A-Za-z_][\w -]*\}|<[^<>]+>")
END_OF_FLAGS = "ends the launcher's flags, so that no word of the program is read as one"


@dataclass(frozen=True, slots=True)
class LauncherFlag(Field):
    """A field that is a flag of a launcher; its name is written with underscores.

    source: what made the value, where the keys alone do not say it. short: the form of one letter. switch: whether it
    takes no value. family: whether the name is only what the names of several flags begin with.
    """

    source: Callable[[Context], Source] | None = None
    short: str = ""
    switch: bool = False
    family: bool = False

    def made_by(self, context: Context) -> Source:
        """What made the value."""
        return self.source(context) if self.source else Source(self.keys)


def always(name: str, value: Any, why: str, **columns: Any) -> LauncherFlag:
    """A flag that every plan passes with this value, or as a switch, for this reason."""
    return LauncherFlag(name, encode=fixed(value), source=rule(why), switch=value is True, **columns)


def without_key(names: str, *, switch: bool = False, family: bool = False) -> tuple[LauncherFlag, ...]:
    """Flags, or what the names of several begin with, that no recipe key stands for: switches, or with a value."""
    return tuple(LauncherFlag(name, switch=switch, family=family) for name in names.split())


def rule(text: str, keys: tuple[str, ...] = ()) -> Callable[[Context], Source]:
    """The source of a flag that the plan passes for this reason, whatever the recipe says or besides these keys."""
    return lambda context: Source(keys, text)


def fixed(value: Any) -> Callable[[Context], Any]:
    """The encoder of a flag that has this value in every plan."""
    return lambda context: value


def whole_number(key: str) -> Callable[[Any], Settings | Unsupported]:
    """The decoder of a whole number."""

    def decode(value: Any) -> Settings | Unsupported:
        return {key: int(value)} if str(value).isdecimal() else Unsupported("", "write a whole number")

    return decode


def launcher_argv(context: Context, name: str, flags: Sequence[LauncherFlag], separator: str = "_") -> Iterator[Token]:
    """A launcher's module with the flags that the plan passes, in the table's order.

    separator: between the words of a flag's name.
    """
    yield from module(context, name, keys=("launcher.kind",))
    for flag in flags:
        value = flag.encode(context)
        if value is UNSET:
            continue
        written = f"--{flag.name.replace('_', separator)}"
        parts = () if flag.switch else ("=", *(value if isinstance(value, tuple) else (str(value),)))
        source = flag.made_by(context)
        yield token(written, *parts, keys=source.keys, rule=source.rule)
    yield token("--", rule=END_OF_FLAGS)


def find_flag(flags: Sequence[LauncherFlag], name: str) -> LauncherFlag | None:
    """The flag of a name, or the family that it belongs to."""
    family = (flag for flag in flags if flag.family and name.startswith(flag.name))
    return by_name(flags).get(name) or next(family, None)


def _begun(flags: Sequence[LauncherFlag], start: str) -> LauncherFlag | None:
    """The one flag whose name begins so."""
    found = [flag for flag in flags if flag.name.startswith(start)]
    return found[0] if len(found) == 1 and start else None


def parse_flags(
    draft: ImportedRecipe, tool: str, flags: Sequence[LauncherFlag], argv: Sequence[str], *, abbreviated: bool = True
) -> tuple[list[ImportedFlag], list[str]]:
    """The launcher's flags, and the words from the program on. An unknown flag is a problem of the draft's.

    abbreviated: whether the tool takes the beginning of a flag's name for the flag, as argparse does by itself.
    """
    short = {flag.short: flag.name for flag in flags if flag.short}
    rest, found = list(argv), list[ImportedFlag]()
    # Only up to the program: what follows its name is its own, even where a launcher has such a flag.
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "--":
            break
        written, equals, value = word.partition("=")
        name = short.get(written, written.removeprefix("--").replace("-", "_"))
        flag = find_flag(flags, name) or (_begun(flags, name) if abbreviated and written.startswith("--") else None)
        if flag is None:
            known = {each.name for each in flags if not each.family}
            hint = did_you_mean(name, known, "put what belongs to your program behind the script's name", "--")
            draft.fail(f"{tool} has no flag {written}", argv_origin(word), hint)
            return found, []
        name = name if flag.family else flag.name
        if flag.switch and equals:
            draft.fail(f"{written} takes no value", argv_origin(word), "leave out what follows the equals sign")
            return found, []
        if flag.switch or equals:
            found.append(ImportedFlag(name, value if equals else None, argv_origin(word)))
        elif rest:
            found.append(ImportedFlag(name, rest[0], argv_origin(word, rest.pop(0))))
        else:
            draft.fail(f"{word} requires a value", argv_origin(word), "add the value behind it")
            return found, []
        if _PLACEHOLDER.fullmatch(found[-1].value or ""):
            wrong = found.pop()
            draft.fail(f"{wrong.value} is to be replaced", wrong.origin, "write what it is for")
    return found, rest


def put_settings(
    draft: ImportedRecipe, flags: Sequence[LauncherFlag], used: Sequence[ImportedFlag], done: Set[str]
) -> None:
    """Set what each flag means, and name those without a recipe key. done: names of flags that have been read."""
    left: list[str] = []
    for use in used:
        flag = find_flag(flags, use.name)
        if use.name in done or flag is None:
            continue
        if not flag.keys:
            left.append(use.origin.text)
            continue
        settings = {flag.keys[0]: use.value} if interpolated(use.value) else flag.decode(use.value)
        if isinstance(settings, Unsupported):
            what = f"--{use.name} {use.value} cannot be taken over"
            draft.fail(what, use.origin, settings.instead, settings.why)
        else:
            for key, value in settings.items():
                draft.set(key, value, use.origin)
    if left:
        draft.remark(f"Not taken over, for the plan chooses it for each run: {', '.join(left)}.")
