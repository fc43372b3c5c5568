"""How fast a run trains: its clock without compiling, evaluation and saving, and how long it stood still for data."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from trainkit.trainer.metrics.mfu import Work

# After so many steps of an attempt a new stretch begins: the first step allocates and tunes, and so do some after it,
# among them those in which CUDA graphs are recorded.
STRETCHES = (1, 5)


class Totals(NamedTuple):
    """Since the start of an attempt, at one moment of the clock; seconds, and tokens over all ranks."""

    clock: float
    steps: int = 0
    tokens: int = 0  # predicted ones
    computed: int = 0  # those that went through the model, predicted or not
    waited: float = 0.0  # for data
    compiled: float = 0.0
    aside: float = 0.0  # evaluation and saving

    def since(self, before: Totals) -> Totals:
        """What came in between."""
        apart: list[Any] = [late - early for late, early in zip(self, before, strict=True)]
        return Totals(*apart)

    @property
    def training(self) -> float:
        """Seconds of steps."""
        return max(self.clock - self.compiled - self.aside, 1e-9)

    def rates(self, global_batch: int, work: Work, ranks: int) -> dict[str, Any]:
        """Of the steps; MFU is None where it is not known."""
        return {
            "samples_per_second": round(self.steps * global_batch / self.training, 3),
            "tokens_per_second": round(self.tokens / self.training, 1),
            "mfu": work.share(self.computed / self.training, ranks),
        }


def steady(marks: Sequence[Totals], end: Totals) -> Totals:
    """The totals at which the last stretch begins that has as many steps as went before it. marks: one at the start."""
    return next(
        mark for mark in reversed(marks) if mark is marks[0] or end.steps - mark.steps >= mark.steps - marks[0].steps
    )


class Waiting:
    """Seconds for which the device had nothing to do, for the next batch was not there.

    A card works on while the host waits. Two events tell for how long it stood still, and nobody waits for them: one
    after the work of a step, one when the next batch has come.
    """

    def __init__(self, event: Callable[[], Any] | None, clock: Callable[[], float] = time.monotonic) -> None:
        """event: makes one that keeps its time on the card; None for a device that does all while the host waits."""
        self._event, self._clock = event, clock
        self._seconds = self._began = 0.0
        self._launched: Any = None  # the event after the latest step
        self._open: deque[tuple[Any, Any, float]] = deque()  # both events, and the host's seconds between them

    @classmethod
    def on(cls, device: torch.device) -> Waiting:
        """For the steps of a device."""
        return cls(partial(torch.cuda.Event, enable_timing=True) if device.type == "cuda" else None)

    def begin(self) -> None:
        """The next batch is asked for."""
        self._began = self._clock()

    def end(self) -> None:
        """It has come."""
        waited = self._clock() - self._began
        if self._event is None or self._launched is None:  # before the first step a card has nothing to do either
            self._seconds += waited
            return
        come = self._event()
        come.record()
        self._open.append((self._launched, come, waited))
        self._settle()

    def step_launched(self) -> None:
        """All of a step is on its way to the device."""
        if self._event is not None:
            self._launched = self._event()
            self._launched.record()

    @property
    def seconds(self) -> float:
        """As far as it is known: a card may not have come to the latest step yet."""
        self._settle()
        return self._seconds

    def _settle(self) -> None:
        while self._open and self._open[0][1].query():
            launched, come, waited = self._open.popleft()
            # The card may have stood still before the batch was asked for, too: that is not for want of data.
            self._seconds += min(waited, launched.elapsed_time(come) / 1000)
