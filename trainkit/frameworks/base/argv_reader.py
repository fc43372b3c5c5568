"""A launcher's own flags, taken off the front of a command: which there are, and what each takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from trainkit.errors import Origin
from trainkit.frameworks.base.draft import Draft, FlagUse, argv_origin
from trainkit.frameworks.hf_trainer.argv_reader import FALSE, TRUE
from trainkit.recipe.layers.secrets import secret_arguments
from trainkit.recipe.schema.launching import program_argv
from trainkit.recipe.validation.suggestions import nearest


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a launcher's command line may hold.

    short: one-letter flags and the names that they stand for. families: beginnings of names that take a value.
    """

    launcher: str
    switches: frozenset[str]
    values: frozenset[str]
    short: Mapping[str, str]
    families: tuple[str, ...] = ()

    def takes_value(self, name: str) -> bool:
        """Whether a value belongs to the flag."""
        return name in self.values or (name.startswith(self.families) and name not in self.switches)


def parse_flags(draft: Draft, grammar: Grammar, words: Sequence[str]) -> tuple[list[FlagUse], list[str]]:
    """The launcher's flags, and the words from the program on. An unknown flag is a problem of the draft's."""
    rest, found = list(words), list[FlagUse]()
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "--":
            break
        written, equals, value = word.partition("=")
        name = grammar.short.get(written, written.removeprefix("--").replace("-", "_"))
        if name in grammar.switches and not equals:
            found.append(FlagUse(name, None, argv_origin(word)))
        elif grammar.takes_value(name) and equals:
            found.append(FlagUse(name, value, argv_origin(word)))
        elif grammar.takes_value(name) and rest:
            found.append(FlagUse(name, rest[0], argv_origin(word, rest.pop(0))))
        else:
            _complain(draft, grammar, word, name)
            return found, []
    return found, rest


def _complain(draft: Draft, grammar: Grammar, word: str, name: str) -> None:
    if grammar.takes_value(name):
        what, hint = f"{word} wants a value", "add the value behind it"
    elif name in grammar.switches:
        what, hint = f"{word.partition('=')[0]} takes no value", "leave out what follows the equals sign"
    else:
        close = nearest(name, {*grammar.switches, *grammar.values})
        what = f"{grammar.launcher} has no flag {word.partition('=')[0]}"
        hint = f"did you mean --{close}?" if close else "what belongs to your program stands behind the script's name"
    draft.fail(what, argv_origin(word), hint)


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
    """The words in order; from a bare `--` on they are one phrase without a name."""
    start, name = 0, ""
    for position, word in enumerate((*words, "--")):
        if not word.startswith("--") and position < len(words):
            continue
        if position > start:
            yield _phrase(name, words[start:position])
        if word == "--":
            if position < len(words):
                yield ScriptFlag("", (), tuple(words[position:]))
            return
        start, name = position, word[2:].partition("=")[0].replace("-", "_")


def _phrase(name: str, words: Sequence[str]) -> ScriptFlag:
    if not name:
        return ScriptFlag("", (), tuple(words))
    _, equals, value = words[0].partition("=")
    return ScriptFlag(name, ((value,) if equals else ()) + tuple(words[1:]), tuple(words))


def as_arguments(words: Sequence[str]) -> Mapping[str, object] | list[str]:
    """The words as program.args: by name where this gives exactly these words again, else word for word."""
    named: dict[str, object] = {}
    for phrase in script_flags(words):
        if not phrase.name.isidentifier() or phrase.name in named:
            return list(words)
        values = list(phrase.values)
        named[phrase.name] = True if not values else values[0] if len(values) == 1 else values
    return named if named and program_argv(named) == list(words) else list(words)


def without_secrets(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words without those that hold a secret, and the flags that these stood behind."""
    secret = set(secret_arguments(words))
    flags = {position if "=" in words[position] else position - 1 for position in secret}
    kept = [word for position, word in enumerate(words) if position not in secret | flags]
    return kept, [words[position].partition("=")[0] for position in sorted(flags)]
