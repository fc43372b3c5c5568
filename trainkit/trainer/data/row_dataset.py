"""A source out of rows, whatever they came from: read, cut into samples, and split."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from trainkit.errors import TrainingError
from trainkit.recipe.schema import HfModel, Recipe
from trainkit.trainer.data.encoding import Encoder, open_encoder
from trainkit.trainer.data.rows import Row
from trainkit.trainer.data.samples import Labelled, NextTokens, Spans, WholeTexts, packed, padded, with_targets
from trainkit.trainer.data.source import Labels, Samples, Source
from trainkit.trainer.data.texts import Reading, Rows, Texts
from trainkit.trainer.data.vocabulary import check_vocabulary

_SHOWN = 8  # labels by name in one line


def source_of_rows(
    recipe: Recipe, train: Iterable[Row], validation: Iterable[Row] | None = None, names: Sequence[str] = ()
) -> Source:
    """Samples of the rows; without a validation set of its own, the end is held out. TrainingError names the row.

    names: of the labels, where the data set knows them and the recipe does not say.
    """
    data = cast("Rows", recipe.data)
    task = recipe.model.task if isinstance(recipe.model, HfModel) else "causal_lm"
    encoder = open_encoder(data.tokenizer)
    unit = "tokens" if data.tokens_field else encoder.unit
    whole = task != "causal_lm"
    packing = data.packing and task != "sequence_classification"
    reading = Reading(data, encoder, final=not whole, limit=data.sequence_length if whole and not packing else None)
    parts = [reading.texts(rows) for rows in (train, validation) if rows is not None]
    highest = max(parts, key=lambda texts: texts.highest)
    check_vocabulary(recipe, highest.highest, highest.where or "the texts of data.path")
    labels, numbers = known_labels(parts, data.labels or names) if data.label_field else (None, [])
    sets: list[Samples] = []
    halves, left_out = _split(parts, data, whole=whole, packing=packing)
    for place, (texts, spans) in enumerate(halves):
        kind = WholeTexts if whole else NextTokens
        samples: Samples = kind(texts, spans, data.sequence_length, encoder.padding)
        if isinstance(samples, WholeTexts) and numbers:
            alone = len(parts) == 1
            first = len(sets[0]) if sets and alone else 0
            samples = Labelled(samples, numbers[0 if alone else place], first)
        sets.append(samples)
    return Source(
        sets[0],
        sets[1],
        _description(parts, unit, labels, left_out),
        _facts(parts, unit, encoder, labels, left_out),
        highest=max(highest.highest, encoder.padding),
        where=highest.where,
        labels=labels,
        encoder=encoder,
        padding=encoder.padding if whole else None,
    )


def _split(parts: Sequence[Texts], data: Rows, *, whole: bool, packing: bool) -> tuple[list[tuple[Texts, Spans]], int]:
    """Texts and spans for training and for validation, and how many samples had nothing to predict.

    TrainingError when one of them would be empty.
    """
    cut, ahead = (packed if packing else padded), 0 if whole else 1
    found = [(texts, cut(texts, data.sequence_length, ahead)) for texts in parts]
    every = sum(len(spans) for _, spans in found)
    if not whole:
        found = [(texts, with_targets(spans, texts)) for texts, spans in found]
    left_out = every - sum(len(spans) for _, spans in found)
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


def known_labels(parts: Sequence[Texts], names: Sequence[str]) -> tuple[Labels, list[NDArray[np.int64]]]:
    """The labels as numbers: as they are, or places among the names. TrainingError for one that has no number.

    names: in order of their numbers; without any, those in the data in alphabetical order.
    """
    every = [(label, place) for texts in parts for label, place in zip(texts.labels, texts.label_places, strict=True)]
    words = sorted({label for label, _ in every if isinstance(label, str)})
    chosen = tuple(names or words)
    numbers: dict[int | str, int] = {name: number for number, name in enumerate(chosen)}
    highest, where = -1, ""
    for label, place in every:
        if isinstance(label, str) and label not in numbers:
            raise TrainingError(f"data.path: {place}: label {label!r} is none of data.labels: {', '.join(chosen)}")
        if isinstance(label, int) and words:
            other = next(place for word, place in every if isinstance(word, str))
            raise TrainingError(f"data.path: {place}: label {label} is a number, and that of {other} is a name")
        number = label if isinstance(label, int) else numbers[label]
        if number > highest:
            highest, where = number, place
    found = [np.array([numbers.get(label, label) for label in texts.labels], dtype=np.int64) for texts in parts]
    return Labels(highest, where, chosen), found


def _left_out(samples: int) -> str:
    """What becomes of samples that a prompt alone fills: they would teach nothing."""
    count = f"{samples:,} {'sample' if samples == 1 else 'samples'}"
    return f" ({count} left out: nothing to predict within data.sequence_length)" if samples else ""


def _description(parts: Sequence[Texts], unit: str, labels: Labels | None, left_out: int) -> str:
    texts = f"{_count(parts):,} texts of {sum(len(texts.ids) for texts in parts):,} {unit}{_left_out(left_out)}"
    if labels is None or not labels.names:
        return texts
    shown = _numbered(labels.names[:_SHOWN]) + (", …" if len(labels.names) > _SHOWN else "")
    return f"{texts} with {len(labels.names)} labels ({shown})"


def _numbered(names: Sequence[str]) -> str:
    return ", ".join(f"{number} {name}" for number, name in enumerate(names))


def _facts(
    parts: Sequence[Texts], unit: str, encoder: Encoder, labels: Labels | None, left_out: int
) -> dict[str, int | float | str]:
    """For the summary; ranks must agree on them, so a tokenizer that differs between machines is seen."""
    facts: dict[str, int | float | str] = {
        "texts": _count(parts),
        unit: sum(len(texts.ids) for texts in parts),
    }
    if left_out:
        facts["samples_left_out"] = left_out
    if encoder.unit != "bytes":
        facts["tokenizer"] = encoder.fingerprint
    if labels and labels.names:
        facts["labels"] = _numbered(labels.names)
    return facts


def _count(parts: Sequence[Texts]) -> int:
    return sum(len(texts.starts) - 1 for texts in parts)
