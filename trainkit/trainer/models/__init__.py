"""Models that the trainer can build, by their kind."""

from __future__ import annotations

from collections.abc import Callable

from trainkit.lazy import Registry
from trainkit.recipe.schema import Recipe
from trainkit.trainer.models.base import Model

# `model.kind` -> what builds it on the CPU, with weights drawn from torch's default generator or read from files.
MODELS: Registry[Callable[[Recipe], Model]] = Registry(
    {
        "gpt": "trainkit.trainer.models.gpt:build_gpt",
        "hf": "trainkit.trainer.models.hf:build_hf",
        "target": "trainkit.trainer.models.target:build_target",
    }
)
