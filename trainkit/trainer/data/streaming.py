"""Endless streams of rows: file after file, as samples in windows, each shuffled separately.

Only one window is held in memory. Its start is a few numbers, so that a run can resume in the middle.
"""

from __future__ import annotations

import json
import math
import os
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainkit.data.encode import Limits, RowEncoder
from trainkit.data.files import RawRow, ShardPosition, reading, rows_of
from trainkit.data.packing import best_fit
from trainkit.data.prepared import may_be_split
from trainkit.errors import TrainingError
from trainkit.recipe.schema import DatasetData
from trainkit.seeds import derived_seed
from trainkit.trainer.data.rows import Text, fitted
from trainkit.trainer.data.sampler import Permutation
from trainkit.trainer.data.source import Batch, BatchFormat, Ids

_UNSHUFFLED = 64  # samples of a window that is not shuffled
_BLOCK = 1 << 20  # picks counted at a time
_FORMAT = 2  # of loader states


class WindowStart(NamedTuple):
    """Where a window begins: the file, the row, and the tokens of that row before it. Part of a loader state."""

    epoch: int = 0
    window: int = 0  # of the epoch
    first: int = 0  # number of its first sample, counted over all epochs
    shard: int = 0  # number of the file in the epoch's order
    row: int = 0
    offset: int = 0
    skip: int = 0  # tokens


@dataclass(frozen=True, slots=True)
class Shards:
    """The files of a source, in order. begins: the first training row of each; None for a file without any.

    ends: of files by their number, the row before which reading ends.
    """

    paths: Sequence[Path]
    columns: Sequence[str]
    begins: Sequence[ShardPosition | None]
    seed: int | None  # seed of the files' order, which differs in each epoch; None keeps the order
    filled: Sequence[str] = ()  # rows in which one of these fields is empty are skipped
    ends: Mapping[int, int] = field(default_factory=dict)

    def rows(self, epoch: int, start: ShardPosition) -> Iterator[RawRow]:
        """The rows of an epoch from a position on. TrainingError names the file and row of one that cannot be read."""
        count = len(self.paths)
        order = range(count) if self.seed is None else Permutation(count, derived_seed(self.seed, "files", epoch))
        for number in range(start.shard, count):
            if (begin := self.begins[order[number]]) is None:
                continue
            path, end = self.paths[order[number]], self.ends.get(order[number])
            for raw in rows_of(path, self.columns, max(start, begin._replace(shard=number)), end):
                if not (self.filled and raw.row().blank(self.filled)):
                    yield raw


@dataclass(frozen=True, slots=True)
class RowReader:
    """How rows become samples of a stream. packing: as `packing_of` gives it. names: of labels."""

    encoder: RowEncoder
    limits: Limits
    form: BatchFormat
    packing: str
    names: Sequence[str] = ()

    @property
    def data(self) -> DatasetData:
        return self.encoder.data

    @property
    def ahead(self) -> int:
        """How many tokens a sample's targets extend beyond its inputs."""
        return 0 if self.form.whole else 1

    def texts(self, raw: RawRow) -> list[Text]:
        """The texts of a row, uncut. TrainingError names a row that cannot be learned from."""
        return [
            (np.array(each.ids, dtype=np.uint32), np.frombuffer(each.learned, dtype=np.bool_))
            for each in self.encoder.one(raw.row()).texts
        ]

    def sample(self, raw: RawRow) -> Sample:
        """A row as one sample. TrainingError names a row that cannot be one."""
        encoded = self.encoder.one(raw.row())
        if len(encoded.texts) > 1:
            what = "the chat template writes earlier answers otherwise when others follow: it is several samples"
            raise encoded.row.wrong(what, "set data.packing: isolated, or leave data.streaming out")
        ids, learned = encoded.texts[0]
        label = encoded.label
        if isinstance(label, str):
            if label not in self.names:
                known = (
                    f"not in data.labels: {', '.join(self.names)}" if self.names else "a name, and data.labels is empty"
                )
                raise encoded.row.wrong(f"label {label!r} is {known}")
            label = self.names.index(label)
        if label is not None and self.names and label >= len(self.names):
            raise encoded.row.wrong(f"label {label} is not in data.labels: {', '.join(self.names)}")
        text = (np.array(ids, dtype=np.uint32), np.frombuffer(learned, dtype=np.bool_))
        fitting = fitted(text, self.limits)
        return Sample((fitting,), raw.place, label, cut=int(len(fitting[0]) < len(ids)))


class Sample(NamedTuple):
    """One text, or several that are predicted each from itself alone. place: the row in which it begins.

    cut: how many of the texts are longer. left_out: how many of the window, which this sample begins, have nothing to
    learn.
    """

    texts: Sequence[Text]
    place: str
    label: int | None = None
    cut: int = 0
    left_out: int = 0

    @property
    def has_target(self) -> bool:
        return any(bool(learned[1:].any()) for _, learned in self.texts)


def batch_of(reader: RowReader, samples: Sequence[Sample]) -> Batch:
    """The samples as a batch."""
    form = reader.form
    if reader.packing == "isolated":
        batch = form.packed([sample.texts for sample in samples])
    else:
        labels = None if samples[0].label is None else np.array([sample.label for sample in samples], dtype=np.int64)
        batch = form.batch([sample.texts[0] for sample in samples], labels)
    return batch._replace(
        targetless=0 if form.whole else sum(not sample.has_target for sample in samples),
        cut=sum(sample.cut for sample in samples),
        left_out=sum(sample.left_out for sample in samples),
    )


def samples_of(rows: Iterable[RawRow], reader: RowReader) -> list[Sample]:
    """The samples of these rows that have a target. TrainingError names a row that cannot be one."""
    if reader.packing == "none":
        found = [reader.sample(raw) for raw in rows]
        return [sample for sample in found if not reader.ahead or sample.has_target]
    if reader.packing == "isolated":
        gathered = _Gathered(reader)
        for raw in rows:
            gathered.add(raw)
        return gathered.samples()
    tokens = _Tokens(reader)
    for raw in rows:
        tokens.add(raw, 0)
    return tokens.samples(math.ceil((len(tokens.ids) - reader.ahead) / reader.form.length))


class Windows:
    """The samples of a source by number, epoch after epoch. Going forward is cheap."""

    def __init__(self, shards: Shards, reader: RowReader, seed: int) -> None:
        self.shards, self._reader, self._seed = shards, reader, seed
        self.go_on(WindowStart())

    def __getstate__(self) -> tuple[Any, ...]:
        return self.shards, self._reader, self._seed, self._begin

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        *given, begin = state
        self.__init__(*given)  # type: ignore[misc]
        self.go_on(begin)

    def go_on(self, begin: WindowStart) -> None:
        """Begin at an earlier value of :attr:`position`; samples before it are read again if they are requested."""
        self._begin = begin
        self._read_from(begin)

    def __getitem__(self, number: int) -> Sample:
        """The sample of a number. TrainingError names a row that cannot be one, or the file."""
        if self._process != os.getpid() or number < self.position.first:
            self._read_from(self._begin if self._begin.first <= number else WindowStart())
        while number >= self.position.first + self._size:
            self._advance()
        place = number - self.position.first
        place = self._order[place] if self._reader.data.shuffle_buffer else place
        return self._packed[place] if self._packed else self._reader.sample(self._apart[place])

    def _read_from(self, position: WindowStart) -> None:
        """Set the next window without reading it. Also used in a process that has inherited open files."""
        self._process = os.getpid()
        self.position = self._next = position
        self._size, self._order = 0, Permutation(1, 0)
        self._rows: Iterator[RawRow] | None = None
        self._apart: list[RawRow] = []
        self._packed: list[Sample] = []
        self._carried = _Tokens(self._reader)

    def _advance(self) -> None:
        """Read the next window. TrainingError if a whole epoch gives no sample."""
        self.position = begin = self._next
        self._apart, self._packed = [], []
        if self._rows is None:
            self._rows = self.shards.rows(begin.epoch, ShardPosition(begin.shard, begin.row, begin.offset))
        following = {"dense": self._join, "isolated": self._fill, "none": self._gather}[self._reader.packing](
            self._rows
        )
        self._size = len(self._apart) + len(self._packed)
        if following is None:
            self._rows, self._carried = None, _Tokens(self._reader)
            if not self._size and not begin.window:
                length = self._reader.form.length
                raise TrainingError(
                    f"data.path: the rows from {self.shards.paths[0]} on do not fill a sample of {length} tokens",
                    hint="provide more text, or raise data.sequence_length if prompts are longer",
                )
            self._next = WindowStart(begin.epoch + 1, first=begin.first + self._size)
        else:
            position, skip = following
            window = begin.window + (self._size > 0)
            self._next = WindowStart(begin.epoch, window, begin.first + self._size, *position, skip)
        # A small data set that fits into one window has the same order as without streaming.
        which = ("window", begin.window) if begin.window else ()
        self._order = Permutation(self._size, derived_seed(self._seed, "epoch", begin.epoch, *which))

    def _gather(self, rows: Iterator[RawRow]) -> tuple[ShardPosition, int] | None:
        """Take one sample per row; where the next window begins, or None at the end of the epoch."""
        for raw in rows:
            if len(self._apart) == (self._reader.data.shuffle_buffer or _UNSHUFFLED):
                self._rows = chain([raw], rows)
                return raw.position, 0
            self._apart.append(raw)
        return None

    def _fill(self, rows: Iterator[RawRow]) -> tuple[ShardPosition, int] | None:
        """Put whole texts into samples; where the next window begins, or None at the end of the epoch."""
        gathered, following = _Gathered(self._reader), None
        enough = (self._reader.data.shuffle_buffer or _UNSHUFFLED) * self._reader.form.length
        for raw in rows:
            if gathered.places >= enough:
                self._rows, following = chain([raw], rows), (raw.position, 0)
                break
            gathered.add(raw)
        self._packed = gathered.samples()
        return following

    def _join(self, rows: Iterator[RawRow]) -> tuple[ShardPosition, int] | None:
        """Join texts end to end; where the next window begins, or None at the end of the epoch."""
        length, ahead = self._reader.form.length, self._reader.ahead
        count = self._reader.data.shuffle_buffer or _UNSHUFFLED
        tokens, following = self._carried, None
        skip = 0 if tokens.starts else self.position.skip
        while len(tokens.ids) < count * length + ahead and (raw := next(rows, None)):
            tokens.add(raw, skip)
            skip = 0
        if len(tokens.ids) >= count * length + ahead:
            self._carried, following = tokens.after(count * length)
        else:
            count = max(0, math.ceil((len(tokens.ids) - ahead) / length))
        self._packed = tokens.samples(count)
        return following


class _Gathered:
    """Whole texts for samples of several, with the row of each. places: how many tokens they predict."""

    def __init__(self, reader: RowReader) -> None:
        self._reader = reader
        self.places = self._left_out = 0
        self._texts: list[tuple[Text, str, bool]] = []  # and whether it is longer

    def add(self, raw: RawRow) -> None:
        most = self._reader.limits.tokens
        for ids, learned in self._reader.texts(raw):
            # As without streaming: each piece begins with the last token of the one before, which is predicted there.
            split = may_be_split(self._reader.encoder)
            kept = self.places
            for begin in range(0, max(1, len(ids) - 1), most - 1) if split else (0,):
                text = ids[begin : begin + most], learned[begin : begin + most]
                if text[1][1:].any():  # else nothing of it is learned
                    self._texts.append((text, raw.place, not split and len(ids) > most))
                    self.places += len(text[0]) - 1
            self._left_out += self.places == kept

    def samples(self) -> list[Sample]:
        sizes = [len(ids) - 1 for (ids, _), *_ in self._texts]
        falling = sorted(range(len(sizes)), key=lambda place: -sizes[place])
        bins = best_fit(sizes, falling, self._reader.form.length)
        several = ([self._texts[each] for each in found] for found in bins)
        return [
            Sample(
                [text for text, *_ in texts],
                texts[0][1],
                cut=sum(cut for *_, cut in texts),
                left_out=0 if number else self._left_out,
            )
            for number, texts in enumerate(several)
        ]


class _Tokens:
    """Texts joined end to end, with the row of each. starts: of each text, below 0 if its beginning is cut off."""

    def __init__(self, reader: RowReader) -> None:
        self._reader = reader
        self.ids, self._answers = array("I"), bytearray()
        self.starts: list[int] = []
        self._rows: list[RawRow] = []

    def add(self, raw: RawRow, skip: int) -> None:
        """One more text, without its first `skip` tokens."""
        texts = self._reader.encoder.one(raw.row()).texts
        found = list(chain.from_iterable(each.ids for each in texts))
        # The first token has nothing before it to be predicted from.
        predicted = b"".join(b"\0" + each.learned[1:] for each in texts)
        self.starts.append(len(self.ids) - skip)
        self._rows.append(raw._replace(content=type(raw.content)()))  # the content is no longer needed
        self.ids.extend(found[skip:])
        self._answers += predicted[skip:]

    def after(self, place: int) -> tuple[_Tokens, tuple[ShardPosition, int]]:
        """The rest from a token on, and its position: a row, and how many of its tokens come before."""
        text = bisect_right(self.starts, place) - 1
        rest = _Tokens(self._reader)
        rest.ids, rest._answers = self.ids[place:], self._answers[place:]
        rest.starts, rest._rows = [self.starts[text] - place], [self._rows[text]]
        return rest, (self._rows[text].position, place - self.starts[text])

    def samples(self, count: int) -> list[Sample]:
        """The first samples; fewer if some are left out."""
        length, ahead = self._reader.form.length, self._reader.ahead
        ids: Ids = np.frombuffer(self.ids.tobytes(), dtype=np.uint32)
        predicted = np.frombuffer(bytes(self._answers), dtype=np.bool_)
        spans = [slice(start, min(start + length + ahead, len(ids))) for start in range(0, count * length, length)]
        # As without streaming: a sample that a prompt fills has no targets, and is left out.
        kept = [span for span in spans if not ahead or predicted[span][1:].any()]
        places = (self._rows[bisect_right(self.starts, span.start) - 1].place for span in kept)
        return [Sample([(ids[span], predicted[span])], place) for span, place in zip(kept, places, strict=True)]


class RowStream:
    """Endless training samples by number, from one or several sources. weights: one per source, above 0."""

    def __init__(
        self, sources: Sequence[Windows], weights: Sequence[float], reader: RowReader, seed: int, identity: str
    ):
        self._sources, self._reader, self._identity = sources, reader, identity
        self._key = derived_seed(seed, "mix")
        self._shares = np.cumsum(weights) / np.sum(weights)
        self._shares[-1] = 1.0
        # a number, and how many samples each source has given before it
        self._begin = self._known = (0, np.zeros(len(sources), dtype=np.int64))

    def go_on(self, loader_state: str, number: int) -> bool:
        try:
            found = json.loads(loader_state)
            if (found["format"], found["stream"]) != (_FORMAT, self._identity) or found["number"] > number:
                return False
            counts, positions = found["counts"], [WindowStart(*each) for each in found["windows"]]
            numbers = [found["number"], *counts, *chain.from_iterable(positions)]
            if not len(counts) == len(positions) == len(self._sources):
                raise ValueError("another number of sources")
            if not all(type(each) is int and 0 <= each < 2**62 for each in numbers):
                raise ValueError("not whole numbers from 0 on")
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise TrainingError(f"the checkpoint's position in the data stream is damaged: {error}") from error
        self._begin = self._known = (found["number"], np.array(counts, dtype=np.int64))
        for source, position in zip(self._sources, positions, strict=True):
            source.go_on(position)
        return True

    def batch(self, indices: Sequence[int]) -> Batch:
        """The samples of these numbers. TrainingError names a row that cannot be one."""
        first, stop = min(indices), max(indices) + 1
        counts = self._counts_before(first)
        windows = [source.position for source in self._sources]
        found = {"format": _FORMAT, "stream": self._identity, "number": first}
        loader_state = json.dumps({**found, "counts": counts.tolist(), "windows": windows})
        # A sample counts for its source whether it is requested or not.
        places = {}
        for number, source in enumerate(self._picked(first, stop).tolist(), start=first):
            places[number] = (source, int(counts[source]))
            counts[source] += 1
        samples = [self._sources[source][place] for source, place in (places[index] for index in indices)]
        return batch_of(self._reader, samples)._replace(loader_state=loader_state)

    def place(self, number: int) -> str:
        source = int(self._picked(number, number + 1)[0])
        return self._sources[source][int(self._counts_before(number)[source])].place

    def written_after(self, time: float) -> Sequence[Path]:
        found = []
        for path in dict.fromkeys(path for source in self._sources for path in source.shards.paths):
            with reading(path):
                if path.stat().st_mtime > time:
                    found.append(path)
        return found

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
        """The source of each sample in a range: drawn by weight, from the seed and the sample's number alone."""
        if len(self._sources) == 1:
            return np.zeros(stop - first, dtype=np.int64)
        # splitmix64 (Steele, Lea and Flood 2014): the n-th number does not depend on earlier ones
        drawn = np.arange(first + 1, stop + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(self._key)
        drawn = (drawn ^ (drawn >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        drawn = (drawn ^ (drawn >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        drawn ^= drawn >> np.uint64(31)
        unit = (drawn >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return np.searchsorted(self._shares, unit, side="right").astype(np.int64)
