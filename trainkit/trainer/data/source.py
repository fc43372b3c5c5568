"""What a source of data gives: training and validation samples, and what is known of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainkit.errors import TrainingError
from trainkit.trainer.data.encoding import Encoder

IGNORED = -1  # target id that is not predicted
NO_LABEL = -100  # the same among labels, as models of transformers have it
Ids = NDArray[np.integer[Any]]


class Batch(NamedTuple):
    """Some samples, by the names of the model's arguments.

    Byte and token data give `tokens` and `targets` (int64, -1 where nothing is predicted), padded and labelled data
    `input_ids`, `attention_mask` and `labels` as models of transformers name them.
    """

    inputs: dict[str, Tensor]  # each (samples, …)
    counted: int  # targets that are predicted: the model's loss is a sum over them
    written: int = 0  # tokens that go through a decoder beside those of the inputs, padding too
    bookmark: str = ""  # of a stream: where a run goes on that has all samples before these
    idle: int = 0  # samples of a stream of which nothing is predicted

    def on(self, device: torch.device) -> dict[str, Tensor]:
        """The inputs on a device."""
        return {name: values.to(device) for name, values in self.inputs.items()}


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples by number. Indexed with numbers, they give the batch of these samples, in this order."""

    size: int
    batch: Callable[[Sequence[int]], Batch]  # no closure: where loader processes are not forked, they get it by pickle

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, indices: Sequence[int]) -> Batch:
        return self.batch(indices)


@dataclass(frozen=True, slots=True)
class Labels:
    """What is known of the labels. names: in order of their numbers, where they have names."""

    highest: int
    where: str  # the place of the highest
    names: tuple[str, ...] = ()


class Stream(Protocol):
    """What training samples without an end can do besides."""

    def go_on(self, bookmark: str, number: int) -> bool:
        """Begin where a batch's bookmark says; False where that is past sample `number`, or of another stream."""

    def place(self, number: int) -> str:
        """Where a sample begins: file and row, for messages."""

    def written_after(self, time: float) -> Sequence[Path]:
        """The files of the stream that were changed after a time, in seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class Source:
    """A data set, opened. description: in short (`12,345 bytes of text`). facts: for the summary."""

    train: Samples
    validation: Samples
    description: str
    facts: Mapping[str, int | float | str] = field(default_factory=dict)
    highest: int = -1  # the highest token id in the data; -1 where that is found out sample by sample
    where: str = ""  # the place of that token, for messages
    labels: Labels | None = None  # of samples that have one each, where they are known before the first step
    encoder: Encoder = field(default_factory=Encoder)  # how text becomes token ids
    padding: int | None = None  # the id that fills samples up, where some are filled up
    stream: Stream | None = None  # of training samples that have no end, whose number is then 0

    def with_batches(self, change: Callable[[Samples, Sequence[int]], Batch]) -> Source:
        """The same source, whose batches `change` makes out of the samples that are here."""
        train, validation = (Samples(len(each), partial(change, each)) for each in (self.train, self.validation))
        return dataclasses.replace(self, train=train, validation=validation)


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Inside, an OSError is a TrainingError that names the file."""
    try:
        yield
    except OSError as error:
        raise TrainingError(f"data.path: {file} cannot be read: {error.strerror or error}") from error


def held_out(size: int, length: int, fraction: float, unit: str, where: str = "") -> int:
    """Where the validation samples begin in a row of tokens: the end is held out. TrainingError if it is too short."""
    border = size - max(length + 1, int(size * fraction))
    if border <= length:
        raise TrainingError(
            f"data.path: {where}{size} {unit} are too few for a training and a validation sample of {length}",
            hint="lower data.sequence_length, or bring more text",
        )
    return border


def next_token_batch(samples: Iterable[tuple[Ids, NDArray[np.bool_]]], size: int, length: int, padding: int) -> Batch:
    """A batch of `size` samples of which the next tokens are predicted; what a sample does not fill is padding.

    samples: ids of up to `length` + 1 tokens each, and which of them are predicted, from the second on.
    """
    # No attention mask: padding is at the end, where no token before it looks.
    tokens = np.full((size, length), padding, dtype=np.int64)
    targets = np.full((size, length), IGNORED, dtype=np.int64)
    for row, (ids, predicted) in enumerate(samples):
        tokens[row, : len(ids) - 1] = ids[:-1]
        targets[row, : len(ids) - 1] = np.where(predicted, ids[1:].astype(np.int64), IGNORED)
    counted = int(np.count_nonzero(targets != IGNORED))
    return Batch({"tokens": torch.from_numpy(tokens), "targets": torch.from_numpy(targets)}, counted)


def targets_at_most(inputs: Mapping[str, Tensor]) -> int | None:
    """How many targets of a micro batch on the host count at most; None where that is more than half of them.

    Rounded up to sixteenths, so that sizes that follow from it seldom change.
    """
    for name, ignored in (("targets", IGNORED), ("labels", NO_LABEL)):
        if name in inputs and inputs[name].dim() > 1 and not inputs[name].is_floating_point():
            size = inputs[name].numel()
            share = -(-int(np.count_nonzero(inputs[name].numpy() != ignored)) * 16 // size)
            return max(1, -(-share * size // 16)) if share <= 8 else None
    return None


def bounds_of_micro(batch: Batch, micro: int) -> Iterator[int | None]:
    """`targets_at_most` of each micro batch of `micro` samples."""
    whole = next((batch.inputs[name].numel() for name in ("targets", "labels") if name in batch.inputs), 0)
    if batch.counted == whole:  # of all of them, as in running text: nothing to count
        yield from repeat(None)
    sizes = (torch.split(each, micro) for each in batch.inputs.values())
    for each in zip(*sizes, strict=True):
        yield targets_at_most(dict(zip(batch.inputs, each, strict=True)))


def count_targets(inputs: Mapping[str, Tensor]) -> Tensor | int:
    """Targets that count: `targets` that are not -1, `labels` that are not -100, or else one a sample."""
    for name, ignored in (("targets", IGNORED), ("labels", NO_LABEL)):
        if name in inputs:
            # Left on the device: reading it would wait for the computation.
            return torch.count_nonzero(inputs[name] != ignored)
    return len(next(iter(inputs.values()), ()))
