"""Models that the trainer can build, by their kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from trainkit.recipe.schema import Recipe
from trainkit.trainer.models.gpt import build_gpt
from trainkit.trainer.models.hf import build_hf
from trainkit.trainer.models.model import Model as Model
from trainkit.trainer.models.target import build_target

# Each builds on the CPU, with weights drawn from torch's default generator or read from files.
MODELS: Mapping[str, Callable[[Recipe], Model]] = {"gpt": build_gpt, "hf": build_hf, "target": build_target}


def count_parameters(model: nn.Module) -> int:
    """Number of trainable parameters; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
