"""Rows with named fields become samples: read, turned into tokens, packed or padded, and split."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from trainkit.errors import TrainingError
from trainkit.recipe.schema import DatasetData, HfModel, JsonlData, Recipe
from trainkit.recipe.schema.model import is_packed
from trainkit.text import counted, listed
from trainkit.trainer.data.encoding import ChatError, Encoder, open_encoder
from trainkit.trainer.data.pairs import Lengths, cut_pairs, encoded_pair, is_writing
from trainkit.trainer.data.shards import Row
from trainkit.trainer.data.source import NO_LABEL, Batch, Ids, Labels, Samples, Source, next_token_batch

Rows = JsonlData | DatasetData  # the sections whose samples come from rows


@dataclass(frozen=True, slots=True)
class Texts:
    """All texts as one row of token ids. predicted: which are targets. starts: each text's first token, and the end."""

    ids: NDArray[np.integer[Any]]
    predicted: NDArray[np.bool_]
    starts: NDArray[np.int64]
    highest: int  # token id; -1 without any
    where: str  # the place of the highest
    cut: int = 0  # sources and targets that were too long
    passed_over: int = 0  # rows
    labels: Sequence[tuple[int | str, str]] = ()  # of each text, with its place, where they are labelled


def content_fields(data: Rows) -> tuple[str, ...]:
    """The fields that hold what is trained on."""
    if whole := data.messages_field or data.tokens_field:
        return (whole,)
    return (data.prompt_field, data.field) if data.prompt_field else (data.field,)


@dataclass(slots=True)
class Reading:
    """How the rows of a data set are read.

    limit: tokens that a text may have at most, its ends included. pairs: how long sources and targets are, where each
    row has both; the source's tokens go first, and the target's are those that are predicted.
    """

    data: Rows
    encoder: Encoder
    final: bool  # whether a text's end is to be learned
    limit: int | None = None
    pairs: Lengths | None = None
    cut: int = 0  # sources and targets so far

    @property
    def kind(self) -> str:
        """Format of ids, as `array` names it: those of texts are held in memory by the million."""
        # Four bytes a token, or one, where Python's integers would take 28.
        return "B" if self.encoder.unit == "bytes" and not self.data.tokens_field else "I"

    def texts(self, rows: Iterable[Row]) -> Texts:
        """Every row. TrainingError names the place of one that does not hold what the recipe names."""
        ids, answers, ends = array(self.kind), bytearray(), [0]
        self.cut = 0
        highest, where = -1, ""
        labels: list[tuple[int | str, str]] = []
        passed_over = 0
        for row in rows:
            if self.data.skip_empty and row.blank(content_fields(self.data)):
                passed_over += 1
                continue
            found, predicted = self.tokens(row)
            if max(found) > highest:
                highest, where = max(found), row.place
            ids.extend(found)
            answers += b"\0" + predicted[1:]  # the first token follows from nothing
            ends.append(len(ids))
            if self.data.label_field:
                labels.append((row.label(self.data.label_field), row.place))
        mask = np.frombuffer(bytes(answers), dtype=np.bool_)
        kind = np.uint8 if self.kind == "B" else np.uint32
        tokens: NDArray[np.integer[Any]] = np.frombuffer(ids.tobytes(), dtype=kind)
        return Texts(tokens, mask, np.array(ends), highest, where, self.cut, passed_over, labels)

    def tokens(self, row: Row) -> tuple[Sequence[int], bytes]:
        """Ids, and a byte for each: 1 where it is predicted. TrainingError as of :meth:`texts`."""
        encoder, data = self.encoder, self.data
        if data.messages_field:
            return self._chat(row, data.messages_field)
        if data.tokens_field:
            return self._ready(row, data.tokens_field)
        if self.pairs:
            return self._pair(row, self.pairs)
        opening, closing = encoder.opening(), encoder.closing(final=self.final)
        prompt = encoder.plain(self._prompt(row)) if data.prompt_field else []
        text = encoder.plain(row.text(data.field))
        if self.limit is not None:
            text = text[: max(0, self.limit - len(opening) - len(closing))]
        before = [*opening, *prompt]
        if not before and not text and not closing:
            raise row.wrong(f"field {data.field!r} gives no token")
        return [*before, *text, *closing], bytes(len(before)) + b"\1" * (len(text) + len(closing))

    def _prompt(self, row: Row) -> str:
        return (self.data.prompt_prefix or "") + row.text(self.data.prompt_field or "")

    def _pair(self, row: Row, lengths: Lengths) -> tuple[Sequence[int], bytes]:
        source, target, cut = encoded_pair(self.encoder, self._prompt(row), row.text(self.data.field), lengths)
        if not source or not target:
            raise row.wrong(f"field {(self.data.field if source else self.data.prompt_field)!r} gives no token")
        self.cut += cut
        return [*source, *target], bytes(len(source)) + b"\1" * len(target)

    def _chat(self, row: Row, name: str) -> tuple[Sequence[int], bytes]:
        messages = row.items(name)
        if not all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages):
            raise row.wrong(f"field {name!r} is no chat: expected a list of {{role, content}}")
        try:
            ids, predicted = self.encoder.chat(messages)
        except ChatError as error:
            raise row.wrong(f"field {name!r}: {error}") from error
        return ids, bytes(predicted)

    def _ready(self, row: Row, name: str) -> tuple[Sequence[int], bytes]:
        ids = row.ids(name)
        if min(ids) < 0 or max(ids) >= 2**32:
            raise row.wrong(f"field {name!r} holds {min(ids) if min(ids) < 0 else max(ids)}, which is no token id")
        if not self.data.targets_field:
            return ids[: self.limit], b"\1" * len(ids[: self.limit])
        targets = row.ids(self.data.targets_field)
        if len(targets) != len(ids):
            raise row.wrong(f"{len(targets)} targets in {self.data.targets_field!r} for {len(ids)} token ids")
        for place, (target, token) in enumerate(zip(targets, ids, strict=True)):
            if target not in (token, NO_LABEL):
                raise row.wrong(
                    f"target {place} in {self.data.targets_field!r} is {target}, which is neither the token id there "
                    f"({token}) nor {NO_LABEL}"
                )
        return ids, bytes(target != NO_LABEL for target in targets)


Spans = NDArray[np.int64]  # (samples, 2): first token and end of each sample


def source_of_rows(
    recipe: Recipe, train: Iterable[Row], validation: Iterable[Row] | None = None, names: Sequence[str] = ()
) -> Source:
    """Samples of the rows; without a validation set, the end is held out. names: of labels, if the data knows them."""
    data = cast("Rows", recipe.data)
    task = recipe.model.task if isinstance(recipe.model, HfModel) else "causal_lm"
    whole = task != "causal_lm"
    pairs = Lengths.of(data) if is_writing(recipe) else None
    packing = is_packed(recipe)
    encoder = open_encoder(data.tokenizer)
    limit = data.sequence_length if whole and not packing else None
    reading = Reading(data, encoder, final=not whole, limit=limit, pairs=pairs)
    parts = [reading.texts(rows) for rows in (train, validation) if rows is not None]
    highest = max(parts, key=lambda texts: texts.highest)
    labels, numbers = known_labels(parts, data.labels or names) if data.label_field else (None, np.zeros(0, np.int64))
    reach = pairs.source + pairs.target if pairs else data.sequence_length  # pairs are cut already, each part by itself
    halves, left_out = _split(parts, data, reach, whole=whole, packing=packing)
    sets: list[Samples] = []  # training and validation
    for texts, spans in halves:
        first = len(sets[0]) if sets else 0  # the labels of validation follow those of training
        mine = numbers[first : first + len(spans)] if labels else None
        if pairs:
            tokens = texts.ids, texts.predicted
            sets.append(Samples(len(spans), partial(cut_pairs, tokens, spans, pairs, encoder.padding)))
            continue
        make = partial(_whole_texts, labels=mine) if whole else _next_tokens
        sets.append(Samples(len(spans), partial(make, texts, spans, data.sequence_length, encoder.padding)))
    description, facts = _summary(parts, "tokens" if data.tokens_field else encoder.unit, encoder, labels, left_out)
    return Source(
        sets[0],
        sets[1],
        description,
        facts,
        highest=max(highest.highest, encoder.padding),
        where=highest.where,
        labels=labels,
        encoder=encoder,
        padding=encoder.padding if whole else None,
    )


def _split(
    parts: Sequence[Texts], data: Rows, length: int, *, whole: bool, packing: bool
) -> tuple[list[tuple[Texts, Spans]], int]:
    """Texts and spans for training and validation, neither empty, and how many samples had nothing to predict."""
    ahead = 0 if whole else 1
    found, left_out = [], 0
    for texts in parts:
        spans = _spans(texts, length, ahead, packing=packing)
        if not whole:  # a prompt may fill a sample, and a text may be a single byte: there is nothing to predict
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
        f"one for training and one for validation are the least{_left_out(left_out)}",
        hint="raise data.sequence_length" if left_out else "lower data.sequence_length, or bring more text",
    )


def _spans(texts: Texts, length: int, ahead: int, *, packing: bool) -> Spans:
    """Samples of texts end to end, or one for each text, cut. ahead: tokens beyond a sample that its targets reach."""
    starts, ends = texts.starts[:-1], texts.starts[1:]
    if packing:
        starts = np.arange(math.ceil((len(texts.ids) - ahead) / length)) * length
        ends = texts.starts[-1:]
    return np.stack([starts, np.minimum(starts + length + ahead, ends)], axis=1)


def _whole_texts(
    texts: Texts,
    spans: Spans,
    length: int,
    padding: int,
    indices: Sequence[int],
    *,
    labels: NDArray[np.int64] | None,
) -> Batch:
    """Samples that are read as a whole, with an attention mask where some are padded, and a label each if they have."""
    samples = [texts.ids[start:stop] for start, stop in spans[list(indices)]]
    return whole_batch(samples, length, padding, None if labels is None else labels[list(indices)])


def whole_batch(samples: Sequence[Ids], length: int, padding: int, labels: NDArray[np.int64] | None) -> Batch:
    """A batch of samples of up to `length` tokens; what a sample does not fill is padding, which the mask hides."""
    ids = np.full((len(samples), length), padding, dtype=np.int64)
    seen = np.zeros((len(samples), length), dtype=np.int64)
    for row, sample in enumerate(samples):
        ids[row, : len(sample)] = sample
        seen[row, : len(sample)] = 1
    inputs = {"input_ids": torch.from_numpy(ids)}
    if not seen.all():  # a mask would cost the flash kernel
        inputs["attention_mask"] = torch.from_numpy(seen)
    if labels is not None:
        inputs["labels"] = torch.from_numpy(labels)
    return Batch(inputs, len(samples))


def _next_tokens(texts: Texts, spans: Spans, length: int, padding: int, indices: Sequence[int]) -> Batch:
    samples = (
        (texts.ids[start:stop], texts.predicted[start + 1 : stop]) for start, stop in spans[list(indices)].tolist()
    )
    return next_token_batch(samples, len(indices), length, padding)


def known_labels(parts: Sequence[Texts], names: Sequence[str]) -> tuple[Labels, NDArray[np.int64]]:
    """The labels as numbers: as they are, or places among the names. TrainingError for one that has no number."""
    every = [labelled for texts in parts for labelled in texts.labels]
    found_names = sorted({label for label, _ in every if isinstance(label, str)})
    chosen = tuple(names or found_names)  # those in the data in alphabetical order, the same on every machine
    numbers: dict[int | str, int] = {name: number for number, name in enumerate(chosen)}
    highest, where = -1, ""
    for label, place in every:
        if isinstance(label, str) and label not in numbers:
            raise TrainingError(f"data.path: {place}: label {label!r} is none of data.labels: {', '.join(chosen)}")
        if isinstance(label, int) and found_names:
            other = next(place for word, place in every if isinstance(word, str))
            raise TrainingError(f"data.path: {place}: label {label} is a number, and that of {other} is a name")
        number = label if isinstance(label, int) else numbers[label]
        if number > highest:
            highest, where = number, place
    found = np.array([numbers.get(label, label) for label, _ in every], dtype=np.int64)
    return Labels(highest, where, chosen), found


def _left_out(samples: int) -> str:
    """What becomes of samples that a prompt alone fills: they would teach nothing."""
    count = f"{samples:,} {'sample' if samples == 1 else 'samples'}"
    return f" ({count} left out: nothing to predict within data.sequence_length)" if samples else ""


def _summary(
    parts: Sequence[Texts], unit: str, encoder: Encoder, labels: Labels | None, left_out: int
) -> tuple[str, dict[str, int | float | str]]:
    """Description and facts. Ranks must agree on the facts, so a tokenizer that differs between machines is seen."""
    texts, tokens = sum(len(each.starts) - 1 for each in parts), sum(len(each.ids) for each in parts)
    description = f"{texts:,} texts of {tokens:,} {unit}{_left_out(left_out)}"
    facts: dict[str, int | float | str] = {"texts": texts, unit: tokens}
    if cut := sum(each.cut for each in parts):
        description += f" ({cut:,} sources and targets cut)"
        facts["cut"] = cut
    if passed_over := sum(each.passed_over for each in parts):
        description += f" ({counted(passed_over, 'empty row')} passed over)"
        facts["rows_passed_over"] = passed_over
    if left_out:
        facts["samples_left_out"] = left_out
    if encoder.unit != "bytes":
        facts["tokenizer"] = encoder.fingerprint
    if labels and labels.names:
        numbered = [f"{number} {name}" for number, name in enumerate(labels.names)]
        facts["labels"] = ", ".join(numbered)
        description += f" with {len(numbered)} labels ({listed(numbered)})"
    return description, facts
