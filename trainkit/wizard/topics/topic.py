"""What a topic is, and how its question is made from the schema and its choices."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trainkit.recipe.schema.fields import Setting, schema, tagged_sections
from trainkit.recipe.validation.type_errors import choices
from trainkit.wizard.question import AnswerError, Choice, Question
from trainkit.wizard.recipe_values import Settings
from trainkit.wizard.view import View


def _no_text(view: View, text: str) -> tuple[Settings, str]:
    raise AnswerError(
        f"{text!r} is none of the choices", "type one of the words that are shown, or their first letters"
    )


@dataclass(frozen=True)
class Topic:
    """One thing to settle. keys: the settings that settle it; where one of them is given, nothing is asked.

    open: whether the answers so far leave it open; ask: the question; read: what a typed text sets, with the reason.
    explains: the settings that `?` describes; the keys, where none are named.
    """

    name: str
    keys: tuple[str, ...]
    open: Callable[[View], bool]
    ask: Callable[[View], Question]
    read: Callable[[View, str], tuple[Settings, str]] = _no_text
    explains: tuple[str, ...] = ()


def choose(
    topic: Topic,
    text: str,
    offered: Sequence[Choice],
    *,
    why: tuple[str, ...] = (),
    default: str,
    source: str = "",
    expected: str = "",
) -> Question:
    """A question with choices. Where the default is refused, it is the first choice that can be taken."""
    if default in {choice.word for choice in offered if choice.refused}:
        default, source = next((choice.word for choice in offered if not choice.refused), ""), ""
    return Question(topic.name, text, why, tuple(offered), default, source, expected)


def values_of(key: str, kind: str = "") -> list[Any]:
    """The literal values of a setting; the kinds, for the kind of a tagged section."""
    section, _, name = key.rpartition(".")
    if name == "kind" and section in tagged_sections():
        return list(schema().sections[section].kinds)
    setting = declared(key, kind)
    return choices(setting.annotation) if setting else []


def declared(key: str, kind: str = "") -> Setting | None:
    """The setting as the kind of its section declares it; None where that kind lacks it."""
    setting = schema().setting(key, kind)
    return setting if setting and setting.variant in ("", kind) else None


def meaning(key: str, value: Any, kind: str = "") -> str:
    """The part of the schema's description about one value, without the final dot; empty where there is none."""
    section, _, name = key.rpartition(".")
    if name == "kind" and section in tagged_sections():
        setting = schema().setting(key, str(value))
        return setting.description.rstrip(".") if setting else ""
    setting = declared(key, kind)
    if setting is None:
        return ""
    found = re.search(rf"(?:^|[.;,:] )`{re.escape(str(value))}`:? (.*?)(?:[.;](?: |$)|, `|$)", setting.description)
    return found[1].replace("`", "").removeprefix("is ") if found else ""


def explained(topic: Topic, view: View) -> tuple[str, ...]:
    """A line for each setting that the topic explains: its key and the schema's description."""
    keys = topic.explains or topic.keys
    settings = {key: declared(key, view.kind(key.rpartition(".")[0])) for key in keys}
    return tuple(f"{key}: {setting.description}" for key, setting in settings.items() if setting)
