"""One process, one device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from trainkit.trainer.models import Model
from trainkit.trainer.parallel.native import Engine
from trainkit.trainer.settings import Settings


class Single(Engine):
    """The model as it is."""

    gradient_divisor = 1

    def __init__(self, model: Model, settings: Settings, device: torch.device) -> None:
        super().__init__(model, settings, device)

    def micro_step(self, *, last: bool) -> AbstractContextManager[object]:
        """Nothing travels."""
        return nullcontext()
