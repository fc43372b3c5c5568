"""Steps of a run on a copy of its model, to see what memory they take; nothing of the training is touched."""

from __future__ import annotations

import gc
from dataclasses import dataclass

from torch import Tensor

from trainkit.optimizers import optimizer
from trainkit.trainer.auto_batch.memory_limit import Room, give_back, is_out_of_memory, peak, restart_peak
from trainkit.trainer.data.sampler import positions_of_rank
from trainkit.trainer.metrics.memory import resident
from trainkit.trainer.models.prepared import fitting_source, prepared_model
from trainkit.trainer.optim.build import forget_embeddings
from trainkit.trainer.optim.precision import autocast
from trainkit.trainer.outset import Outset
from trainkit.trainer.parallel import STRATEGIES, Strategy
from trainkit.trainer.randomness import seed_generators


@dataclass(frozen=True, slots=True)
class Attempt:
    """What a micro batch did on one rank. peak: bytes; expected ones where it was not tried. why: "" if it fits."""

    peak: int
    why: str = ""


class Rehearsal:
    """Tries micro batches with the first samples of the run, the way that accumulation takes them.

    Attempts hold no collective but for the making of a copy: a rank may run out of memory by itself, and then all of
    them call :meth:`start_over`.
    """

    def __init__(self, outset: Outset, room: Room) -> None:
        self._outset, self._room = outset, room
        self._settings, self._device = outset.settings, outset.device
        self._strategy: Strategy | None = None
        self._inputs: dict[str, Tensor] = {}
        self._base = 0  # bytes of a copy at rest
        self._known: list[tuple[int, int]] = []  # micro batches that fitted, with their peaks

    def attempt(self, micro: int) -> Attempt:
        """Take a step with a micro batch, unless it is foreseen to take more than there is."""
        try:
            if self._strategy is None:
                self._strategy = self._copy()
                self._step(self._strategy, self._settings.batch.search[0])  # from now on optimizer state is there
                give_back(self._device)
                self._base = resident()
            expected = self._expected(micro)
            if expected > self._room.there and self._device.type == "cpu":  # which would end processes, not fail
                return Attempt(expected, "expected to take more than there is, and not tried")
            restart_peak(self._device)
            self._step(self._strategy, micro)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return Attempt(peak(self._device), "out of memory")
        used = peak(self._device)
        if used > self._room.limit:
            return Attempt(used, "more than the limit")
        self._known.append((micro, used))
        return Attempt(used)

    def start_over(self) -> None:
        """Let go of the copy. Another one is made for the next attempt: the old one may have failed in mid-step."""
        self._strategy, self._inputs = None, {}
        if optimizer(self._settings.recipe.optimizer.name).embeddings_in_32_bit:
            forget_embeddings()
        gc.collect()
        give_back(self._device)

    def _copy(self) -> Strategy:
        settings, world = self._settings, self._outset.world
        seed_generators(settings.recipe.train.seed)
        model = prepared_model(settings)
        mine = positions_of_rank(settings.batch, world.rank)
        source = fitting_source(self._outset.source, model, settings.recipe)
        batch = source.train[self._outset.order.indices(0, mine.start, mine.stop)]
        self._inputs = {name: values.to(self._device) for name, values in batch.inputs.items()}
        return STRATEGIES[settings.recipe.strategy.kind](model, settings, world, self._device)

    def _step(self, strategy: Strategy, micro: int) -> None:
        """An update after two micro steps, if there are as many: from the second on there are gradients besides."""
        settings = self._settings
        share = settings.batch.search[-1]
        for start in range(0, min(share, 2 * micro), micro):
            inputs = {name: values[start : start + micro] for name, values in self._inputs.items()}
            with strategy.micro_step(last=False):
                with autocast(settings, settings.dtype, self._device):
                    loss = strategy.model(**inputs)
                strategy.backward(loss / share, last=False)
        strategy.update(settings.recipe.optimizer.lr)

    def _expected(self, micro: int) -> int:
        """The peak from those of smaller ones, for activations grow with the batch; 0 before there is one."""
        points = [(0, self._base), *sorted(self._known)][-2:]
        if len(points) < 2:
            return 0
        (less, low), (more, high) = points
        return high + max(0, high - low) * (micro - more) // (more - less)
