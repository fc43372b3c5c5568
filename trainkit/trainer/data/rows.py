"""Turn rows with named fields into samples: read, tokenise, pack or pad, and split them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
from numpy.typing import NDArray

from trainkit.data.files import SourceRow
from trainkit.data.tokenizer import ChatError, Encoder, fitted, open_encoder
from trainkit.errors import TrainingError
from trainkit.recipe.schema import DatasetData, HfModel, JsonlData, Recipe
from trainkit.recipe.schema.model import is_packed
from trainkit.text import join_names, pluralize
from trainkit.trainer.data.source import (
    IGNORE_INDEX,
    Batch,
    BatchFormat,
    Ids,
    Labels,
    Lengths,
    Mask,
    Samples,
    Source,
    is_writing,
)

Rows = JsonlData | DatasetData  # the sections whose samples come from rows
Spans = NDArray[np.int64]  # (samples, 2): index of the first token and of the end of each sample


@dataclass(slots=True)
class RowReader:
    """Reads the rows of a data set. cut: how many sources and targets were too long so far."""

    data: Rows
    encoder: Encoder
    form: BatchFormat
    packing: bool
    cut: int = 0

    @classmethod
    def of(cls, recipe: Recipe) -> RowReader:
        """The reader of a recipe with rows. TrainingError if its tokenizer cannot be read."""
        data = cast("Rows", recipe.data)
        encoder = open_encoder(data.tokenizer)
        whole = isinstance(recipe.model, HfModel) and recipe.model.task != "causal_lm"
        # In a pair the source's tokens come first, and only the target's are predicted.
        pairs = Lengths.of(data) if is_writing(recipe) else None
        length = pairs.source + pairs.target if pairs else data.sequence_length
        return cls(data, encoder, BatchFormat(length, encoder.padding, whole, pairs), is_packed(recipe))

    @property
    def ahead(self) -> int:
        """How many tokens a sample's targets extend beyond its inputs."""
        return 0 if self.form.whole else 1

    @property
    def kind(self) -> str:
        """Type code of `array` for ids: millions of them are held in memory."""
        # Four bytes a token, or one, where Python's integers would take 28.
        return "B" if self.encoder.unit == "bytes" and not self.data.tokens_field else "I"

    @property
    def content_fields(self) -> tuple[str, ...]:
        """The fields with the content to train on."""
        if whole := self.data.messages_field or self.data.tokens_field:
            return (whole,)
        return (self.data.prompt_field, self.data.field) if self.data.prompt_field else (self.data.field,)

    def tokens(self, row: SourceRow) -> tuple[Sequence[int], bytes]:
        """Ids, and a byte for each: 1 if it is predicted. TrainingError if a field of the recipe is missing."""
        encoder, data = self.encoder, self.data
        if data.messages_field:
            return self._chat(row, data.messages_field)
        limit = data.sequence_length if self.form.whole and not self.packing else None
        if data.tokens_field:
            return self._ready(row, data.tokens_field, limit)
        prompt = (data.prompt_prefix or "") + row.text(data.prompt_field) if data.prompt_field else ""
        text = row.text(data.field)
        if self.form.pairs:
            before, cut_source = encoder.source(prompt, self.form.pairs.source)
            after, cut_target = fitted(*encoder.target(text), self.form.pairs.target)
            self.cut += cut_source + cut_target
            if not before or not after:
                raise row.wrong(f"field {(data.field if before else data.prompt_field)!r} gives no token")
        else:
            opening, closing = encoder.opening(), encoder.closing(final=not self.form.whole)
            before = [*opening, *encoder.plain(prompt)] if prompt else opening
            room = None if limit is None else max(0, limit - len(opening) - len(closing))
            after = [*encoder.plain(text)[:room], *closing]
            if not before and not after:
                raise row.wrong(f"field {data.field!r} gives no token")
        return [*before, *after], bytes(len(before)) + b"\1" * len(after)

    def _chat(self, row: SourceRow, name: str) -> tuple[Sequence[int], bytes]:
        messages = row.items(name)
        if not all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages):
            raise row.wrong(f"field {name!r} is not a chat: expected a list of {{role, content}}")
        try:
            ids, predicted = self.encoder.chat(messages)
        except ChatError as error:
            raise row.wrong(f"field {name!r}: {error}") from error
        return ids, bytes(predicted)

    def _ready(self, row: SourceRow, name: str, limit: int | None) -> tuple[Sequence[int], bytes]:
        ids = row.ids(name)
        if min(ids) < 0 or max(ids) >= 2**32:
            raise row.wrong(f"field {name!r} holds {min(ids) if min(ids) < 0 else max(ids)}, which is not a token id")
        if not self.data.targets_field:
            return ids[:limit], b"\1" * len(ids[:limit])
        targets = row.ids(self.data.targets_field)
        if len(targets) != len(ids):
            raise row.wrong(f"{len(targets)} targets in {self.data.targets_field!r} for {len(ids)} token ids")
        for place, (target, token) in enumerate(zip(targets, ids, strict=True)):
            if target not in (token, IGNORE_INDEX):
                raise row.wrong(
                    f"target {place} in {self.data.targets_field!r} is {target}, which is neither the token id there "
                    f"({token}) nor {IGNORE_INDEX}"
                )
        return ids, bytes(target != IGNORE_INDEX for target in targets)


@dataclass(frozen=True, slots=True)
class Texts:
    """All texts as one sequence of token ids. predicted: which are targets.

    starts: index of each text's first token, and the end.
    """

    ids: Ids
    predicted: Mask
    starts: NDArray[np.int64]
    highest: int  # the highest token id; -1 without any
    where: str  # the location of the highest
    cut: int  # how many sources and targets were cut
    skipped: int  # rows that were skipped
    labels: Sequence[tuple[int | str, str]]  # the label and location of each text, if texts have labels


def read_texts(rows: Iterable[SourceRow], reader: RowReader) -> Texts:
    """Read every row into memory. TrainingError locates a row without a field that the recipe names."""
    ids, answers, starts = array(reader.kind), bytearray(), [0]
    highest, where, skipped, reader.cut = -1, "", 0, 0
    labels: list[tuple[int | str, str]] = []
    for row in rows:
        if reader.data.skip_empty and row.blank(reader.content_fields):
            skipped += 1
            continue
        found, predicted = reader.tokens(row)
        if max(found) > highest:
            highest, where = max(found), row.place
        ids.extend(found)
        answers += b"\0" + predicted[1:]  # the first token has nothing before it to be predicted from
        starts.append(len(ids))
        if reader.data.label_field:
            labels.append((row.label(reader.data.label_field), row.place))
    tokens: Ids = np.frombuffer(ids.tobytes(), dtype=np.uint8 if reader.kind == "B" else np.uint32)
    mask = np.frombuffer(bytes(answers), dtype=np.bool_)
    return Texts(tokens, mask, np.array(starts), highest, where, reader.cut, skipped, labels)


def source_of_rows(
    recipe: Recipe, train: Iterable[SourceRow], validation: Iterable[SourceRow] | None = None, names: Sequence[str] = ()
) -> Source:
    """Samples of the rows; without a validation set, the end is held out. names: of labels, if the data has them."""
    reader = RowReader.of(recipe)
    data, encoder, form = reader.data, reader.encoder, reader.form
    parts = [read_texts(rows, reader) for rows in (train, validation) if rows is not None]
    labels, numbers = known_labels(parts, data.labels or names) if data.label_field else (None, np.zeros(0, np.int64))
    halves, left_out = _split(parts, reader)
    sets: list[Samples] = []  # training and validation
    for texts, spans in halves:
        first = len(sets[0]) if sets else 0  # validation labels come after training labels
        mine = numbers[first : first + len(spans)] if labels else None
        sets.append(Samples(len(spans), partial(_batch, form, texts, spans, mine)))
    highest = max(parts, key=lambda texts: texts.highest)
    description, facts = _summary(parts, reader, labels, left_out)
    return Source(
        sets[0],
        sets[1],
        description,
        facts,
        highest=max(highest.highest, encoder.padding),
        where=highest.where,
        labels=labels,
        encoder=encoder,
        padding=encoder.padding if form.whole else None,
    )


def _batch(
    form: BatchFormat, texts: Texts, spans: Spans, labels: NDArray[np.int64] | None, indices: Sequence[int]
) -> Batch:
    chosen = list(indices)
    samples = [(texts.ids[start:stop], texts.predicted[start:stop]) for start, stop in spans[chosen].tolist()]
    return form.batch(samples, None if labels is None else labels[chosen])


def _split(parts: Sequence[Texts], reader: RowReader) -> tuple[list[tuple[Texts, Spans]], int]:
    """Texts and spans for training and for validation, neither empty, and the number of samples without targets."""
    data, length, ahead = reader.data, reader.form.length, reader.ahead
    found, left_out = [], 0
    for texts in parts:
        starts, ends = texts.starts[:-1], texts.starts[1:]
        if reader.packing:  # texts joined end to end, instead of one sample per text
            starts, ends = np.arange(math.ceil((len(texts.ids) - ahead) / length)) * length, texts.starts[-1:]
        spans = np.stack([starts, np.minimum(starts + length + ahead, ends)], axis=1)
        if ahead:  # no targets: the prompt fills the sample, or the text is a single byte
            before = np.concatenate([[0], np.cumsum(texts.predicted)])
            kept = before[spans[:, 1]] > before[np.minimum(spans[:, 0] + 1, spans[:, 1])]
            spans, left_out = spans[kept], left_out + int(np.count_nonzero(~kept))
        found.append((texts, spans))
    sizes = [len(spans) for _, spans in found]
    if len(found) == 1 and sizes[0] >= 2:
        border = sizes[0] - max(1, int(sizes[0] * data.validation_fraction))
        texts, spans = found[0]
        return [(texts, spans[:border]), (texts, spans[border:])], left_out
    if len(found) == 2 and all(sizes):
        return found, left_out
    raise TrainingError(
        f"data.path: {data.path} fills {' and '.join(map(str, sizes))} samples of {data.sequence_length} tokens, and "
        f"at least one for training and one for validation are needed{_left_out(left_out)}",
        hint="raise data.sequence_length" if left_out else "lower data.sequence_length, or provide more text",
    )


def known_labels(parts: Sequence[Texts], names: Sequence[str]) -> tuple[Labels, NDArray[np.int64]]:
    """The labels as numbers: as they are, or as indices into the names. TrainingError for a label without a number."""
    every = [labelled for texts in parts for labelled in texts.labels]
    found_names = sorted({label for label, _ in every if isinstance(label, str)})
    chosen = tuple(names or found_names)  # the names in the data, in alphabetical order: the same on every machine
    numbers: dict[int | str, int] = {name: number for number, name in enumerate(chosen)}
    highest, where = -1, ""
    for label, place in every:
        if isinstance(label, str) and label not in numbers:
            raise TrainingError(f"data.path: {place}: label {label!r} is not in data.labels: {', '.join(chosen)}")
        if isinstance(label, int) and found_names:
            other = next(place for word, place in every if isinstance(word, str))
            raise TrainingError(f"data.path: {place}: label {label} is a number, but the label of {other} is a name")
        number = label if isinstance(label, int) else numbers[label]
        if number > highest:
            highest, where = number, place
    found = np.array([numbers.get(label, label) for label, _ in every], dtype=np.int64)
    return Labels(highest, where, chosen), found


def _left_out(samples: int) -> str:
    """How many samples were left out because a prompt fills them: they have no targets."""
    count = f"{samples:,} {'sample' if samples == 1 else 'samples'}"
    return f" ({count} left out: no target within data.sequence_length)" if samples else ""


def _summary(
    parts: Sequence[Texts], reader: RowReader, labels: Labels | None, left_out: int
) -> tuple[str, dict[str, int | float | str]]:
    """Description and facts. Ranks must agree on the facts, which reveals a tokenizer that differs between machines."""
    unit = "tokens" if reader.data.tokens_field else reader.encoder.unit
    texts, tokens = sum(len(each.starts) - 1 for each in parts), sum(len(each.ids) for each in parts)
    description = f"{texts:,} texts of {tokens:,} {unit}{_left_out(left_out)}"
    facts: dict[str, int | float | str] = {"texts": texts, unit: tokens}
    if cut := sum(each.cut for each in parts):
        description += f" ({cut:,} sources and targets cut)"
        facts["cut"] = cut
    if skipped := sum(each.skipped for each in parts):
        description += f" ({pluralize(skipped, 'empty row')} skipped)"
        facts["rows_passed_over"] = skipped
    if left_out:
        facts["samples_left_out"] = left_out
    if reader.encoder.unit != "bytes":
        facts["tokenizer"] = reader.encoder.fingerprint
    if labels and labels.names:
        numbered = [f"{number} {name}" for number, name in enumerate(labels.names)]
        facts["labels"] = ", ".join(numbered)
        description += f" with {len(numbered)} labels ({join_names(numbered)})"
    return description, facts
