"""Optimizers: the libraries' own, over one group that decays and one that does not."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainkit.errors import TrainingError
from trainkit.optimizers import optimizer
from trainkit.recipe.schema import Optimizer as OptimizerSettings

Groups = list[dict[str, Any]]
Build = Callable[..., torch.optim.Optimizer]


def parameter_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> Groups:
    """Matrices decay; biases, norms and other one-dimensional parameters do not."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    decayed = [parameter for parameter in trainable if parameter.dim() >= 2]
    others = [parameter for parameter in trainable if parameter.dim() < 2]
    groups: Groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """The optimizer that the recipe names. TrainingError when it cannot be imported or refuses what it is given."""
    groups = parameter_groups(model.parameters(), settings.weight_decay)
    kind, fixed = optimizer_class(settings)
    if optimizer(settings.name).embeddings_in_32_bit:
        keep_embeddings_in_32_bit(model)
    try:
        return kind(groups, lr=settings.lr, **fixed, **settings.args)
    except (TypeError, ValueError, RuntimeError) as error:
        message = f"optimizer {settings.name} does not take what the recipe gives it: {error}"
        raise TrainingError(message, hint="see optimizer.args") from error


def optimizer_class(settings: OptimizerSettings) -> tuple[Build, dict[str, Any]]:
    """What makes the optimizer, and what the recipe's own settings say to it."""
    known = optimizer(settings.name)
    arguments: dict[str, Any] = {
        name: tuple(getattr(settings, each) for each in keys) if isinstance(keys, tuple) else getattr(settings, keys)
        for name, keys in known.arguments.items()
    }
    return imported(known.path, "optimizer.name"), arguments | dict(known.fixed)


def imported(path: str, key: str) -> Build:
    """What stands at an import path ``pkg.mod:Class``; modules in the working folder count, after all others."""
    module, _, name = path.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    # bitsandbytes complains of kernels that no optimizer uses
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise TrainingError(f"{key}: {path} cannot be imported: {error}", hint="it is read as pkg.mod:Class") from error
    made: Build = found
    return made


def keep_embeddings_in_32_bit(model: nn.Module) -> None:
    """Embeddings are rarely hit and unevenly, so 8-bit state is unstable for them (bitsandbytes' documentation)."""
    manager = imported("bitsandbytes.optim:GlobalOptimManager", "optimizer.name").get_instance()  # type: ignore[attr-defined]
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})


def forget_embeddings() -> None:
    """Let go of the models whose embeddings are kept in 32-bit: bitsandbytes would hold them for good."""
    imported("bitsandbytes.optim:GlobalOptimManager", "optimizer.name").get_instance().initialize()  # type: ignore[attr-defined]
