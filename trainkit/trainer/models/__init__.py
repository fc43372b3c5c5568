"""Models that the trainer can build, by their kind."""

from __future__ import annotations

from collections.abc import Callable

from trainkit.lazy import Registry
from trainkit.trainer.models.base import Model

# `model.kind` -> what builds it on the CPU, with weights drawn from torch's default generator or read from files. What
# can quantise takes the device to do it on, besides.
MODELS: Registry[Callable[..., Model]] = Registry(
    {
        "gpt": "trainkit.trainer.models.gpt:build_gpt",
        "hf": "trainkit.trainer.models.hf:build_hf",
        "target": "trainkit.trainer.models.target:build_target",
    }
)
