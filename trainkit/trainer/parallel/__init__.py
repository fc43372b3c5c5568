"""Strategies: how a model is spread over ranks. One class each, with one Protocol, in one table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from trainkit.lazy import load
from trainkit.trainer.models.base import Model
from trainkit.trainer.settings import Settings, World


class Strategy(Protocol):
    """What the loop needs of a strategy. Reducing the ranks' gradients gives their mean, not their sum."""

    model: nn.Module  # the module to call with the inputs of a batch by name

    def micro_step(self, *, last: bool) -> AbstractContextManager[object]:
        """Context of one forward and backward. Gradients are exchanged only in the last one, if the engine allows."""
        return nullcontext()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add this micro step's gradients."""

    def update(self, learning_rate: float) -> Tensor | float:
        """Clip, step and clear; returns the norm of the gradients of all ranks before clipping."""

    def abandon_step(self) -> None:
        """Discard a step that failed midway, with all optimizer state; the weights stay as the failure left them.

        Only for strategies of plain PyTorch, in trials of what fits.
        """

    def skipped_steps(self) -> int:
        """Updates that fp16 loss scaling has skipped so far."""

    def held(self) -> Mapping[str, Iterable[Tensor]]:
        """This rank's `parameters`, `gradients` and `optimizer_state`, without those in an engine's own buffers."""

    def save(self, folder: Path) -> None:
        """Write weights, optimizer state and loss scale. Called on every rank, with the same folder."""

    def save_later(self) -> Callable[..., None] | None:
        """Copy the state to host memory; what is returned writes the copy to `folder`, with the collectives of `group`.

        None if the engine can only save while training waits.
        """

    def load(self, folder: Path) -> None:
        """The inverse of :meth:`save`. Strategies of plain PyTorch read what any of them saved on any ranks."""


@dataclass(frozen=True, slots=True)
class StrategyKind:
    """A strategy whose class is not imported yet: importing DeepSpeed takes seconds."""

    place: str  # of the class
    needs_group: bool = True  # whether even one rank needs a process group
    casts: bool = False  # the weights itself, for training and evaluation alike, so that there is no autocast
    divides: bool = False  # the model over the ranks, so that none ever builds it whole
    hooks: bool = False  # modules from outside, so that torch.compile takes blocks one by one inside the hooks

    def build(self, model: Model, settings: Settings, world: World, device: torch.device) -> Strategy:
        """The strategy around a model, which is on its device, or without values beside its `slices`."""
        return cast("Strategy", load(self.place)(model, settings, world, device))


STRATEGIES: Mapping[str, StrategyKind] = {
    "single": StrategyKind("trainkit.trainer.parallel.single_and_ddp:Single", needs_group=False),
    "ddp": StrategyKind("trainkit.trainer.parallel.single_and_ddp:Ddp"),
    "fsdp": StrategyKind("trainkit.trainer.parallel.fsdp:Fsdp", casts=True, divides=True, hooks=True),
    "zero1": StrategyKind("trainkit.trainer.parallel.zero:Zero", casts=True),
    "zero2": StrategyKind("trainkit.trainer.parallel.zero:Zero", casts=True),
    "zero3": StrategyKind("trainkit.trainer.parallel.zero:Zero", casts=True, divides=True, hooks=True),
}
