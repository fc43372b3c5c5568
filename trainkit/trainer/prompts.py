"""Prompts as token ids: texts, and chats through the tokenizer's template; which ids end an answer; ids as text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainkit.data.chats import ChatTemplate
from trainkit.data.tokenizer import Encoder, Tokenizer, open_encoder, tokenizer_files
from trainkit.errors import first_line
from trainkit.recipe.schema import HfModel, Recipe
from trainkit.recipe.schema.data import BYTES

_ANSWER = "trainkit-answer"  # in the place of an answer, to see what a template writes behind it


class PromptError(ValueError):
    """Why a prompt cannot be answered, and what to do."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(what)
        self.hint = hint


def tokenizer_folder(recipe: Recipe) -> Path | None:
    """The folder of the tokenizer that a run is trained with; None where bytes are tokens, or ids are ready-made."""
    named = getattr(recipe.data, "tokenizer", None)
    if named is None and isinstance(recipe.model, HfModel) and recipe.data.kind not in ("text", "dataset"):
        named = recipe.model.path  # of ready-made ids: they are most likely the model's own
    return Path(named) if named not in (None, BYTES) and tokenizer_files(Path(named)) else None


def is_of_bytes(recipe: Recipe) -> bool:
    """Whether a run makes each byte of its texts a token; rows of ready-made ids have none either."""
    ids = "input_ids" in getattr(recipe.data, "columns", ())
    return tokenizer_folder(recipe) is None and recipe.data.kind in ("text", "dataset") and not ids


def chosen_template(recipe: Recipe) -> str:
    """The chat template that a run has chosen in place of its tokenizer's; empty where it has chosen none.

    Without the marks of what is learned, which only few programs know.
    """
    chosen, folder = getattr(recipe.data, "chat_template", None), tokenizer_folder(recipe)
    encoder = open_encoder(str(folder)) if chosen not in (None, "none") and folder else None
    if not isinstance(encoder, Tokenizer):
        return ""
    return _MARKS.sub("", ChatTemplate.of(encoder.inner, chosen).source)


def encoder_of(recipe: Recipe, *, chats: bool = True) -> Encoder:
    """The encoder of a run, with the template that it was trained with. chats: whether its prompts go through one."""
    folder = tokenizer_folder(recipe)
    encoder = open_encoder(str(folder) if folder else None)
    if isinstance(encoder, Tokenizer) and (not chats or (template := chosen_template(recipe))):
        encoder.inner.chat_template = template if chats else None
    return encoder


_MARKS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")


def has_template(encoder: Encoder) -> bool:
    return isinstance(encoder, Tokenizer) and encoder.has_template


def _inner(encoder: Encoder) -> Any:
    """The tokenizer of transformers; None for bytes."""
    return getattr(encoder, "inner", None)


def prompt_ids(encoder: Encoder, row: Mapping[str, Any], *, system: str = "", plain: bool = False) -> list[int]:
    """The ids of `prompt`, a text, or `messages`, a chat: through the template if there is one, unless plain.

    system: a message that goes first, where a chat has none. PromptError where a prompt needs a template and there is
    none, or the template refuses it.
    """
    messages = [dict(each) for each in row.get("messages") or ()]
    templated = has_template(encoder) and not plain
    if not templated and (messages or system):
        what = "--plain uses no chat template" if plain else "the tokenizer has no chat template"
        hint = "write it as one text, in `prompt`" if messages else "leave the system message out"
        raise PromptError(f"{what}, and {'a chat' if messages else 'a system message'} needs one", hint)
    if not templated:
        return [*encoder.opening(), *encoder.plain(row["prompt"])]
    messages = messages or [{"role": "user", "content": row["prompt"]}]
    if system and messages[0].get("role") != "system":
        messages = [{"role": "system", "content": system}, *messages]
    if messages[-1].get("role") == "assistant":
        raise PromptError("the chat ends with an answer of the assistant", "leave it out, for the model to write it")
    tools = {"tools": row["tools"]} if row.get("tools") else {}
    try:
        found = _inner(encoder).apply_chat_template(
            messages, tokenize=True, return_dict=True, add_generation_prompt=True, **tools
        )
    except Exception as error:  # a template is a program and may raise anything
        hint = "the template says which roles it takes, and in which order; --plain leaves it out"
        raise PromptError(f"the chat template refuses it: {first_line(error)}", hint) from error
    return list(found["input_ids"])


def stop_ids(encoder: Encoder, declared: Iterable[object] = ()) -> frozenset[int]:
    """The ids that end an answer: that which ends a text, that with which the template ends answers, those declared.

    declared: ids or lists of ids, as configurations name them.
    """
    inner = _inner(encoder)
    found = [getattr(inner, "eos_token_id", None), *encoder.closing(final=True)[:1]]
    found += _template_stop(inner) if has_template(encoder) else ()
    for each in declared:
        found += each if isinstance(each, list | tuple) else [each]
    return frozenset(each for each in found if isinstance(each, int))


def _template_stop(inner: Any) -> Sequence[int]:
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
    try:
        behind = str(inner.apply_chat_template(chat, tokenize=False)).partition(_ANSWER)[2].lstrip()
    except Exception:  # noqa: BLE001 - a template is a program, and may refuse this chat
        return ()
    added = {str(each): number for number, each in inner.added_tokens_decoder.items()}
    # the longest first: one may begin another
    return [added[text] for text in sorted(added, key=len, reverse=True) if behind.startswith(text)][:1]


class TextStream:
    """Token ids as text, piece by piece: whole characters only, as several tokens may make one."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self.ids: list[int] = []
        self._from = self._written = 0  # places in `ids`: where the text that is compared begins, and what is written

    def add(self, *ids: int) -> str:
        """The text that these ids complete."""
        self.ids += ids
        return self._rest(ends=False)

    def end(self) -> str:
        """What is left: the beginning of a character that was never completed."""
        return self._rest(ends=True)

    def _rest(self, *, ends: bool) -> str:
        # Decoded behind the text before it: a tokenizer may drop the space in front of a first token.
        before = self._encoder.decode(self.ids[self._from : self._written])
        now = self._encoder.decode(self.ids[self._from :])
        if len(now) <= len(before) or (now.endswith("\ufffd") and not ends):
            return ""
        self._from, self._written = self._written, len(self.ids)
        return now[len(before) :]
