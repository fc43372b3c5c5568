"""What is asked: topics, their questions with choices, and why an answer is not accepted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trainkit.wizard.view import Settings, View


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
