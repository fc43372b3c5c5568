"""Several sources of samples as one, by weight: which sample has which number follows from the seed alone.

Ranks and loader processes each read for themselves, and take the numbers that are theirs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainkit.errors import TrainingError
from trainkit.trainer.data.pairs import Lengths, pair_batch
from trainkit.trainer.data.rows import whole_batch
from trainkit.trainer.data.source import Batch, next_token_batch, reading
from trainkit.trainer.data.windows import Cursor, Sample, Windows
from trainkit.trainer.randomness import derived_seed

_BLOCK = 1 << 20  # picks that are counted at a time
_FORMAT = 1  # of bookmarks


@dataclass(frozen=True, slots=True)
class Form:
    """What all samples have in common. whole: they are read as a whole, not predicted token by token."""

    length: int
    padding: int
    whole: bool
    label_field: str | None = None
    names: tuple[str, ...] = ()  # of the labels
    pairs: Lengths | None = None  # where they are sources with targets

    def batch(self, samples: Sequence[Sample]) -> Batch:
        """A batch of samples. TrainingError names the row of a label that has no number."""
        if not self.whole:
            pairs = ((sample.ids, sample.predicted[1:]) for sample in samples)
            idle = sum(not sample.predicted[1:].any() for sample in samples)
            return next_token_batch(pairs, len(samples), self.length, self.padding)._replace(idle=idle)
        if self.pairs:
            both = ((sample.ids[~sample.predicted], sample.ids[sample.predicted]) for sample in samples)
            return pair_batch(both, self.pairs, self.padding)
        labels = None
        if self.label_field:
            labels = np.array([self._label(sample, self.label_field) for sample in samples], dtype=np.int64)
        return whole_batch([sample.ids for sample in samples], self.length, self.padding, labels)

    def _label(self, sample: Sample, field: str) -> int:
        assert sample.row is not None
        label = sample.row.label(field)
        if isinstance(label, str) and label not in self.names:
            known = (
                f"none of data.labels: {', '.join(self.names)}" if self.names else "a name, and data.labels is empty"
            )
            raise sample.row.wrong(f"label {label!r} is {known}")
        return self.names.index(label) if isinstance(label, str) else label


class RowStream:
    """Training samples by number, without an end, out of one source or several. weights: one for each, above 0."""

    def __init__(self, sources: Sequence[Windows], weights: Sequence[float], form: Form, seed: int, identity: str):
        self._sources, self._form, self._identity = sources, form, identity
        self._key = derived_seed(seed, "mix")
        self._shares = np.cumsum(weights) / np.sum(weights)
        self._shares[-1] = 1.0
        self._begin = self._known = (0, np.zeros(len(sources), dtype=np.int64))  # a number, and samples of each before

    def go_on(self, bookmark: str, number: int) -> bool:
        """Begin where a batch's bookmark says; False where that is past sample `number`, or of another stream.

        TrainingError for what is no bookmark.
        """
        try:
            found = json.loads(bookmark)
            if (found["format"], found["stream"]) != (_FORMAT, self._identity) or found["number"] > number:
                return False
            counts, cursors = found["counts"], [Cursor(*each) for each in found["windows"]]
            numbers = [found["number"], *counts, *(value for cursor in cursors for value in cursor)]
            if not len(counts) == len(cursors) == len(self._sources):
                raise ValueError("another number of sources")
            if not all(type(each) is int and 0 <= each < 2**62 for each in numbers):
                raise ValueError("no whole numbers from 0 on")
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise TrainingError(f"the checkpoint's place in the stream of data is damaged: {error}") from error
        self._begin = self._known = (found["number"], np.array(counts, dtype=np.int64))
        for source, cursor in zip(self._sources, cursors, strict=True):
            source.go_on(cursor)
        return True

    def batch(self, indices: Sequence[int]) -> Batch:
        """The samples of these numbers. TrainingError names the row that cannot be one."""
        first, stop = min(indices), max(indices) + 1
        counts = self._counts_before(first)
        bookmark = self._bookmark(first, counts)
        # Whether a sample is asked for or not, it is one of its source's.
        places = {}
        for number, source in enumerate(self._picked(first, stop).tolist(), start=first):
            places[number] = (source, int(counts[source]))
            counts[source] += 1
        found = [self._sources[source][place] for source, place in (places[index] for index in indices)]
        return self._form.batch(found)._replace(bookmark=bookmark)

    def place(self, number: int) -> str:
        """Where a sample begins: file and row, for messages."""
        source = int(self._picked(number, number + 1)[0])
        return self._sources[source][int(self._counts_before(number)[source])].place

    def written_after(self, time: float) -> Sequence[Path]:
        """The files of the stream that were changed after a time. TrainingError for one that is gone."""
        found = []
        for path in dict.fromkeys(path for source in self._sources for path in source.paths):
            with reading(path):
                if path.stat().st_mtime > time:
                    found.append(path)
        return found

    def _bookmark(self, number: int, counts: NDArray[np.int64]) -> str:
        windows = [list(source.cursor) for source in self._sources]
        found = {"format": _FORMAT, "stream": self._identity, "number": number}
        return json.dumps({**found, "counts": counts.tolist(), "windows": windows})

    def _counts_before(self, number: int) -> NDArray[np.int64]:
        """How many samples each source has given before a number."""
        if self._known[0] > number:
            zero = (0, np.zeros(len(self._sources), dtype=np.int64))
            self._known = self._begin if self._begin[0] <= number else zero
        start, counts = self._known
        counts = counts.copy()
        for first in range(start, number, _BLOCK):
            picked = self._picked(first, min(number, first + _BLOCK))
            counts += np.bincount(picked, minlength=len(self._sources))
        self._known = (number, counts)
        return counts.copy()

    def _picked(self, first: int, stop: int) -> NDArray[np.int64]:
        """The source of each sample of a range: drawn by weight, from the seed and the sample's number alone."""
        if len(self._sources) == 1:
            return np.zeros(stop - first, dtype=np.int64)
        # splitmix64 (Steele, Lea and Flood 2014), whose n-th number needs none before it
        drawn = np.arange(first + 1, stop + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(self._key)
        drawn = (drawn ^ (drawn >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        drawn = (drawn ^ (drawn >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        drawn ^= drawn >> np.uint64(31)
        unit = (drawn >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return np.searchsorted(self._shares, unit, side="right").astype(np.int64)
