"""Batches for one rank: the whole share of an optimizer step at a time, ready for its micro steps."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import cast

import torch
from torch.utils.data import DataLoader, Dataset

from trainkit.planning.plan import BatchArithmetic
from trainkit.recipe.schema import Data
from trainkit.train.data.sampler import Order, StepSampler, positions_of_rank
from trainkit.train.data.source import Batch, Samples


def training_batches(
    samples: Samples, order: Order, batch: BatchArithmetic, rank: int, *, steps: range, data: Data, pin: bool
) -> Iterator[Batch]:
    """One batch of micro x accumulation samples for each step."""
    loader: DataLoader[Batch] = DataLoader(
        cast("Dataset[Batch]", samples),
        sampler=StepSampler(order, positions_of_rank(batch, rank), steps),
        batch_size=None,  # the sampler already hands over whole lists
        num_workers=data.workers,
        pin_memory=pin and data.pin_memory,
        worker_init_fn=_obey_signals,
        generator=torch.Generator(),  # else the loader would draw its base seed from the training's generator
    )
    return iter(loader)


def _obey_signals(worker: int) -> None:
    """A worker inherits handlers that only take note; it has nothing to save and must end when told to."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the trainer decides
