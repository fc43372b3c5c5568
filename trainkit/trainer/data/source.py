"""What a source of data gives: training and validation samples, and what is known of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from trainkit.errors import TrainingError
from trainkit.trainer.data.encoding import Bytes, Encoder

IGNORED = -1  # target id that is not predicted
NO_LABEL = -100  # the same among labels, as models of transformers have it


class Batch(NamedTuple):
    """Some samples, by the names of the model's arguments.

    Byte and token data give `tokens` and `targets` (int64, -1 where nothing is predicted), padded and labelled data
    `input_ids`, `attention_mask` and `labels` as models of transformers name them.
    """

    inputs: dict[str, Tensor]  # each (samples, …)
    counted: int  # targets that are predicted: the model's loss is a sum over them


def count_targets(inputs: Mapping[str, Tensor]) -> Tensor | int:
    """Targets that count: `targets` that are not -1, `labels` that are not -100, or else one a sample.

    Left on the device: reading it would wait for the computation.
    """
    for name, ignored in (("targets", IGNORED), ("labels", NO_LABEL)):
        if name in inputs:
            return torch.count_nonzero(inputs[name] != ignored)
    return len(next(iter(inputs.values()), ()))


def held_out(size: int, length: int, fraction: float, unit: str, where: str = "") -> int:
    """Where the validation samples begin in a row of tokens: the end is held out. TrainingError if it is too short."""
    border = size - max(length + 1, int(size * fraction))
    if border <= length:
        raise TrainingError(
            f"data.path: {where}{size} {unit} are too few for a training and a validation sample of {length}",
            hint="lower data.sequence_length, or bring more text",
        )
    return border


class Samples(Protocol):
    """Samples by number. Indexed with a list of numbers, it gives a batch."""

    def __len__(self) -> int:
        """How many there are."""

    def __getitem__(self, indices: Sequence[int], /) -> Batch:
        """The samples of these numbers, in this order."""


@dataclass(frozen=True, slots=True)
class Labels:
    """What is known of the labels. names: in order of their numbers, where they have names."""

    highest: int
    where: str  # the place of the highest
    names: tuple[str, ...] = ()


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
    encoder: Encoder = field(default_factory=Bytes)  # how text becomes token ids
    padding: int | None = None  # the id that fills samples up, where some are filled up
