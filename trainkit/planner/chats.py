"""A refusal of chats that the tokenizer has no template for."""

from __future__ import annotations

from collections.abc import Iterator

from trainkit.errors import Diagnostic
from trainkit.recipe.resolved import Resolved


def chat_problems(resolved: Resolved) -> Iterator[Diagnostic]:
    """An error where the recipe's data are chats, and its tokenizer is known to have no template."""
    data = resolved.recipe.data
    if getattr(data, "messages_field", None) and resolved.described.chats is False:
        what = f"data.messages_field: the tokenizer {getattr(data, 'tokenizer', '')} has no chat template"
        hint = "name the tokenizer of a chat model, or put a template beside its files, as chat_template.jinja"
        yield resolved.error("data.messages_field", what, hint, why="it says how a chat is written as one text")
