"""What a topic is, and what the schema says of its settings."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainkit.recipe.schema.fields import schema, tagged_sections
from trainkit.recipe.validation.type_errors import choices
from trainkit.wizard.question import AnswerError, Choice, Question, Settings
from trainkit.wizard.view import View


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
    return tuple(Choice(value, notes(value), {key: value}, notes(value)) for value in values_of(view, key))


def values_of(view: View, key: str) -> list[Any]:
    """The literal values of a setting; the kinds, for the kind of a tagged section."""
    section, _, name = key.rpartition(".")
    if name == "kind" and section in tagged_sections():
        return list(schema().sections[section].kinds)
    setting = view.declared(key)
    return choices(setting.annotation) if setting else []


def meaning(view: View, key: str, value: Any) -> str:
    """The part of the schema's description about one value, without the final dot; empty where there is none."""
    section, _, name = key.rpartition(".")
    if name == "kind" and section in tagged_sections():
        kind = schema().setting(key, str(value))
        return kind.description.rstrip(".") if kind else ""
    setting = view.declared(key)
    described = setting.description if setting else ""
    found = re.search(rf"(?:^|[.;,:] )`{re.escape(str(value))}`:? (.*?)(?:[.;](?: |$)|, `|$)", described)
    return found[1].replace("`", "").removeprefix("is ") if found else ""
