"""Strategies: how one model is spread over ranks. One class each behind one Protocol, all in one dict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trainkit.trainer.models import Model
from trainkit.trainer.settings import Settings, World


class Strategy(Protocol):
    """What the loop needs of a strategy.

    model: what the loop calls with the inputs of a batch by name.
    gradient_divisor: by how much reducing divides the sum of the ranks' gradients; the loss is multiplied by it
        beforehand, so that the update is the mean over the tokens of the global batch.
    """

    model: nn.Module
    gradient_divisor: int

    def micro_step(self, *, last: bool) -> AbstractContextManager[object]:
        """Context of one forward and backward. Gradients travel in the last one only, where the engine allows."""

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add this micro step's gradients."""

    def update(self, learning_rate: float) -> Tensor | float:
        """Clip, step and clear; returns the norm of the gradients of all ranks before clipping."""

    def skipped_steps(self) -> int:
        """Updates that fp16 loss scaling has skipped so far."""

    def held(self) -> Mapping[str, Iterable[Tensor]]:
        """This rank's `parameters`, `gradients` and `optimizer_state`; what an engine hides in buffers is left out."""

    def save(self, folder: Path) -> None:
        """Write weights, optimizer state and loss scale. Called on every rank, with the same folder."""

    def save_later(self) -> Callable[[Path, Any], None]:
        """Copy the state to host memory; what is returned writes the copy, with a process group's collectives.

        TrainingError where the engine can only save while training waits.
        """

    def load(self, folder: Path) -> None:
        """The inverse of :meth:`save`. Strategies of plain PyTorch read what any of them saved on any ranks."""


# Modules are imported by need: DeepSpeed's import alone takes seconds.


def _single(model: Model, settings: Settings, world: World, device: torch.device) -> Strategy:
    from trainkit.trainer.parallel.native import Single

    return Single(model.to(device), settings, device)


def _ddp(model: Model, settings: Settings, world: World, device: torch.device) -> Strategy:
    from trainkit.trainer.parallel.ddp import Ddp

    return Ddp(model.to(device), settings, world, device)


def _fsdp(model: Model, settings: Settings, world: World, device: torch.device) -> Strategy:
    from trainkit.trainer.parallel.fsdp import Fsdp

    return Fsdp(model, settings, world, device)


def _zero(model: Model, settings: Settings, world: World, device: torch.device) -> Strategy:
    from trainkit.trainer.parallel.zero import Zero

    return Zero(model, settings, world, device)


STRATEGIES: Mapping[str, Callable[[Model, Settings, World, torch.device], Strategy]] = {
    "single": _single,
    "ddp": _ddp,
    "fsdp": _fsdp,
    "zero1": _zero,
    "zero2": _zero,
    "zero3": _zero,
}

# These want a process group even for one rank.
NEED_PROCESS_GROUP = frozenset({"ddp", "fsdp", "zero1", "zero2", "zero3"})
