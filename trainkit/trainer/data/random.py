"""Random samples for measuring speed and memory, as in Hugging Face's guides on efficient training."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import torch

from trainkit.recipe.schema import HfModel, RandomData, Recipe
from trainkit.seeds import derived_seed
from trainkit.trainer.data.source import Batch, Lengths, Samples, Source, pair_batch


def open_source(recipe: Recipe, run_dir: Path) -> Source:
    """The source of a recipe whose `data.kind` is random."""
    data, seed = cast("RandomData", recipe.data), recipe.train.seed
    task = recipe.model.task if isinstance(recipe.model, HfModel) else ""
    make = MAKERS.get(task, sequence_batch)
    train = Samples(data.samples, partial(make, data, seed, 0))
    validation = Samples(max(1, data.samples // 8), partial(make, data, seed, data.samples))
    facts = {"samples": data.samples}
    return Source(train, validation, f"{data.samples:,} random samples", facts, data.high - 1, where="data.high")


def sequence_batch(data: RandomData, seed: int, first: int, indices: Sequence[int]) -> Batch:
    """For language models: every token is a target."""
    ids = _ids(data, seed, first, indices, data.sequence_length + 1)
    targets = ids[:, 1:].contiguous()
    return Batch({"tokens": ids[:, :-1].contiguous(), "targets": targets}, targets.numel())


def labelled_batch(data: RandomData, seed: int, first: int, indices: Sequence[int]) -> Batch:
    """For sequence classification: one label a sample."""
    ids = _ids(data, seed, first, indices, data.sequence_length)
    labels = [derived_seed(seed, "random label", first + index) % data.classes for index in indices]
    return Batch({"input_ids": ids, "labels": torch.tensor(labels)}, len(indices))


def random_pairs(data: RandomData, seed: int, first: int, indices: Sequence[int]) -> Batch:
    """For encoder-decoders: every token of the target text is a target."""
    lengths = Lengths.of(data)
    ids = _ids(data, seed, first, indices, lengths.source + lengths.target).numpy()
    pairs = ((row[: lengths.source], row[lengths.source :]) for row in ids)
    return pair_batch(pairs, lengths, padding=0)


# `model.task` -> the function that makes its batches; other tasks take sequences.
MAKERS = {"sequence_classification": labelled_batch, "seq2seq_lm": random_pairs}


def _ids(data: RandomData, seed: int, first: int, indices: Sequence[int], length: int) -> torch.Tensor:
    """(samples, length) token ids, drawn from the seed and the sample numbers alone: the same on every rank."""
    generators = (np.random.default_rng(derived_seed(seed, "random data", first + index)) for index in indices)
    return torch.from_numpy(np.stack([each.integers(data.low, data.high, length) for each in generators]))
