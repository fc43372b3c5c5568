"""Questions, choices and answers as values, with the recipe's settings by dotted key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainkit.recipe.schema.fields import schema

Settings = Mapping[str, Any]


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


@dataclass(frozen=True)
class Answer:
    """What was answered to a topic, as typed, and what it sets."""

    topic: str
    typed: str
    sets: Settings
    reason: str


@dataclass(eq=False)
class AnswerError(ValueError):
    """Why an answer is not accepted: what is wrong, what to do, and why."""

    what: str
    hint: str = ""
    why: str = ""


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The settings of a recipe's tree by dotted key; unknown keys are left out."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key in schema().settings:
            yield key, value
        elif isinstance(value, Mapping):
            yield from flatten(value, f"{key}.")


def nest(settings: Settings) -> dict[str, Any]:
    """The settings as the tree of a recipe."""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        target = tree
        *sections, name = key.split(".")
        for section in sections:
            target = target.setdefault(section, {})
        target[name] = value
    return tree


def same(one: Any, other: Any) -> bool:
    """Whether two values are the same to a recipe, where `true` is not 1."""
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)
