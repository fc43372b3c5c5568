"""A launcher's own flags, taken off the front of a command: which there are, and what each takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainkit.frameworks.base.draft import Draft, Given, word_origin
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


def take_flags(draft: Draft, grammar: Grammar, words: Sequence[str]) -> tuple[list[Given], list[str]]:
    """The launcher's flags, and the words from the program on. An unknown flag is a problem of the draft's."""
    rest, found = list(words), list[Given]()
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "--":
            break
        written, equals, value = word.partition("=")
        name = grammar.short.get(written, written.removeprefix("--").replace("-", "_"))
        if name in grammar.switches and not equals:
            found.append(Given(name, None, word_origin(word)))
        elif grammar.takes_value(name) and equals:
            found.append(Given(name, value, word_origin(word)))
        elif grammar.takes_value(name) and rest:
            found.append(Given(name, rest[0], word_origin(word, rest.pop(0))))
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
    draft.fail(what, word_origin(word), hint)
