"""Token ids in one NumPy or raw binary file, memory-mapped, cut into samples of equal length."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from trainkit.data.encode import IGNORE_INDEX
from trainkit.data.files import reading
from trainkit.errors import TrainingError
from trainkit.recipe.schema import Recipe, TokensData
from trainkit.trainer.data.source import Batch, Ids, Samples, Source

_SCANNED = 1 << 26  # tokens: a file up to this size is checked before the start, in well under a second


def open_source(recipe: Recipe, run_dir: Path) -> Source:
    """The source of a recipe whose `data.kind` is tokens. TrainingError names the file and what is wrong with it."""
    data = cast("TokensData", recipe.data)
    path = Path(data.path).absolute()
    ids = _mapped(path, data.dtype)
    border = held_out(len(ids), data.sequence_length, data.validation_fraction, "tokens", f"{path}: ")
    # None if a model on disk decides it: samples are then checked one by one.
    check = partial(check_ids, vocabulary=getattr(recipe.model, "vocab_size", None), path=path)
    scanned = len(ids) <= _SCANNED
    if scanned:
        check(ids, 0)
    train, validation = (
        Stretch(ids, places, data.sequence_length, check=None if scanned else check).samples()
        for places in (range(border), range(border, len(ids)))
    )
    return Source(train, validation, f"{len(ids):,} tokens", {"tokens": len(ids)})


def _mapped(path: Path, dtype: str | None) -> Ids:
    try:
        with reading(path):
            ids = np.memmap(path, dtype=dtype, mode="r") if dtype else np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        kind = f"raw file of {dtype}" if dtype else "sound .npy file"
        raise TrainingError(f"data.path: {path} is not a {kind}: {error}") from error
    if not isinstance(ids, np.ndarray) or ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        found = f"{ids.dtype} of shape {ids.shape}" if isinstance(ids, np.ndarray) else "an archive"
        raise TrainingError(f"data.path: {path} holds {found}, not a one-dimensional array of integers")
    return ids


def check_ids(ids: Ids, first: int, *, vocabulary: int | None, path: Path) -> None:
    """TrainingError with the index of the first id outside the vocabulary. first: where in the file the ids begin."""
    if not len(ids) or (ids.min() >= 0 and (vocabulary is None or ids.max() < vocabulary)):
        return
    outside = (ids < 0) | (ids >= vocabulary) if vocabulary is not None else ids < 0
    place = int(np.flatnonzero(outside)[0])
    size = f"the vocabulary of {vocabulary}" if vocabulary is not None else "any vocabulary"
    raise TrainingError(
        f"data.path: {path}: token {first + place} is {int(ids[place])}, outside {size}",
        hint="see model.vocab_size and data.dtype",
    )


def held_out(size: int, length: int, fraction: float, unit: str, where: str = "") -> int:
    """The index at which the validation samples begin: the end is held out.

    TrainingError if there are too few tokens.
    """
    border = size - max(length + 1, int(size * fraction))
    if border <= length:
        raise TrainingError(
            f"data.path: {where}{size} {unit} are too few for a training and a validation sample of {length}",
            hint="lower data.sequence_length, or provide more text",
        )
    return border


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive tokens, cut into samples of equal length; the last one may be shorter."""

    ids: Ids
    places: range  # indices of the tokens among the ids
    length: int
    padding: int = 0
    # Indices, ascending, of tokens that are not predicted, because nothing comes before them.
    starts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    check: Callable[[Ids, int], None] | None = None  # for ids from a file: the index of the first

    def __post_init__(self) -> None:
        # still memory-mapped, and quicker to slice than numpy's memmap
        object.__setattr__(self, "ids", np.asarray(self.ids))

    def samples(self) -> Samples:
        return Samples(math.ceil((len(self.places) - 1) / self.length), self._batch)

    def _batch(self, indices: Sequence[int]) -> Batch:
        length, stop = self.length, self.places.stop
        firsts = self.places.start + np.fromiter(indices, dtype=np.int64, count=len(indices)) * length
        places = firsts[:, None] + np.arange(length + 1)
        beyond = places >= stop if places.max(initial=0) >= stop else None  # only the last sample may be shorter
        rows = self.ids[places if beyond is None else np.minimum(places, stop - 1)]
        if self.check is not None:
            for row, first in zip(rows, firsts.tolist(), strict=True):
                self.check(row, first)
        rows = rows.astype(np.int64, copy=False)
        tokens, targets = rows[:, :-1].copy(), rows[:, 1:].copy()
        lows, highs = np.searchsorted(self.starts, (firsts + 1, firsts + length + 1))
        for row in np.flatnonzero(lows < highs):
            targets[row, self.starts[lows[row] : highs[row]] - firsts[row] - 1] = IGNORE_INDEX
        if beyond is not None:
            tokens[beyond[:, 1:]], targets[beyond[:, 1:]] = self.padding, IGNORE_INDEX
        ignored = int(np.count_nonzero(targets == IGNORE_INDEX)) if beyond is not None or (lows < highs).any() else 0
        return Batch({"tokens": torch.from_numpy(tokens), "targets": torch.from_numpy(targets)}, targets.size - ignored)
