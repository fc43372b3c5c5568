"""Rows as token ids: which tokens a row becomes, and which of them the model learns to write."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trainkit.data.chats import ChatError, ChatTemplate
from trainkit.data.files import SourceRow
from trainkit.data.formats import CHATS, PROMPTED, Chat, Pair, Ready, RowFormat, content_of
from trainkit.data.tokenizer import Encoder, Tokenizer, open_encoder
from trainkit.recipe.schema import DatasetData
from trainkit.tasks import CAUSAL, WRITING

IGNORE_INDEX = -100  # marks a target that is not predicted: the default `ignore_index` of torch's losses
TOGETHER = 256  # rows whose texts the tokenizer gets at once


class EncodedText(NamedTuple):
    """Token ids, and a byte for each: 1 if it is learned. In a pair the source is read, and the target is learned."""

    ids: Sequence[int]
    learned: bytes


@dataclass(frozen=True, slots=True)
class EncodedRow:
    """What a row became: several texts where a template writes earlier answers differently; none if it is skipped."""

    row: SourceRow
    texts: Sequence[EncodedText]
    label: int | str | None = None


@dataclass(slots=True)
class RowEncoder:
    """Makes token ids of rows. task: of the model. template: of chats, None where there is none or it is not used."""

    data: DatasetData
    form: RowFormat
    task: str
    encoder: Encoder
    template: ChatTemplate | None

    @classmethod
    def of(cls, data: DatasetData, form: RowFormat, task: str, encoder: Encoder) -> RowEncoder:
        """The encoder of these rows. ChatError where they are chats, and there is no template for them."""
        template = None
        if data.prompt_prefix and form.name not in PROMPTED:
            raise ChatError("data.prompt_prefix goes before a prompt or a source, and these rows have none")
        if data.train_on_prompts and "labels" in form.columns:
            raise ChatError("data.train_on_prompts learns all of a row, and the labels of these say what is learned")
        if task == CAUSAL and form.name in CHATS and data.chat_template != "none":
            chosen = data.chat_template
            own = isinstance(encoder, Tokenizer) and encoder.has_template
            # Prompts with answers are chats of one turn for a model that knows a template, else plain texts.
            if form.name not in ("completion", "pair") or chosen or own:
                if not isinstance(encoder, Tokenizer):
                    raise ChatError("chats need a tokenizer, whose special tokens say who speaks: set data.tokenizer")
                template = ChatTemplate.of(encoder.inner, chosen)
        elif data.chat_template == "none" and form.name in ("messages", "conversations"):
            raise ChatError("data.chat_template none is for prompts with answers, and these rows are chats")
        return cls(data, form, task, encoder, template)

    def __reduce__(self) -> tuple[object, ...]:  # a compiled template goes to no other process
        return _opened, (self.data, self.form, self.task)

    @property
    def whole(self) -> bool:
        """Whether samples are read as a whole, not predicted token by token."""
        return self.task != CAUSAL

    @property
    def content_fields(self) -> tuple[str, ...]:
        """The columns that must not be empty."""
        return tuple(self.form.columns[role] for role in self.form.format.needs)

    def encoded(self, rows: Iterable[SourceRow]) -> Iterator[EncodedRow]:
        """Each row as its texts, in order. TrainingError names a row that cannot be learned from."""
        waiting: list[SourceRow] = []
        for row in rows:
            waiting.append(row)
            if len(waiting) == TOGETHER:
                yield from self._together(waiting)
                waiting = []
        yield from self._together(waiting)

    def one(self, row: SourceRow) -> EncodedRow:
        """One row. TrainingError as of :meth:`encoded`."""
        return next(self._together([row]))

    def _together(self, rows: Sequence[SourceRow]) -> Iterator[EncodedRow]:
        kept = [row for row in rows if not (self.data.skip_empty and row.blank(self.content_fields))]
        contents = [
            content_of(row, self.form, chats=self.template is not None, prefix=self.data.prompt_prefix or "")
            for row in kept
        ]
        try:
            encoded = self._texts(kept, contents)
        except (TypeError, UnicodeError) as error:
            for row in kept:
                if not _is_unicode(row):
                    what = "half of a surrogate pair (as \\ud83d) is no text that a tokenizer can read"
                    raise row.wrong(what, "mend the text there: whole characters") from error
            raise
        found = {id(row): texts for row, texts in zip(kept, encoded, strict=True)}
        label = self.form.columns.get("label")
        for row in rows:
            texts = found.get(id(row), ())
            yield EncodedRow(row, texts, row.label(label) if label and texts else None)

    def _texts(self, rows: Sequence[SourceRow], contents: Sequence[Chat | Pair | Ready]) -> list[list[EncodedText]]:
        if contents and isinstance(contents[0], Chat):
            return self._chats(rows, contents)
        if contents and isinstance(contents[0], Ready):
            return [[self._ready(row, each)] for row, each in zip(rows, contents, strict=True)]  # type: ignore[arg-type]
        pairs = [each for each in contents if isinstance(each, Pair)]
        encoder = self.encoder
        after = encoder.targets([each.after for each in pairs]) if self.task == WRITING else encoder.plain_all(
            [each.after for each in pairs]
        )  # fmt: skip
        before = encoder.plain_all([each.before for each in pairs])
        of_prompt = b"\1" if self.data.train_on_prompts else b"\0"
        made = []
        for row, source, target in zip(rows, before, after, strict=True):
            if self.task == WRITING:
                opening, closing = encoder.target_ends
                first = [*encoder.opening(), *source, *encoder.closing(final=False)]
                second = [*opening, *target, *closing]
                if not source or not target:
                    empty = self.content_fields[0] if not source else self.content_fields[-1]
                    raise row.wrong(f"field {empty!r} gives no token")
            else:
                first = [*encoder.opening(), *source]
                second = [*target, *encoder.closing(final=not self.whole)]
                if not first and not second:
                    raise row.wrong(f"field {self.content_fields[0]!r} gives no token")
            made.append([EncodedText([*first, *second], of_prompt * len(first) + b"\1" * len(second))])
        return made

    def _chats(self, rows: Sequence[SourceRow], contents: Sequence[Chat | Pair | Ready]) -> list[list[EncodedText]]:
        assert self.template is not None and isinstance(self.encoder, Tokenizer)
        template, whole, renderings = self.template, self.data.train_on_prompts, []
        for row, chat in zip(rows, contents, strict=True):
            assert isinstance(chat, Chat)
            try:
                renderings.append(
                    [template.whole(chat.messages, chat.tools)]
                    if whole
                    else template.learnable(chat.messages, chat.tools, only_last=chat.only_last)
                )
            except ChatError as error:
                raise row.wrong(str(error)) from error
        flat = [each for several in renderings for each in several]
        # A token without a character of its own lies in no range.
        found = self.encoder.learned(flat)
        texts = iter([EncodedText(ids, b"\1" * len(ids) if whole else learned) for ids, learned in found])
        return [[next(texts) for _ in several] for several in renderings]

    def _ready(self, row: SourceRow, content: Ready) -> EncodedText:
        ids, column = content.ids, self.form.columns["input_ids"]
        if min(ids) < 0 or max(ids) >= 2**32:
            raise row.wrong(f"field {column!r} holds {min(ids) if min(ids) < 0 else max(ids)}, which is not a token id")
        if content.targets is None:
            return EncodedText(ids, b"\1" * len(ids))
        name = self.form.columns["labels"]
        if len(content.targets) != len(ids):
            raise row.wrong(f"{len(content.targets)} targets in {name!r} for {len(ids)} token ids")
        for place, (target, token) in enumerate(zip(content.targets, ids, strict=True)):
            if target not in (token, IGNORE_INDEX):
                raise row.wrong(
                    f"target {place} in {name!r} is {target}, neither the token id there ({token}) nor {IGNORE_INDEX}"
                )
        return EncodedText(ids, bytes(target != IGNORE_INDEX for target in content.targets))


def _is_unicode(row: SourceRow) -> bool:
    """Whether all its texts have whole characters alone; JSON may escape the half of one."""
    try:
        return bool(json.dumps(row.fields, ensure_ascii=False, default=str).encode())
    except UnicodeEncodeError:
        return False


def _opened(data: DatasetData, form: RowFormat, task: str) -> RowEncoder:
    return RowEncoder.of(data, form, task, open_encoder(data.tokenizer))


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a sample may be. tokens: of a causal text, one more than the positions; else of a text or a source.

    target: of a pair's second part; None without pairs. ends: how many of the last tokens (of each part) stay when the
    others are cut, for a text without its end token does not teach where texts end.
    """

    tokens: int
    target: int | None = None
    ends: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, encoder: RowEncoder, length: int, target: int | None = None) -> Limits:
        """The limits of samples. length: `data.sequence_length`."""
        if encoder.task == CAUSAL:
            return cls(length + 1)
        ready = encoder.form.name in ("ids", "labelled_ids")
        end = 0 if ready else len(encoder.encoder.closing(final=False))
        if encoder.task != WRITING:
            return cls(length, None, (end, 0))
        return cls(length, target or length, (end, len(encoder.encoder.target_ends[1])))


def cut_places(size: int, limit: int, end: int) -> tuple[int, int]:
    """How many of the first and of the last tokens of a text stay within a limit."""
    return (size, 0) if size <= limit else (max(0, limit - end), min(end, limit))
