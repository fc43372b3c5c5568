"""What a run has before its model is made."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainkit.trainer.data.sampler import Order
from trainkit.trainer.data.source import Source
from trainkit.trainer.settings import Settings, World


@dataclass(frozen=True, slots=True)
class Outset:
    """Settings, data and device of one rank."""

    settings: Settings
    source: Source
    order: Order
    world: World
    device: torch.device
