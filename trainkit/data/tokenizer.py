"""Text as token ids: one for each byte, or by a tokenizer of transformers."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from trainkit.data.chats import Rendering, learned_mask
from trainkit.data.files import refuse_special
from trainkit.errors import TrainingError, first_line
from trainkit.recipe.schema.data import BYTES

# What decides how a tokenizer cuts text, among the files of a model's folder.
TOKENIZER_FILES = (
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

    def plain_all(self, texts: Sequence[str]) -> list[list[int]]:
        """The same of several texts."""
        return [self.plain(text) for text in texts]

    def opening(self) -> list[int]:
        """The ids that go before a text."""
        return []

    def closing(self, *, final: bool) -> list[int]:
        """The ids that go after a text. final: with the end token, which the model learns to write."""
        return []

    def source(self, text: str, limit: int) -> tuple[list[int], bool]:
        """A text for an encoder with its special tokens, at most `limit` tokens, and whether it was cut."""
        return fitted(self.opening(), self.plain(text), self.closing(final=False), limit)

    def targets(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of texts that a decoder writes."""
        return self.plain_all(texts)

    @property
    def target_ends(self) -> tuple[list[int], list[int]]:
        """The ids that go before and after a text that a decoder writes."""
        return self.opening(), self.closing(final=True)

    def shown(self, ids: Sequence[int]) -> str:
        """The text of ids with all special tokens, to look at."""
        return self.decode(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids. Bytes that are not UTF-8 become U+FFFD."""
        return bytes(each for each in ids if each < 256).decode("utf-8", errors="replace")


class Tokenizer(Encoder):
    """A tokenizer of transformers."""

    unit = "tokens"

    def __init__(self, inner: Any, fingerprint: str) -> None:
        self.inner, self.fingerprint = inner, fingerprint
        inner.model_max_length = 1 << 40  # the recipe decides how long samples are
        self.size = len(inner)
        self.special = frozenset(inner.all_special_ids)
        self.mask = inner.mask_token_id
        candidates = (inner.pad_token_id, inner.eos_token_id, 0)
        self.padding = next(each for each in candidates if each is not None)
        self._end = [] if inner.eos_token_id is None else [inner.eos_token_id]
        self._opening, self._closing = _ends(inner("a")["input_ids"], self.plain("a"))

    def plain(self, text: str) -> list[int]:
        ids: list[int] = self.inner(text, add_special_tokens=False)["input_ids"]
        return ids

    def opening(self) -> list[int]:
        return self._opening

    def closing(self, *, final: bool) -> list[int]:
        """The ids that the tokenizer itself adds after a text; if there are none, a final text gets the end token."""
        return self._closing or (self._end if final else [])

    def plain_all(self, texts: Sequence[str]) -> list[list[int]]:
        return self.inner(list(texts), add_special_tokens=False)["input_ids"] if texts else []

    def targets(self, texts: Sequence[str]) -> list[list[int]]:
        # Tokenizers for translation treat targets differently from sources.
        return self.inner(text_target=list(texts), add_special_tokens=False)["input_ids"] if texts else []

    @cached_property
    def target_ends(self) -> tuple[list[int], list[int]]:
        cut = self.inner(text_target="a", add_special_tokens=False)["input_ids"]
        opening, closing = _ends(self.inner(text_target="a")["input_ids"], cut)
        return opening, closing or self._end

    @property
    def has_template(self) -> bool:
        return bool(getattr(self.inner, "chat_template", None))

    def learned(self, renderings: Sequence[Rendering]) -> list[tuple[list[int], bytes]]:
        """The ids of rendered chats, and which of them lie in what is learned; each text is cut into tokens once."""
        texts = [each.text for each in renderings]
        if not texts:
            return []
        if getattr(self.inner, "is_fast", False):
            found = self.inner(texts, add_special_tokens=False, return_offsets_mapping=True)
            every = zip(found["input_ids"], found["offset_mapping"], renderings, strict=True)
            return [(ids, learned_mask(offsets, each.learned)) for ids, offsets, each in every]
        return [self._by_prefixes(each) for each in renderings]

    def _by_prefixes(self, rendering: Rendering) -> tuple[list[int], bytes]:
        """For a tokenizer that does not tell where its tokens lie: where those of the text before them end."""
        ids = self.plain(rendering.text)
        mask = bytearray(len(ids))
        for start, end in rendering.learned:
            first, last = (_alike(ids, self.plain(rendering.text[:place])) for place in (start, end))
            mask[first:last] = b"\1" * max(0, last - first)
        return ids, bytes(mask)

    def shown(self, ids: Sequence[int]) -> str:
        text: str = self.inner.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.inner.decode(list(ids), skip_special_tokens=True)
        return text


def require_known(highest: int, known: int | None, where: str) -> None:
    """TrainingError for an id that a model of so many has no row for; None where its number is not known."""
    if known is not None and highest >= known:
        raise TrainingError(
            f"model: a vocabulary of {known} is too small for token {highest} of {where or 'the data'}",
            hint=f"set its vocab_size to {highest + 1} or more; 256 holds every byte",
        )


def fitted(opening: list[int], ids: list[int], closing: list[int], limit: int) -> tuple[list[int], bool]:
    """A text cut to `limit` tokens including its special tokens, and whether it was cut."""
    # The end token stays: a decoder that never sees one does not learn to stop.
    room = max(0, limit - len(opening) - len(closing))
    return [*opening, *ids[:room], *closing][:limit], len(ids) > room


def _alike(ids: Sequence[int], others: Sequence[int]) -> int:
    """How many ids two lists have in common at their start."""
    pairs = enumerate(zip(ids, others, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(ids), len(others)))


def _ends(whole: list[int], alone: list[int]) -> tuple[list[int], list[int]]:
    """The ids that a tokenizer adds before and after a text, found by comparison: not every tokenizer can tell."""
    places = range(len(whole) - len(alone) + 1)
    start = next((place for place in places if whole[place : place + len(alone)] == alone), 0)
    return whole[:start], whole[start + len(alone) :]


def open_encoder(folder: str | None) -> Encoder:
    """The encoder for `data.tokenizer`. TrainingError if its folder has no tokenizer."""
    if folder in (None, BYTES):
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
    return sorted({file for pattern in TOKENIZER_FILES for file in folder.glob(pattern) if file.is_file()})
