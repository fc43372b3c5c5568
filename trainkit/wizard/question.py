"""Questions, choices and answers as values."""

from __future__ import annotations

from dataclasses import dataclass

from trainkit.wizard.recipe_values import Settings


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
    """One question. topic: its name; why: what `?` shows.

    default: the answer of Enter, as one would type it; empty where there is none. source: where that came from.
    expected: what may be typed besides the choices; empty where there is nothing else.
    """

    topic: str
    text: str
    why: tuple[str, ...]
    choices: tuple[Choice, ...] = ()
    default: str = ""
    source: str = ""
    expected: str = ""


@dataclass(frozen=True)
class Answer:
    """What was answered to a topic, as typed, and what it sets."""

    topic: str
    typed: str
    sets: Settings
    reason: str


@dataclass(frozen=True)
class Rejection:
    """Why an answer is not accepted: what is wrong, why, and what to do."""

    what: str
    why: str = ""
    hint: str = ""


class AnswerError(ValueError):
    """A typed text that does not answer its question."""

    def __init__(self, what: str, hint: str = "", why: str = "") -> None:
        super().__init__(what)
        self.rejection = Rejection(what, why, hint)
