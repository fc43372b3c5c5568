"""The grammar of the words on a `run`, `plan` or `explain` line: recipe, overrides, and what belongs to the program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainkit.errors import UsageError


@dataclass(frozen=True, slots=True)
class Invocation:
    """What the command line held besides a command's own options: the words after `--`."""

    program: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Words:
    """A line taken apart. positional: words that are neither flag, flag value nor `key=value`, in order."""

    positional: tuple[str, ...]
    overrides: tuple[str, ...]


def take_apart(words: Sequence[str], *, most: int, what: str) -> Words:
    """Sort `words` into positional ones and overrides, which keep their order.

    most: how many positional words the command takes; what: their names, for the message of the UsageError.
    """
    from trainkit.flags.overrides import is_assignment, takes_next_word

    positional: list[str] = []
    overrides: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word.startswith("--"):
            overrides.append(word)
            if rest and takes_next_word(word, rest[0]):
                overrides.append(rest.pop(0))
        elif is_assignment(word):
            overrides.append(word)
        else:
            positional.append(word)
    if len(positional) > most:
        extra = positional[most]
        raise UsageError(
            f"one word too many: {extra!r}",
            hint=f"this command takes {what}; overrides are written key=value, the program's own words follow `--`",
        )
    return Words(tuple(positional), tuple(overrides))
