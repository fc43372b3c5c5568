"""The loss on held-out data, with the same samples on any number of ranks; and the lowest such loss so far."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from trainkit.seeds import derived_seed
from trainkit.trainer.data.sampler import Permutation
from trainkit.trainer.data.source import Samples
from trainkit.trainer.distributed import sum_over_ranks
from trainkit.trainer.parallel import Strategy
from trainkit.trainer.settings import Settings, World

Pass = TypeVar("Pass")  # sample numbers of one forward pass


class Evaluation:
    """Fixed forward passes over fixed validation samples, chosen by the seed and dealt to the ranks in turn."""

    def __init__(self, settings: Settings, samples: Samples, world: World, device: torch.device) -> None:
        order = Permutation(len(samples), derived_seed(settings.recipe.train.seed, "evaluation"))
        micro = settings.batch.eval_micro
        # Fewer than `eval.batches` passes if the validation split is too small.
        chosen = [order[place] for place in range(min(len(samples), settings.recipe.eval.batches * micro))]
        self.passes = [tuple(chosen[start : start + micro]) for start in range(0, len(chosen), micro)]
        self._samples, self._world, self._device = samples, world, device

    @torch.no_grad()
    def loss(
        self, strategy: Strategy, autocast: AbstractContextManager[object], tell: Callable[[], object] = lambda: None
    ) -> float:
        """Mean loss over all counted targets of all passes, in nats. tell: called before each pass."""
        strategy.model.eval()
        losses, counted = [], 0
        for numbers, own in in_turn(self.passes, self._world):
            tell()
            batch = self._samples[numbers]
            with autocast:
                loss = strategy.model(**batch.on(self._device))
            if own:  # stays on the device: reading it would wait for the pass
                losses.append(loss.detach().float())
                counted += batch.counted
        strategy.model.train()
        total = math.fsum(torch.stack(losses).tolist()) if losses else 0.0
        return sum_over_ranks([total], self._world)[0] / max(1, sum_over_ranks([counted], self._world)[0])


def in_turn(passes: Sequence[Pass], world: World) -> Iterator[tuple[Pass, bool]]:
    """This rank's passes, dealt in turn, and whether each one counts."""
    for start in range(0, len(passes), world.size):
        # Ranks without a pass repeat the last one uncounted: with sharded weights every rank must take part.
        mine = min(start + world.rank, len(passes) - 1)
        yield passes[mine], mine == start + world.rank


@dataclass(slots=True)
class Best:
    """The lowest evaluation loss: the step to keep a checkpoint of, and when to stop early."""

    loss: float | None = None  # in nats; None before the first evaluation
    step: int = 0  # of that evaluation
    since: int = 0  # evaluations since then

    def note(self, step: int, loss: float) -> bool:
        """Record an evaluation; whether its loss is the lowest so far. NaN and infinity never are."""
        lowest = math.isfinite(loss) and (self.loss is None or loss < self.loss)
        if lowest:
            self.loss, self.step, self.since = loss, step, 0
        else:
            self.since += 1
        return lowest

    def restore(self, data: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint's manifest; an empty entry means that nothing was evaluated."""
        self.loss, self.step, self.since = data.get("loss"), data.get("step", 0), data.get("since", 0)
