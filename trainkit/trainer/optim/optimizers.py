"""Optimizers: the libraries' own, over one group that decays and one that does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trainkit.errors import TrainingError
from trainkit.optimizers import optimizer
from trainkit.recipe.schema import Optimizer as OptimizerSettings
from trainkit.trainer.user_code import imported

Groups = list[dict[str, Any]]
IMPLEMENTATIONS = {"fused", "foreach", "triton"}  # arguments of which one excludes the others


def parameter_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> Groups:
    """Matrices decay; biases, norms and other one-dimensional parameters do not."""
    # Gains of norms would decay towards 0, which changes their scale and regularises nothing.
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    decayed = [parameter for parameter in trainable if parameter.dim() >= 2]
    others = [parameter for parameter in trainable if parameter.dim() < 2]
    groups: Groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """The optimizer that the recipe names. TrainingError when it cannot be imported or refuses what it is given."""
    groups = parameter_groups(model.parameters(), settings.weight_decay)
    make, arguments = optimizer_class(settings)
    parameters = [parameter for group in groups for parameter in group["params"]]
    devices = {parameter.device.type for parameter in parameters}
    if len(devices) == 1 and not IMPLEMENTATIONS & settings.args.keys():
        arguments |= optimizer(settings.name).fixed_on.get(devices.pop(), {})  # of offloaded shards the CPU's
        if any(isinstance(parameter, DTensor) for parameter in parameters):
            arguments |= optimizer(settings.name).fixed_sharded
    if optimizer(settings.name).embeddings_in_32_bit:
        # Rarely hit and unevenly, so that 8-bit state is unstable for them (bitsandbytes' documentation).
        for module in [each for each in model.modules() if isinstance(each, nn.Embedding)]:
            _bitsandbytes_manager().register_module_override(module, "weight", {"optim_bits": 32})
    try:
        made: torch.optim.Optimizer = make(groups, lr=settings.lr, **arguments, **settings.args)
    except (TypeError, ValueError, RuntimeError) as error:
        message = f"optimizer {settings.name} does not take what the recipe gives it: {error}"
        raise TrainingError(message, hint="see optimizer.args") from error
    return made


def optimizer_class(settings: OptimizerSettings) -> tuple[Callable[..., Any], dict[str, Any]]:
    """What makes the optimizer, and the arguments that the recipe's own settings are to it."""
    known = optimizer(settings.name)
    arguments: dict[str, Any] = {
        name: tuple(getattr(settings, each) for each in keys) if isinstance(keys, tuple) else getattr(settings, keys)
        for name, keys in known.arguments.items()
    }
    return imported(known.path, "optimizer.name"), arguments | dict(known.fixed)


def forget_embeddings() -> None:
    """Let go of the models whose embeddings are kept in 32-bit: bitsandbytes would hold them for good."""
    _bitsandbytes_manager().initialize()


def _bitsandbytes_manager() -> Any:
    return imported("bitsandbytes.optim:GlobalOptimManager", "optimizer.name").get_instance()  # type: ignore[attr-defined]
