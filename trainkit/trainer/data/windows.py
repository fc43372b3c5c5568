"""One source of a stream: rows, file after file, as samples in windows that are each shuffled for themselves.

A window is all that is held in memory. Where it begins is a few numbers, so that a run goes on in the middle.
"""

from __future__ import annotations

import json
import math
import os
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainkit.errors import TrainingError
from trainkit.trainer.data.pairs import Lengths, pair_batch
from trainkit.trainer.data.rows import Reading, whole_batch
from trainkit.trainer.data.sampler import Permutation
from trainkit.trainer.data.shards import Mark, RawRow, Row, rows_of
from trainkit.trainer.data.source import Batch, Ids, next_token_batch, reading
from trainkit.trainer.randomness import derived_seed

_UNSHUFFLED = 64  # samples of a window whose order stays


class Sample(NamedTuple):
    """Token ids and which of them are predicted, and the row of one that is a row of its own.

    place: of the row that it begins in, for messages.
    """

    ids: Ids
    predicted: NDArray[np.bool_]
    place: str
    row: Row | None = None


class Place(NamedTuple):
    """A row in an epoch: the file, counted in the epoch's order, and the place in it."""

    file: int = 0
    row: int = 0
    offset: int = 0


class Cursor(NamedTuple):
    """Where a window begins. first: number of its first sample, all epochs counted. skip: tokens of its first row."""

    epoch: int = 0
    window: int = 0
    first: int = 0
    file: int = 0
    row: int = 0
    offset: int = 0
    skip: int = 0


@dataclass(frozen=True, slots=True)
class Files:
    """The files of a source, in order. begins: where their rows for training do; None in a file without any."""

    paths: Sequence[Path]
    columns: Sequence[str]
    begins: Sequence[Mark | None]
    seed: int | None  # of their order, which every epoch has one of its own of; None leaves them as they are
    filled: Sequence[str] = ()  # rows in which one of these fields is empty are passed over

    def rows(self, epoch: int, start: Place) -> Iterator[tuple[Place, RawRow]]:
        """The rows of an epoch from a place on. TrainingError names the file and row of one that cannot be read."""
        count = len(self.paths)
        order = range(count) if self.seed is None else Permutation(count, derived_seed(self.seed, "files", epoch))
        for position in range(start.file, count):
            begin = self.begins[order[position]]
            if begin is None:
                continue
            mark = max(begin, Mark(start.row, start.offset)) if position == start.file else begin
            for found, raw in rows_of(self.paths[order[position]], self.columns, mark):
                if not (self.filled and raw.row().blank(self.filled)):
                    yield Place(position, *found), raw


@dataclass(frozen=True, slots=True)
class Cut:
    """How rows become samples. ahead: tokens beyond a sample that its targets reach. buffer: samples of a window."""

    reading: Reading
    length: int
    ahead: int
    packing: bool
    buffer: int
    seed: int


class Windows:
    """The samples of a source by number, without an end: epoch after epoch. To go forward is cheap."""

    def __init__(self, files: Files, cut: Cut) -> None:
        self._files, self._cut = files, cut
        self._begin = self.cursor = Cursor()
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        return {"files": self._files, "cut": self._cut, "begin": self._begin}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._files, self._cut = state["files"], state["cut"]
        self.go_on(state["begin"])

    @property
    def paths(self) -> Sequence[Path]:
        """The files."""
        return self._files.paths

    def go_on(self, begin: Cursor) -> None:
        """Begin at a window that :attr:`cursor` was once at; what is before it is read again when it is asked for."""
        self._begin = self.cursor = begin
        self._forget()

    def __getitem__(self, number: int) -> Sample:
        """A sample. TrainingError names the row that cannot be one, or the file."""
        if self._process != os.getpid() or number < self.cursor.first:
            self.cursor = self._begin if self._begin.first <= number else Cursor()
            self._forget()
        while number >= self.cursor.first + self._size:
            self._advance()
        place = number - self.cursor.first
        return self._sample(self._order[place] if self._cut.buffer else place)

    def _forget(self) -> None:
        """Nothing is read: the next window is that of the cursor. Also in a process that has inherited open files."""
        self._process = os.getpid()
        self._next, self._size, self._order = self.cursor, 0, Permutation(1, 0)
        self._rows: Iterator[tuple[Place, RawRow]] | None = None
        self._apart: list[RawRow] = []
        self._packed: list[Sample] = []
        self._carried = _Tokens(self._cut.reading)

    def _advance(self) -> None:
        """Read the next window. TrainingError where a whole epoch gives no sample."""
        self.cursor = cursor = self._next
        self._apart, self._packed = [], []
        if self._rows is None:
            self._rows = self._files.rows(cursor.epoch, Place(cursor.file, cursor.row, cursor.offset))
        following = self._pack() if self._cut.packing else self._gather()
        self._size = len(self._apart) + len(self._packed)
        if following is None:
            self._rows, self._carried = None, _Tokens(self._cut.reading)
            if not self._size and not cursor.window:
                raise TrainingError(
                    f"data.path: the rows from {self._files.paths[0]} on fill no sample of {self._cut.length} tokens",
                    hint="bring more text, or raise data.sequence_length where prompts are longer",
                )
            self._next = Cursor(cursor.epoch + 1, 0, cursor.first + self._size)
        else:
            place, skip = following
            window = cursor.window + (self._size > 0)
            self._next = Cursor(cursor.epoch, window, cursor.first + self._size, *place, skip)
        # The whole of a small data set in one window has the order that it has when it is not streamed.
        which = ("window", cursor.window) if cursor.window else ()
        self._order = Permutation(self._size, derived_seed(self._cut.seed, "epoch", cursor.epoch, *which))

    def _gather(self) -> tuple[Place, int] | None:
        """Take rows that are a sample each; where the next window begins, or None at the end of the epoch."""
        assert self._rows is not None
        for place, raw in self._rows:
            if len(self._apart) == (self._cut.buffer or _UNSHUFFLED):
                self._rows = chain([(place, raw)], self._rows)
                return place, 0
            self._apart.append(raw)
        return None

    def _pack(self) -> tuple[Place, int] | None:
        """Take texts end to end; where the next window begins, or None at the end of the epoch."""
        assert self._rows is not None
        length, ahead, count = self._cut.length, self._cut.ahead, self._cut.buffer or _UNSHUFFLED
        tokens, following = self._carried, None
        skip = 0 if tokens.starts else self.cursor.skip
        while len(tokens.ids) < count * length + ahead and (found := next(self._rows, None)):
            tokens.add(*found, skip)
            skip = 0
        if len(tokens.ids) >= count * length + ahead:
            self._carried, following = tokens.after(count * length)
        else:
            count = max(0, math.ceil((len(tokens.ids) - ahead) / length))
        self._packed = tokens.samples(count, self._cut)
        return following

    def _sample(self, place: int) -> Sample:
        return self._packed[place] if self._cut.packing else sample_of(self._apart[place], self._cut)


def sample_of(raw: RawRow, cut: Cut) -> Sample:
    """A row as a sample of its own. TrainingError names the row where it cannot be one."""
    row, most = raw.row(), cut.length + cut.ahead
    tokens, predicted = cut.reading.tokens(row)
    return Sample(
        np.array(tokens[:most], dtype=np.uint32), np.frombuffer(predicted[:most], dtype=np.bool_), row.place, row
    )


def samples_of(rows: Iterable[RawRow], cut: Cut) -> list[Sample]:
    """All samples that some rows give. TrainingError names a row that cannot be one."""
    if not cut.packing:
        found = (sample_of(raw, cut) for raw in rows)
        return [sample for sample in found if not cut.ahead or sample.predicted[1:].any()]
    tokens = _Tokens(cut.reading)
    for raw in rows:
        tokens.add(Place(), raw, 0)
    return tokens.samples(math.ceil((len(tokens.ids) - cut.ahead) / cut.length), cut)


class _Tokens:
    """Texts end to end, with the place of each. starts: of each text, below 0 where its beginning is cut off."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self.ids, self._answers = array(reading.kind), bytearray()
        self.starts: list[int] = []
        self._places: list[tuple[Place, str]] = []

    def add(self, place: Place, raw: RawRow, skip: int) -> None:
        """One more text, without its first `skip` tokens."""
        found, predicted = self._reading.tokens(raw.row())
        self.starts.append(len(self.ids) - skip)
        self._places.append((place, raw.place))
        self.ids.extend(found[skip:])
        self._answers += (b"\0" + predicted[1:])[skip:]  # the first token follows from nothing

    def after(self, place: int) -> tuple[_Tokens, tuple[Place, int]]:
        """What follows from a token on, and where that is: a text, and how many of its tokens are before."""
        text = bisect_right(self.starts, place) - 1
        rest = _Tokens(self._reading)
        rest.ids, rest._answers = self.ids[place:], self._answers[place:]
        rest.starts, rest._places = [self.starts[text] - place], [self._places[text]]
        return rest, (self._places[text][0], place - self.starts[text])

    def samples(self, count: int, cut: Cut) -> list[Sample]:
        """The first samples, fewer where some are left out."""
        ids: Ids = np.frombuffer(self.ids.tobytes(), dtype=np.uint8 if self._reading.kind == "B" else np.uint32)
        predicted = np.frombuffer(bytes(self._answers), dtype=np.bool_)
        starts = range(0, count * cut.length, cut.length)
        spans = [slice(start, min(start + cut.length + cut.ahead, len(ids))) for start in starts]
        # As in data that is not streamed: what a prompt fills has nothing to predict, and is left out.
        kept = [span for span in spans if not cut.ahead or predicted[span][1:].any()]
        places = (self._places[bisect_right(self.starts, span.start) - 1][1] for span in kept)
        return [Sample(ids[span], predicted[span], place) for span, place in zip(kept, places, strict=True)]


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
