"""Sources with targets, for encoder-decoders: the encoder reads the one, and the decoder is to write the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from trainkit.recipe.schema import HfModel, Recipe
from trainkit.trainer.data.encoding import Encoder
from trainkit.trainer.data.source import NO_LABEL, Batch, Ids

STEP = 8  # samples are filled up to a multiple of it: tensor cores, and fewer shapes to compile for


def is_writing(recipe: Recipe) -> bool:
    """Whether a decoder is to write one text for another."""
    return isinstance(recipe.model, HfModel) and recipe.model.task == "seq2seq_lm"


def tokens_of_sample(recipe: Recipe) -> int:
    """Tokens that go through the model for a sample, at most."""
    pair = is_writing(recipe) and hasattr(recipe.data, "target_length")
    return recipe.data.sequence_length + (Lengths.of(recipe.data).target if pair else 0)


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long samples are. source, target: tokens at most, the ends included. padding: as of `data.padding`."""

    source: int
    target: int
    padding: Literal["longest", "max_length"] = "max_length"

    @classmethod
    def of(cls, data: Any) -> Lengths:
        """Of a data section whose samples are pairs."""
        target = data.target_length or data.sequence_length
        return cls(data.sequence_length, target, getattr(data, "padding", "max_length"))


def encoded_pair(encoder: Encoder, source: str, target: str, lengths: Lengths) -> tuple[list[int], list[int], int]:
    """Ids of a source and of its target with their ends, cut to their lengths, and how many of both were cut."""
    first, cut_first = encoded_source(encoder, source, lengths.source)
    opening, ids, closing = encoder.target(target)
    second, cut_second = _fitted(opening, ids, closing, lengths.target)
    return first, second, cut_first + cut_second


def encoded_source(encoder: Encoder, source: str, limit: int) -> tuple[list[int], bool]:
    """Ids of a source with its ends, `limit` at most, and whether it was cut."""
    return _fitted(encoder.opening(), encoder.plain(source), encoder.closing(final=False), limit)


def _fitted(opening: list[int], ids: list[int], closing: list[int], limit: int) -> tuple[list[int], bool]:
    """The ends stay: a decoder that never sees an end does not learn to stop."""
    room = max(0, limit - len(opening) - len(closing))
    return [*opening, *ids[:room], *closing][:limit], len(ids) > room


def pair_batch(pairs: Iterable[tuple[Ids, Ids]], lengths: Lengths, padding: int) -> Batch:
    """A batch of sources with targets, as encoder-decoders of transformers take them.

    `input_ids` (samples, source), `attention_mask` where some are padded, `labels` (samples, target), -100 behind the
    end of each.
    """
    sources, targets = zip(*pairs, strict=True)
    ids, seen = _filled(sources, lengths.source, lengths.padding, padding)
    labels, real = _filled(targets, lengths.target, lengths.padding, NO_LABEL)
    inputs = {"input_ids": torch.from_numpy(ids)}
    if not seen.all():
        inputs["attention_mask"] = torch.from_numpy(seen.astype(np.int64))
    inputs["labels"] = torch.from_numpy(labels)
    return Batch(inputs, int(np.count_nonzero(real)), written=labels.size)


def widened(batch: Batch, lengths: Lengths, padding: int) -> Batch:
    """The same batch with samples as long as any may be, all of whose places count: the most that a step takes."""
    ids, labels = batch.inputs["input_ids"], batch.inputs["labels"]
    seen = batch.inputs.get("attention_mask", torch.ones_like(ids))
    more, further = (0, lengths.source - ids.shape[1]), (0, lengths.target - labels.shape[1])
    inputs = {
        "input_ids": functional.pad(ids, more, value=padding),
        "attention_mask": functional.pad(seen, more, value=0),
        "labels": functional.pad(labels.masked_fill(labels == NO_LABEL, padding), further, value=padding),
    }
    return Batch(inputs, inputs["labels"].numel(), written=inputs["labels"].numel())


def cut_pairs(
    tokens: tuple[Ids, NDArray[np.bool_]], spans: Ids, lengths: Lengths, padding: int, indices: Sequence[int]
) -> Batch:
    """The batch of some pairs out of a row of tokens. spans: (samples, 2), first token and end of each pair.

    tokens: ids, and whether each is of a target; those of its source go before.
    """
    ids, written = tokens
    stretches = (slice(start, stop) for start, stop in spans[list(indices)].tolist())
    pairs = ((ids[each][~written[each]], ids[each][written[each]]) for each in stretches)
    return pair_batch(pairs, lengths, padding)


def _filled(rows: Sequence[Ids], limit: int, padding: str, filler: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    longest = max(len(row) for row in rows)
    width = limit if padding == "max_length" else min(limit, -(-longest // STEP) * STEP)
    ids = np.full((len(rows), width), filler, dtype=np.int64)
    real = np.zeros((len(rows), width), dtype=np.bool_)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = row
        real[place, : len(row)] = True
    return ids, real
