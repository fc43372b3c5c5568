"""Random samples: the dummy data set of the guides on training efficiently, for measuring speed and memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch

from trainkit.recipe.schema import HfModel, RandomData, Recipe
from trainkit.trainer.data.source import Batch, Source
from trainkit.trainer.data.vocabulary import check_vocabulary
from trainkit.trainer.randomness import derived_seed


def open_source(recipe: Recipe, run_dir: Path) -> Source:
    """The source of a recipe whose `data.kind` is random. TrainingError if the model's vocabulary is too small."""
    data = cast("RandomData", recipe.data)
    check_vocabulary(recipe, data.high - 1, "data.high")
    labelled = isinstance(recipe.model, HfModel) and recipe.model.task == "sequence_classification"
    kind = RandomLabelled if labelled else RandomSequences
    train, validation = kind(data, recipe.train.seed, 0, data.samples), max(1, data.samples // 8)
    held_out = kind(data, recipe.train.seed, data.samples, validation)
    return Source(train, held_out, f"{data.samples:,} random samples", {"samples": data.samples}, data.high - 1)


class RandomSamples:
    """Samples drawn from the seed and their numbers, so that any rank may draw any of them."""

    def __init__(self, data: RandomData, seed: int, first: int, size: int) -> None:
        self._data, self._seed, self._first, self._size = data, seed, first, size

    def __len__(self) -> int:
        return self._size

    def chance(self, index: int) -> np.random.Generator:
        """What draws a sample."""
        return np.random.default_rng(derived_seed(self._seed, "random data", self._first + index))

    def ids(self, indices: Sequence[int], length: int) -> torch.Tensor:
        """(samples, length) token ids."""
        low, high = self._data.low, self._data.high
        return torch.from_numpy(np.stack([self.chance(index).integers(low, high, length) for index in indices]))


class RandomSequences(RandomSamples):
    """For language models: every token is to be predicted."""

    def __getitem__(self, indices: Sequence[int]) -> Batch:
        ids = self.ids(indices, self._data.sequence_length + 1)
        targets = ids[:, 1:].contiguous()
        return Batch({"tokens": ids[:, :-1].contiguous(), "targets": targets}, targets.numel())


class RandomLabelled(RandomSamples):
    """For sequence classification: one label a sample."""

    def __getitem__(self, indices: Sequence[int]) -> Batch:
        ids, classes = self.ids(indices, self._data.sequence_length), self._data.classes
        labels = [derived_seed(self._seed, "random label", self._first + index) % classes for index in indices]
        return Batch({"input_ids": ids, "labels": torch.tensor(labels)}, len(indices))
