"""Models that the trainer can build. A model is a module with `blocks`, called with tokens and targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from trainkit.recipe.schema import Recipe
from trainkit.train.models.gpt import Gpt, build_gpt

Model = Gpt

MODELS: Mapping[str, Callable[[Recipe], Model]] = {"gpt": build_gpt}


def count_parameters(model: nn.Module) -> int:
    """Number of trainable parameters; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
