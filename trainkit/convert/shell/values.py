"""What a word of shell text is known to be without running it: text, references to variables, and what is open."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from trainkit.errors import UsageError

# Stands in a word for what only a running shell knows; the letter behind it counts what is open (see `Open`).
MARK = "\ue000"
_FIRST = 0xE100
MOST = 100_000  # words of a list, or characters of a variable


def refuse_endless(size: int, written: str) -> None:
    """UsageError for what a few characters make larger than any command: `{1..99999999}`, `$(seq 999999999)`."""
    if size > MOST:
        what = f"`{written[:60]}` comes to more than {MOST:,} words, characters or statements"
        raise UsageError(what, hint="import the command with what it comes to")


@dataclass(frozen=True, slots=True)
class Reference:
    """A variable that nothing in the text sets. otherwise: what is taken where the environment has none."""

    name: str
    otherwise: str | None = None

    def __str__(self) -> str:
        """As a recipe refers to it."""
        default = "" if self.otherwise is None else f",{self.otherwise}"
        return f"${{oc.env:{self.name}{default}}}"


@dataclass(frozen=True, slots=True)
class Open:
    """What cannot be known. text: as it is written; line: from 1; hint: what to do about it.

    otherwise: what it comes to where every variable in it has its default.
    """

    text: str
    line: int
    hint: str
    otherwise: str | None = None


Part = str | Reference | Open
Value = tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Launch:
    """One command. words: assignments in front of it included; exported: variables that it gets from the text around.

    folder: in which it runs, from where the text began. line: from 1, of the text.
    """

    words: tuple[Value, ...]
    exported: tuple[tuple[str, Value], ...]
    folder: str
    line: int


def text_of(value: Value) -> str | None:
    """The value as plain text, None where it holds anything else."""
    return "".join(map(str, value)) if all(isinstance(part, str) for part in value) else None


def sole(value: Value) -> Part | None:
    """The only part of a value."""
    return value[0] if len(value) == 1 else None


def joined(value: Value) -> Value:
    """The same value with neighbouring texts as one, and no empty ones."""
    parts: list[Part] = []
    for part in value:
        if isinstance(part, str) and parts and isinstance(parts[-1], str):
            parts[-1] += part
        elif part != "":
            parts.append(part)
    return tuple(parts)


@dataclass
class OpenParts:
    """What was open in the words of a command, so that a mark in a setting made of them can be named."""

    parts: list[Open] = field(default_factory=list)

    def word(self, value: Value) -> str:
        """A value as a word: references as a recipe has them, and marks for what is open."""
        return "".join(self._mark(part) if isinstance(part, Open) else str(part) for part in value)

    def _mark(self, part: Open) -> str:
        if part not in self.parts:
            self.parts.append(part)
        return f"{MARK}{chr(_FIRST + self.parts.index(part))}"

    def within(self, text: str) -> Iterator[Open]:
        """What is open in a text with marks."""
        return (part for number, part in enumerate(self.parts) if f"{MARK}{chr(_FIRST + number)}" in text)

    def readable(self, text: str) -> str:
        """A text with each mark as it was written."""
        for number, part in enumerate(self.parts):
            text = text.replace(f"{MARK}{chr(_FIRST + number)}", part.text)
        return text
