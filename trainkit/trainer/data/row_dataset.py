"""A source out of rows of any origin: read, cut into samples (packed or padded), and split."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from trainkit.errors import TrainingError
from trainkit.recipe.schema import HfModel, Recipe
from trainkit.trainer.data.encoding import Encoder, open_encoder
from trainkit.trainer.data.rows import Reading, Row, Rows, Texts
from trainkit.trainer.data.source import Batch, Labels, Samples, Source, next_token_batch
from trainkit.trainer.data.vocabulary import check_vocabulary

Spans = NDArray[np.int64]  # (samples, 2): first token and end of each sample
_SHOWN = 8  # labels by name in one line


def source_of_rows(
    recipe: Recipe, train: Iterable[Row], validation: Iterable[Row] | None = None, names: Sequence[str] = ()
) -> Source:
    """Samples of the rows; without a validation set, the end is held out. names: of labels, if the data knows them."""
    data = cast("Rows", recipe.data)
    task = recipe.model.task if isinstance(recipe.model, HfModel) else "causal_lm"
    whole = task != "causal_lm"
    packing = data.packing and task != "sequence_classification"
    encoder = open_encoder(data.tokenizer)
    reading = Reading(data, encoder, final=not whole, limit=data.sequence_length if whole and not packing else None)
    parts = [reading.texts(rows) for rows in (train, validation) if rows is not None]
    highest = max(parts, key=lambda texts: texts.highest)
    check_vocabulary(recipe, highest.highest, highest.where or "the texts of data.path")
    labels, numbers = known_labels(parts, data.labels or names) if data.label_field else (None, np.zeros(0, np.int64))
    halves, left_out = _split(parts, data, whole=whole, packing=packing)
    sets: list[Samples] = []  # training and validation
    for texts, spans in halves:
        first = len(sets[0]) if sets else 0  # the labels of validation follow those of training
        mine = numbers[first : first + len(spans)] if labels else None
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


def _split(parts: Sequence[Texts], data: Rows, *, whole: bool, packing: bool) -> tuple[list[tuple[Texts, Spans]], int]:
    """Texts and spans for training and validation, neither empty, and how many samples had nothing to predict."""
    ahead = 0 if whole else 1
    found, left_out = [], 0
    for texts in parts:
        spans = _spans(texts, data.sequence_length, ahead, packing=packing)
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
    ids = np.full((len(indices), length), padding, dtype=np.int64)
    seen = np.zeros((len(indices), length), dtype=np.int64)
    for row, (start, stop) in enumerate(spans[list(indices)]):
        ids[row, : stop - start] = texts.ids[start:stop]
        seen[row, : stop - start] = 1
    inputs = {"input_ids": torch.from_numpy(ids)}
    if not seen.all():  # a mask would cost the flash kernel
        inputs["attention_mask"] = torch.from_numpy(seen)
    if labels is not None:
        inputs["labels"] = torch.from_numpy(labels[list(indices)])
    return Batch(inputs, len(indices))


def _next_tokens(texts: Texts, spans: Spans, length: int, padding: int, indices: Sequence[int]) -> Batch:
    samples = (
        (texts.ids[start:stop], texts.predicted[start + 1 : stop]) for start, stop in spans[list(indices)].tolist()
    )
    return next_token_batch(samples, len(indices), length, padding)


def known_labels(parts: Sequence[Texts], names: Sequence[str]) -> tuple[Labels, NDArray[np.int64]]:
    """The labels as numbers: as they are, or places among the names. TrainingError for one that has no number."""
    every = [(label, place) for texts in parts for label, place in zip(texts.labels, texts.label_places, strict=True)]
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
    if left_out:
        facts["samples_left_out"] = left_out
    if encoder.unit != "bytes":
        facts["tokenizer"] = encoder.fingerprint
    if labels and labels.names:
        numbered = [f"{number} {name}" for number, name in enumerate(labels.names)]
        facts["labels"] = ", ".join(numbered)
        shown = ", ".join(numbered[:_SHOWN]) + (", …" if numbered[_SHOWN:] else "")
        description += f" with {len(numbered)} labels ({shown})"
    return description, facts
