"""Loss on held-out data, the same samples on any number of ranks, and the lowest such loss so far."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from trainkit.trainer.data.sampler import Permutation
from trainkit.trainer.data.source import Samples
from trainkit.trainer.distributed import sum_float_over_ranks, sum_over_ranks
from trainkit.trainer.parallel import Strategy
from trainkit.trainer.randomness import derived_seed
from trainkit.trainer.settings import World


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Fixed passes over fixed validation samples, chosen by the seed and shared by the ranks in turn."""

    passes: tuple[tuple[int, ...], ...]  # sample numbers of each pass
    samples: Samples
    world: World
    device: torch.device

    @classmethod
    def of(
        cls, samples: Samples, *, seed: int, batches: int, micro: int, world: World, device: torch.device
    ) -> Evaluation:
        """At most `batches` passes of `micro` samples, fewer where the validation split is smaller."""
        order = Permutation.of(len(samples), derived_seed(seed, "evaluation"))
        chosen = [order[place] for place in range(min(len(samples), batches * micro))]
        passes = tuple(tuple(chosen[start : start + micro]) for start in range(0, len(chosen), micro))
        return cls(passes, samples, world, device)

    @torch.no_grad()
    def loss(self, strategy: Strategy, autocast: AbstractContextManager[object]) -> float:
        """Mean loss over all counted targets of all passes, in nats."""
        strategy.model.eval()
        total, counted = 0.0, 0
        for start in range(0, len(self.passes), self.world.size):
            # Ranks left over repeat the last pass and count nothing: with sharded weights every rank must take part.
            mine = min(start + self.world.rank, len(self.passes) - 1)
            batch = self.samples[self.passes[mine]]
            inputs = {name: values.to(self.device) for name, values in batch.inputs.items()}
            with autocast:
                loss = strategy.model(**inputs)
            if mine == start + self.world.rank:
                total, counted = total + float(loss), counted + batch.counted
        strategy.model.train()
        return sum_float_over_ranks(total, self.world) / max(1, sum_over_ranks([counted], self.world)[0])


@dataclass(slots=True)
class Best:
    """The lowest evaluation loss: which checkpoint to keep for it, and when to stop waiting for a lower one.

    loss: in nats, None before the first evaluation; step: of that evaluation; since: evaluations after it.
    """

    loss: float | None = None
    step: int = 0
    since: int = 0

    def note(self, step: int, loss: float) -> bool:
        """Take one more evaluation; whether it is the lowest so far. NaN and infinity never are."""
        lowest = math.isfinite(loss) and (self.loss is None or loss < self.loss)
        if lowest:
            self.loss, self.step, self.since = loss, step, 0
        else:
            self.since += 1
        return lowest

    def as_data(self) -> dict[str, Any]:
        """What a checkpoint's manifest keeps of it."""
        return asdict(self)

    def restore(self, data: Mapping[str, Any]) -> None:
        """The inverse of :meth:`as_data`; nothing known is nothing evaluated."""
        self.loss, self.step, self.since = data.get("loss"), data.get("step", 0), data.get("since", 0)
