"""Low-rank adapters (LoRA) in a model, through peft: the model stays as it is, and they train, with a head if any."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Any

from torch import nn

from trainkit.errors import TrainingError
from trainkit.recipe.schema import Peft
from trainkit.trainer.models.model import Model


def add_adapters(model: Model, settings: Peft) -> None:
    """Put adapters beside the target modules, in place, and freeze the rest but for a classifier's head.

    TrainingError if there is no target, or one of them is no module: peft would leave that out in silence.
    """
    # which peft imports, and which complains of kernels that no adapter uses
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    from peft import LoraConfig, inject_adapter_in_model

    targets = settings.target_modules or default_targets(model)
    names = [f".{name}" for name, _ in model.named_modules()]
    absent = [target for target in targets if not any(name.endswith(f".{target}") for name in names)]
    if absent:
        raise _no_target(absent, model)
    head = set(model.head())
    whole = [name for name, each in model.named_modules() if head.intersection(each.parameters(recurse=False))]
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=targets,
        exclude_modules=whole or None,  # whose weights train themselves
        use_rslora=settings.rslora,
        use_dora=settings.dora,
    )
    try:
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # that GPT-2's layers are transposed
            inject_adapter_in_model(config, model)
    except ValueError as error:
        raise _no_target(targets, model) from error
    for parameter in model.head():
        parameter.requires_grad_(True)
    model.stochastic = model.stochastic or settings.dropout > 0


def _no_target(names: Sequence[str], model: Model) -> TrainingError:
    return TrainingError(
        f"peft.target_modules: the model has no {', '.join(names)} that peft can adapt",
        hint=f"it has {', '.join(linear_layers(model))}",
    )


def default_targets(model: Model) -> list[str]:
    """The linear layers of the blocks: by the last parts of their names, or whole names where others end so too."""
    short, named = linear_layers(model), list(model.named_modules())
    if all(_linear(each) for name, each in named if name.rpartition(".")[2] in short):
        return short
    inside = {each for block in model.blocks for each in block.modules() if _linear(each)}
    return [name for name, each in named if each in inside]


def linear_layers(model: Model) -> list[str]:
    """The last parts of the names of the linear layers inside the model's blocks."""
    found = (name.rpartition(".")[2] for block in model.blocks for name, each in block.named_modules() if _linear(each))
    return sorted(set(found))


def _linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"  # GPT-2's name for it


def merge_adapters(model: nn.Module) -> None:
    """Add the adapters to the weights beside which they stand, and take them out."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted: list[tuple[str, Any]] = [
        (name, module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)
    ]
    for name, module in adapted:
        module.merge()
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, module.get_base_layer())
