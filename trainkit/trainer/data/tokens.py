"""Token ids in one NumPy or raw binary file, memory-mapped, cut into samples of equal length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from trainkit.errors import TrainingError
from trainkit.recipe.schema import Recipe, TokensData
from trainkit.trainer.data.source import IGNORED, Batch, Source, held_out
from trainkit.trainer.data.vocabulary import vocabulary_size

_SCANNED = 1 << 26  # tokens: a file up to this size is looked through before the start, in well under a second
Ids = NDArray[np.integer[Any]]


def open_source(recipe: Recipe, run_dir: Path) -> Source:
    """The source of a recipe whose `data.kind` is tokens. TrainingError names the file and what is wrong with it."""
    data = cast("TokensData", recipe.data)
    path, length, vocabulary = Path(data.path).absolute(), data.sequence_length, vocabulary_size(recipe)
    ids = _mapped(path, data.dtype)
    border = held_out(len(ids), length, data.validation_fraction, "tokens", f"{path}: ")
    if len(ids) <= _SCANNED:
        check_ids(ids, 0, vocabulary, path)
    train, validation = (
        TokenSamples(ids, stretch, length, vocabulary, path) for stretch in (range(border), range(border, len(ids)))
    )
    return Source(train, validation, f"{len(ids):,} tokens", {"tokens": len(ids)})


def _mapped(path: Path, dtype: str | None) -> Ids:
    try:
        ids = np.memmap(path, dtype=dtype, mode="r") if dtype else np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise TrainingError(f"data.path: {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, EOFError) as error:
        kind = f"raw file of {dtype}" if dtype else "sound .npy file"
        raise TrainingError(f"data.path: {path} is not a {kind}: {error}") from error
    if not isinstance(ids, np.ndarray) or ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        found = f"{ids.dtype} of shape {ids.shape}" if isinstance(ids, np.ndarray) else "an archive"
        raise TrainingError(f"data.path: {path} holds {found}, not one row of whole numbers")
    return ids


def check_ids(ids: Ids, first: int, vocabulary: int | None, path: Path) -> None:
    """TrainingError with the place of the first id outside the vocabulary. first: where in the file the ids begin."""
    if not len(ids) or (ids.min() >= 0 and (vocabulary is None or ids.max() < vocabulary)):
        return
    outside = (ids < 0) | (ids >= vocabulary) if vocabulary is not None else ids < 0
    place = int(np.flatnonzero(outside)[0])
    size = f"the vocabulary of {vocabulary}" if vocabulary is not None else "any vocabulary"
    raise TrainingError(
        f"data.path: {path}: token {first + place} is {int(ids[place])}, outside {size}",
        hint="see model.vocab_size and data.dtype",
    )


class TokenSamples:
    """Samples of one stretch of the file. The end of the stretch may leave the last one short: -1 is not predicted."""

    def __init__(self, ids: Ids, stretch: range, length: int, vocabulary: int | None, path: Path) -> None:
        self._ids, self._stretch, self._length = ids, stretch, length
        self._vocabulary, self._path = vocabulary, path

    def __len__(self) -> int:
        return math.ceil((len(self._stretch) - 1) / self._length)

    def __getitem__(self, indices: Sequence[int]) -> Batch:
        tokens = np.zeros((len(indices), self._length), dtype=np.int64)
        targets = np.full((len(indices), self._length), IGNORED, dtype=np.int64)
        for row, index in enumerate(indices):
            start = self._stretch.start + index * self._length
            ids = self._ids[start : min(start + self._length + 1, self._stretch.stop)]
            if len(self._ids) > _SCANNED:
                check_ids(ids, start, self._vocabulary, self._path)
            tokens[row, : len(ids) - 1], targets[row, : len(ids) - 1] = ids[:-1], ids[1:]
        counted = int(np.count_nonzero(targets != IGNORED))
        return Batch({"tokens": torch.from_numpy(tokens), "targets": torch.from_numpy(targets)}, counted)
