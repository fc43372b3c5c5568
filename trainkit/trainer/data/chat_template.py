"""Chats as tokens, by a tokenizer's own template, and which of the tokens are the assistant's answers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

# A template may mark what the assistant wrote: https://huggingface.co/docs/transformers/chat_templating
_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatError(ValueError):
    """Why a chat cannot be learned from, in short."""


def chat_tokens(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[bool]]:
    """Ids of the whole chat, and for each whether it is part of an answer. ChatError where that cannot be known."""
    # An answer runs from where the template invites it to the end of its message, with the token that ends the turn.
    # `datasets` fills the keys that only some messages have with None, which templates would write out.
    messages = [{name: value for name, value in message.items() if value is not None} for message in messages]
    if not any(message.get("role") == "assistant" for message in messages):
        raise ChatError("it has no message of role assistant, which is what is learned")
    try:
        marked = _MARKER.search(tokenizer.get_chat_template()) is not None
    except ValueError as error:
        raise ChatError("the tokenizer has no chat template") from error
    if not marked:
        return _by_prefixes(tokenizer, messages)
    found = _applied(tokenizer, messages, return_assistant_tokens_mask=True)
    predicted = [bool(each) for each in found["assistant_masks"]]
    if not any(predicted):
        raise ChatError("the template marks nothing of it as the assistant's")
    return list(found["input_ids"]), predicted


def _by_prefixes(tokenizer: Any, messages: list[Mapping[str, Any]]) -> tuple[list[int], list[bool]]:
    """What precedes an answer, and the chat up to its end, must each be how the whole chat begins."""
    ids = list(_applied(tokenizer, messages)["input_ids"])
    predicted = [False] * len(ids)
    for place, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        before = list(_applied(tokenizer, messages[:place], add_generation_prompt=True)["input_ids"]) if place else []
        upto = list(_applied(tokenizer, messages[: place + 1])["input_ids"])
        if ids[: len(before)] != before or ids[: len(upto)] != upto or len(upto) <= len(before):
            raise ChatError(
                f"where the answer in message {place + 1} begins and ends is not known: the template writes the same "
                "messages differently with others after them, and it has no {% generation %} marks"
            )
        predicted[len(before) : len(upto)] = [True] * (len(upto) - len(before))
    return ids, predicted


def _applied(tokenizer: Any, messages: list[Mapping[str, Any]], **options: Any) -> Mapping[str, Any]:
    try:
        found: Mapping[str, Any] = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)
    except Exception as error:  # a template is a program, and may fail in any way
        raise ChatError(f"the chat template fails: {type(error).__name__}: {error}") from error
    return found
