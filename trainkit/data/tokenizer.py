"""Text and chats as token ids: one for each byte, or by a tokenizer of transformers."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from trainkit.data.files import refuse_special
from trainkit.errors import TrainingError, first_line

# A template may mark what the assistant wrote: https://huggingface.co/docs/transformers/chat_templating
_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatError(ValueError):
    """Why a chat cannot be trained on."""


# What decides how a tokenizer cuts text, among the files of a model's folder.
_FILES = (
    *("tokenizer*", "special_tokens*", "added_tokens*", "chat_template*"),
    *("vocab*", "merges*", "*.model", "*.tiktoken"),
)


class Encoder:
    """Turns text into tokens: one for each byte, unless a subclass does otherwise."""

    unit: str = "bytes"  # the plural noun for a token
    size: int = 256  # all ids are below this
    special: frozenset[int] = frozenset()  # ids of special tokens, without text
    mask: int | None = None  # id of the mask token for masked language models
    padding: int = 0  # id of the padding token
    fingerprint: str = "bytes"  # digest of its content: equal ones tokenise alike

    def plain(self, text: str) -> list[int]:
        """The ids of the text alone; as bytes in UTF-8, where a lone surrogate, which JSON allows, is kept."""
        return list(text.encode("utf-8", "surrogatepass"))

    def opening(self) -> list[int]:
        """The ids that go before a text."""
        return []

    def closing(self, *, final: bool) -> list[int]:
        """The ids that go after a text. final: with the end token, which the model learns to write."""
        return []

    def source(self, text: str, limit: int) -> tuple[list[int], bool]:
        """A text for an encoder with its special tokens, at most `limit` tokens, and whether it was cut."""
        return fitted(self.opening(), self.plain(text), self.closing(final=False), limit)

    def target(self, text: str) -> tuple[list[int], list[int], list[int]]:
        """For a text that a decoder writes: the ids before it, its ids, and the ids after it."""
        return self.opening(), self.plain(text), self.closing(final=True)

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[bool]]:
        """The ids of a chat, and which of them are the assistant's. ChatError if that cannot be determined."""
        raise ChatError("bytes have no chat template")

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids. Bytes that are not UTF-8 become U+FFFD."""
        return bytes(each for each in ids if each < 256).decode("utf-8", errors="replace")


class Tokenizer(Encoder):
    """A tokenizer of transformers."""

    unit = "tokens"

    def __init__(self, inner: Any, fingerprint: str) -> None:
        self._inner, self.fingerprint = inner, fingerprint
        inner.model_max_length = 1 << 40  # the recipe decides how long samples are
        self.size = len(inner)
        self.special = frozenset(inner.all_special_ids)
        self.mask = inner.mask_token_id
        candidates = (inner.pad_token_id, inner.eos_token_id, 0)
        self.padding = next(each for each in candidates if each is not None)
        self._end = [] if inner.eos_token_id is None else [inner.eos_token_id]
        self._opening, self._closing = _ends(inner("a")["input_ids"], self.plain("a"))

    def plain(self, text: str) -> list[int]:
        ids: list[int] = self._inner(text, add_special_tokens=False)["input_ids"]
        return ids

    def opening(self) -> list[int]:
        return self._opening

    def closing(self, *, final: bool) -> list[int]:
        """The ids that the tokenizer itself adds after a text; if there are none, a final text gets the end token."""
        return self._closing or (self._end if final else [])

    def target(self, text: str) -> tuple[list[int], list[int], list[int]]:
        # Tokenizers for translation treat targets differently from sources.
        opening, closing = self._target_ends
        return opening, self._inner(text_target=text, add_special_tokens=False)["input_ids"], closing

    @cached_property
    def _target_ends(self) -> tuple[list[int], list[int]]:
        cut = self._inner(text_target="a", add_special_tokens=False)["input_ids"]
        opening, closing = _ends(self._inner(text_target="a")["input_ids"], cut)
        return opening, closing or self._end

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[bool]]:
        # `datasets` fills missing keys of messages with None, which templates would print.
        chat = [{name: value for name, value in message.items() if value is not None} for message in messages]
        if not any(message.get("role") == "assistant" for message in chat):
            raise ChatError("it has no message of role assistant to learn from")
        try:
            marked = _MARKER.search(self._inner.get_chat_template()) is not None
        except ValueError as error:
            raise ChatError("the tokenizer has no chat template") from error
        found = self._templated(chat, **({"return_assistant_tokens_mask": True} if marked else {}))
        ids = list(found["input_ids"])
        if not marked:
            return ids, self._answers(ids, chat)
        predicted = [bool(each) for each in found["assistant_masks"]]
        if not any(predicted):
            raise ChatError("the template marks no part of it as the assistant's")
        return ids, predicted

    def _answers(self, ids: list[int], messages: list[dict[str, Any]]) -> list[bool]:
        """Which ids of a chat are answers: each from the template's generation prompt to the end of the message."""
        predicted = [False] * len(ids)
        for place, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before = self._templated(messages[:place], add_generation_prompt=True)["input_ids"] if place else []
            upto = self._templated(messages[: place + 1])["input_ids"]
            # Both must be prefixes of the whole chat.
            if ids[: len(before)] != before or ids[: len(upto)] != upto or len(upto) <= len(before):
                raise ChatError(
                    f"the bounds of the answer in message {place + 1} are unknown: the template renders the "
                    "same messages differently when others follow, and it has no {% generation %} marks"
                )
            predicted[len(before) : len(upto)] = [True] * (len(upto) - len(before))
        return predicted

    def _templated(self, messages: list[dict[str, Any]], **options: Any) -> dict[str, list[int]]:
        try:
            found = self._inner.apply_chat_template(messages, tokenize=True, return_dict=True, **options)
        except Exception as error:  # a template is a program and may raise anything
            raise ChatError(f"the chat template fails: {type(error).__name__}: {error}") from error
        return {name: list(values) for name, values in found.items()}

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._inner.decode(list(ids), skip_special_tokens=True)
        return text


def fitted(opening: list[int], ids: list[int], closing: list[int], limit: int) -> tuple[list[int], bool]:
    """A text cut to `limit` tokens including its special tokens, and whether it was cut."""
    # The end token stays: a decoder that never sees one does not learn to stop.
    room = max(0, limit - len(opening) - len(closing))
    return [*opening, *ids[:room], *closing][:limit], len(ids) > room


def _ends(whole: list[int], alone: list[int]) -> tuple[list[int], list[int]]:
    """The ids that a tokenizer adds before and after a text, found by comparison: not every tokenizer can tell."""
    places = range(len(whole) - len(alone) + 1)
    start = next((place for place in places if whole[place : place + len(alone)] == alone), 0)
    return whole[:start], whole[start + len(alone) :]


def open_encoder(folder: str | None) -> Encoder:
    """The encoder for `data.tokenizer`. TrainingError if its folder has no tokenizer."""
    if folder is None:
        return Encoder()
    path = Path(folder).absolute()
    if not path.is_dir():
        what = f"data.tokenizer: {path} is not a folder"
        raise TrainingError(what, hint="use a folder that save_pretrained has written")
    refuse_special(str(path), "data.tokenizer")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported
    # its threads would not survive the fork of loader processes
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import transformers

    transformers.utils.logging.set_verbosity_error()
    try:
        inner = transformers.AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except BaseException as error:  # transformers raises any exception, and its Rust code even BaseExceptions
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        what = f"data.tokenizer: transformers cannot load a tokenizer from {path}: {first_line(error)}"
        raise TrainingError(what) from error
    return Tokenizer(inner, fingerprint(path))


def fingerprint(folder: Path) -> str:
    """A shortened SHA-256 over the names and contents of a tokenizer's files."""
    found = hashlib.sha256()
    for file in tokenizer_files(folder):
        found.update(f"{file.name}\0{file.stat().st_size}\0".encode("utf-8", "surrogateescape"))
        found.update(file.read_bytes())
    return found.hexdigest()[:16]


def tokenizer_files(folder: Path) -> list[Path]:
    """The tokenizer's files in a folder, by name."""
    return sorted({file for pattern in _FILES for file in folder.glob(pattern) if file.is_file()})
