"""The words behind a script's name, one flag at a time, so that those with a recipe key can be taken out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from trainkit.errors import Origin
from trainkit.frameworks.base.draft import argv_origin
from trainkit.recipe.layers.secrets import secret_arguments
from trainkit.recipe.schema.launching import program_argv

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
