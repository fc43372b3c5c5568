"""The trainer with one bug planted in it, for tests that must see such bugs: planted.py BUG --settings FILE."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from trainkit.launch_plan.model import SolvedBatch
from trainkit.trainer import __main__ as trainer
from trainkit.trainer import loop, optim
from trainkit.trainer.data import loader


def decay_everything() -> None:
    """Norms and biases decay as matrices do."""

    def groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
        return [{"params": list(parameters), "weight_decay": weight_decay}]

    optim.parameter_groups = groups


def average_per_rank() -> None:
    """Each rank divides by its own number of tokens, and the ranks' means are averaged."""
    honest = loop.optimizer_step

    def step(parts: Any, step: int, batch: Any, counted: int) -> Any:
        return honest(parts, step, batch, batch.counted * parts.world.size)

    loop.optimizer_step = step


def repeat_data() -> None:
    """Every rank takes the first rank's share of the global batch."""
    honest = loader.positions_of_rank

    def positions(batch: SolvedBatch, rank: int) -> range:
        return honest(batch, 0)

    loader.positions_of_rank = positions


def forget_a_micro_step() -> None:
    """The last micro batch of every step is left out."""
    honest = loop.split_micro

    def split(batch: Any, parts: Any) -> Any:
        return honest(batch, parts)[:-1]

    loop.split_micro = split


BUGS: Mapping[str, Callable[[], None]] = {
    bug.__name__: bug for bug in (decay_everything, average_per_rank, repeat_data, forget_a_micro_step)
}

if __name__ == "__main__":
    BUGS[sys.argv[1]]()
    trainer.start(sys.argv[2:])
