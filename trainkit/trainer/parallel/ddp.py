"""A full replica on each rank; gradients are averaged (DistributedDataParallel)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
from torch.nn.parallel import DistributedDataParallel

from trainkit.recipe.schema import Ddp as DdpSettings
from trainkit.trainer.models.base import Model
from trainkit.trainer.parallel.native import Engine
from trainkit.trainer.settings import Settings, World


class Ddp(Engine):
    """DistributedDataParallel, with one all-reduce for each optimizer step."""

    def __init__(self, model: Model, settings: Settings, world: World, device: torch.device) -> None:
        asked = cast("DdpSettings", settings.recipe.strategy)
        self._replica = DistributedDataParallel(
            model.to(device),
            device_ids=[device.index] if device.type == "cuda" else None,
            bucket_cap_mb=asked.bucket_mb,
            find_unused_parameters=asked.find_unused_parameters,
            gradient_as_bucket_view=True,  # gradients are not held twice
        )
        super().__init__(self._replica, settings, device)

    def micro_step(self, *, last: bool) -> AbstractContextManager[object]:
        """Gradients are averaged in the last micro step only."""
        return nullcontext() if last else self._replica.no_sync()
