"""The models that the trainer can build, by kind."""

from __future__ import annotations

from collections.abc import Callable

from trainkit.lazy import Registry
from trainkit.recipe.schema import Recipe
from trainkit.trainer.models.base import Model

# `model.kind` -> the function that builds it on a device, or divided over the ranks of a mesh.
MODELS: Registry[Callable[..., Model]] = Registry(
    {
        "gpt": "trainkit.trainer.models.gpt:build_gpt",
        "hf": "trainkit.trainer.models.hf:build_hf",
        "target": "trainkit.trainer.models.target:build_target",
    }
)


def skeleton(recipe: Recipe) -> Model:
    """A `gpt` or `hf` model of a recipe without weights: on the meta device, and nothing but a config.json is read."""
    return MODELS[recipe.model.kind](recipe, device="meta")
