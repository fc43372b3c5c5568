"""A source of data: training and validation samples by number, as batches, and facts about them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from trainkit.data.encode import IGNORE_INDEX
from trainkit.data.tokenizer import Encoder
from trainkit.recipe.schema import HfModel, Recipe

Ids = NDArray[np.integer[Any]]
Mask = NDArray[np.bool_]


class Batch(NamedTuple):
    """A batch of samples, by the names of the model's arguments.

    Byte and token data give `tokens` and `targets` (int64, -100 where nothing is predicted), padded and labelled data
    `input_ids`, `attention_mask` and `labels` as models of transformers name them.
    """

    inputs: dict[str, Tensor]  # each (samples, …)
    counted: int  # the number of predicted targets: the model's loss is a sum over them
    written: int = 0  # tokens that go through a decoder in addition to the inputs, with padding
    loader_state: str = ""  # for a stream: where to resume a run that has consumed all samples before these
    targetless: int = 0  # samples of a stream without any target
    cut: int = 0  # texts of a stream in these samples that are longer
    left_out: int = 0  # texts of a stream before these samples of which none of a sample is learned

    def on(self, device: torch.device) -> dict[str, Tensor]:
        """The inputs on a device."""
        return {name: values.to(device) for name, values in self.inputs.items()}


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples by number. Indexing with numbers gives the batch of these samples, in this order."""

    size: int
    batch: Callable[[Sequence[int]], Batch]  # not a closure: loader processes that are not forked get it by pickle

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, indices: Sequence[int]) -> Batch:
        return self.batch(indices)


@dataclass(frozen=True, slots=True)
class Labels:
    """Facts about the labels. names: in the order of their numbers, if they have names."""

    highest: int
    where: str  # the location of the highest
    names: tuple[str, ...] = ()


class Stream(Protocol):
    """What endless training samples also offer."""

    def go_on(self, loader_state: str, number: int) -> bool:
        """Resume at a batch's loader_state; False if that is after sample `number`, or belongs to another stream.

        TrainingError if it is not a loader_state.
        """

    def place(self, number: int) -> str:
        """Where a sample begins: file and row, for messages."""

    def written_after(self, time: float) -> Sequence[Path]:
        """The files that changed after a time, in seconds since the epoch. TrainingError for one that is gone."""


@dataclass(frozen=True, slots=True)
class Source:
    """An opened data set. description: in short (`12,345 bytes of text`). facts: for the summary."""

    train: Samples
    validation: Samples
    description: str
    facts: Mapping[str, int | float | str] = field(default_factory=dict)
    highest: int = -1  # the highest token id in the data; -1 if ids are checked sample by sample
    where: str = ""  # the location of that token, for messages
    labels: Labels | None = None  # for samples with one label each, if the labels are known before the first step
    encoder: Encoder = field(default_factory=Encoder)  # how text becomes token ids
    padding: int | None = None  # the padding id, if samples are padded
    stream: Stream | None = None  # for endless training samples; `train` then has length 0
    draws: bool = False  # whether the source draws the order of its samples itself, whose numbers go on over epochs
    lengths: tuple[int, int | None] | None = None  # of samples and targets, where the data decide them
    remarks: tuple[str, ...] = ()  # about the data, for the main rank to log as warnings

    def with_batches(self, change: Callable[[Samples, Sequence[int]], Batch]) -> Source:
        """The same source, with batches that `change` makes from these samples."""
        train, validation = (Samples(len(each), partial(change, each)) for each in (self.train, self.validation))
        return dataclasses.replace(self, train=train, validation=validation)


def is_writing(recipe: Recipe) -> bool:
    """Whether the model writes a target text for a source text."""
    return isinstance(recipe.model, HfModel) and recipe.model.task == "seq2seq_lm"


def sample_length(recipe: Recipe) -> int:
    """Tokens of a sample, once that is known."""
    length = recipe.data.sequence_length
    assert isinstance(length, int), "the data have decided it"
    return length


def tokens_of_sample(recipe: Recipe) -> int:
    """The most tokens that go through the model for a sample."""
    pair = is_writing(recipe) and hasattr(recipe.data, "target_length")
    return sample_length(recipe) + (Lengths.of(recipe.data).target if pair else 0)


@dataclass(frozen=True, slots=True)
class Lengths:
    """The lengths of sources and targets: tokens at most, with special tokens. padding: as in `data.padding`."""

    source: int
    target: int
    padding: Literal["longest", "max_length"] = "max_length"

    @classmethod
    def of(cls, data: Any) -> Lengths:
        """The lengths for a data section whose samples are pairs."""
        target = data.target_length or data.sequence_length
        return cls(data.sequence_length, target, getattr(data, "padding", "max_length"))

    def width(self, rows: Sequence[Ids], limit: int) -> int:
        """The padded length of a batch of sources or targets."""
        if self.padding == "max_length":
            return limit
        # In multiples of 8: for tensor cores, and for fewer shapes to compile.
        return min(limit, -(-max(len(row) for row in rows) // 8) * 8)


@dataclass(frozen=True, slots=True)
class BatchFormat:
    """The common format of batches of rows.

    length: tokens of a sample at most, both parts of a pair together. padding: the padding id. whole: samples
    are read as a whole, not predicted token by token. pairs: set if samples are sources with targets.
    """

    length: int
    padding: int
    whole: bool
    pairs: Lengths | None = None

    def batch(self, samples: Sequence[tuple[Ids, Mask]], labels: NDArray[np.int64] | None = None) -> Batch:
        """A batch of samples: their ids, and which of these are predicted. labels: one per sample, if there are labels.

        Short samples are padded. In a pair the target is predicted.
        """
        if self.pairs:
            return pair_batch(
                ((ids[~predicted], ids[predicted]) for ids, predicted in samples), self.pairs, self.padding
            )
        if self.whole:
            inputs = _read_whole(*_filled([ids for ids, _ in samples], self.length, self.padding))
            return Batch(inputs if labels is None else {**inputs, "labels": torch.from_numpy(labels)}, len(samples))
        # No attention mask: padding is at the end, and no token attends to later ones.
        tokens = np.full((len(samples), self.length), self.padding, dtype=np.int64)
        targets = np.full((len(samples), self.length), IGNORE_INDEX, dtype=np.int64)
        for row, (ids, predicted) in enumerate(samples):
            tokens[row, : len(ids) - 1] = ids[:-1]
            targets[row, : len(ids) - 1] = np.where(predicted[1:], ids[1:].astype(np.int64), IGNORE_INDEX)
        counted = int(np.count_nonzero(targets != IGNORE_INDEX))
        return Batch({"tokens": torch.from_numpy(tokens), "targets": torch.from_numpy(targets)}, counted)

    def packed(self, samples: Sequence[Sequence[tuple[Ids, Mask]]]) -> Batch:
        """A batch of samples of several texts, each predicted from itself alone: its positions begin at 0.

        So do those of the padding behind the last. `position_ids` is (samples, length), int64.
        """
        tokens = np.full((len(samples), self.length), self.padding, dtype=np.int64)
        targets = np.full((len(samples), self.length), IGNORE_INDEX, dtype=np.int64)
        positions = np.zeros((len(samples), self.length), dtype=np.int64)
        steps = np.arange(self.length)
        for row, texts in enumerate(samples):
            first = 0
            for ids, learned in texts:
                stop = first + len(ids) - 1
                tokens[row, first:stop] = ids[:-1]
                targets[row, first:stop] = np.where(learned[1:], ids[1:].astype(np.int64), IGNORE_INDEX)
                positions[row, first:stop] = steps[: stop - first]
                first = stop
            positions[row, first:] = steps[: self.length - first]
        counted = int(np.count_nonzero(targets != IGNORE_INDEX))
        made = {"tokens": tokens, "targets": targets, "position_ids": positions}
        return Batch({name: torch.from_numpy(values) for name, values in made.items()}, counted)


def pair_batch(pairs: Iterable[tuple[Ids, Ids]], lengths: Lengths, padding: int) -> Batch:
    """A batch of sources with targets, in the form that transformers' encoder-decoders take.

    `input_ids` (samples, source), `attention_mask` if some are padded, `labels` (samples, target), -100 after the
    end of each.
    """
    sources, targets = zip(*pairs, strict=True)
    inputs = _read_whole(*_filled(sources, lengths.width(sources, lengths.source), padding))
    labels, real = _filled(targets, lengths.width(targets, lengths.target), IGNORE_INDEX)
    return Batch({**inputs, "labels": torch.from_numpy(labels)}, int(np.count_nonzero(real)), written=labels.size)


def _filled(rows: Sequence[Ids], width: int, filler: int) -> tuple[NDArray[np.int64], Mask]:
    """Rows padded to one width, and which positions are not padding."""
    ids = np.full((len(rows), width), filler, dtype=np.int64)
    real = np.zeros((len(rows), width), dtype=np.bool_)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = row
        real[place, : len(row)] = True
    return ids, real


def _read_whole(ids: NDArray[np.int64], real: Mask) -> dict[str, Tensor]:
    inputs = {"input_ids": torch.from_numpy(ids)}
    if not real.all():  # a mask would rule out the flash kernel
        inputs["attention_mask"] = torch.from_numpy(real.astype(np.int64))
    return inputs


def widened(batch: Batch, lengths: Lengths, padding: int) -> Batch:
    """The batch with samples of the greatest length and no padding: the largest that a step can be."""
    ids, labels = batch.inputs["input_ids"], batch.inputs["labels"]
    seen = batch.inputs.get("attention_mask", torch.ones_like(ids))
    more, further = (0, lengths.source - ids.shape[1]), (0, lengths.target - labels.shape[1])
    inputs = {
        "input_ids": functional.pad(ids, more, value=padding),
        "attention_mask": functional.pad(seen, more, value=0),
        "labels": functional.pad(labels.masked_fill(labels == IGNORE_INDEX, padding), further, value=padding),
    }
    return Batch(inputs, inputs["labels"].numel(), written=inputs["labels"].numel())


def targets_of(inputs: Mapping[str, Tensor]) -> Tensor | None:
    """The targets, under either of their names."""
    return inputs.get("targets", inputs.get("labels"))


def is_by_token(inputs: Mapping[str, Tensor]) -> bool:
    """Whether samples are predicted token by token, and not as a whole."""
    targets = targets_of(inputs)
    return targets is not None and targets.dim() > 1


def count_targets(inputs: Mapping[str, Tensor]) -> Tensor | int:
    """The number of targets or labels that are not -100; without either, one per sample."""
    targets = targets_of(inputs)
    if targets is None:
        return len(next(iter(inputs.values()), ()))
    # stays on the device: reading it would wait for the computation
    return torch.count_nonzero(targets != IGNORE_INDEX)


def targets_at_most(inputs: Mapping[str, Tensor]) -> int | None:
    """An upper bound of the counted targets of a micro batch on the host; None if that is more than half of them.

    Rounded up to sixteenths, so that sizes derived from it seldom change.
    """
    targets = targets_of(inputs)
    if targets is None or targets.dim() < 2 or targets.is_floating_point():
        return None
    return bound_of(int(np.count_nonzero(targets.numpy() != IGNORE_INDEX)), targets.numel())


def bound_of(count: int, size: int) -> int | None:
    """The bound for so many counted ones of all targets; None if that is more than half of them."""
    share = -(-count * 16 // size)
    return max(1, -(-share * size // 16)) if share <= 8 else None


def bounds_of_micro(batch: Batch, micro: int) -> Iterator[int | None]:
    """`targets_at_most` of each micro batch of `micro` samples."""
    targets = targets_of(batch.inputs)
    if targets is None or batch.counted == targets.numel():  # all of them count, as in plain text: no bound is needed
        yield from repeat(None)
    sizes = (torch.split(each, micro) for each in batch.inputs.values())
    for each in zip(*sizes, strict=True):
        yield targets_at_most(dict(zip(batch.inputs, each, strict=True)))
