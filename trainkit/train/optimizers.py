"""Optimizers: PyTorch's own, over one group that decays and one that does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from trainkit.recipe.schema import Optimizer as OptimizerSettings

Groups = list[dict[str, Any]]


def parameter_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> Groups:
    """Matrices decay; biases, norms and other one-dimensional parameters do not."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    decayed = [parameter for parameter in trainable if parameter.dim() >= 2]
    others = [parameter for parameter in trainable if parameter.dim() < 2]
    groups: Groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _adamw(**implementation: bool) -> Callable[[Groups, OptimizerSettings], torch.optim.Optimizer]:
    def build(groups: Groups, settings: OptimizerSettings) -> torch.optim.Optimizer:
        betas = (settings.beta1, settings.beta2)
        return torch.optim.AdamW(groups, lr=settings.lr, betas=betas, eps=settings.eps, **implementation)

    return build


def _sgd(groups: Groups, settings: OptimizerSettings) -> torch.optim.Optimizer:
    # torch's SGD adds the decay to the gradient, before momentum: it is not decoupled as AdamW's is
    return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.beta1)


OPTIMIZERS: Mapping[str, Callable[[Groups, OptimizerSettings], torch.optim.Optimizer]] = {
    "adamw_torch": _adamw(),
    "adamw_torch_fused": _adamw(fused=True),
    "adamw_torch_foreach": _adamw(foreach=True),
    "sgd": _sgd,
}


def build_optimizer(parameters: Iterable[nn.Parameter], settings: OptimizerSettings) -> torch.optim.Optimizer:
    """The optimizer that the recipe names."""
    return OPTIMIZERS[settings.name](parameter_groups(parameters, settings.weight_decay), settings)
