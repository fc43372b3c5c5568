"""Mixtures of experts among the models of transformers: the loss that keeps their routers balanced, and their use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trainkit.errors import TrainingError

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k")


@dataclass(frozen=True, slots=True)
class Routers:
    """What a configuration says of its routers. coefficient: weight of their loss."""

    experts: int
    top_k: int
    coefficient: float


def routers_of(config: Any) -> Routers | None:
    """The routers of a model whose loss is wanted, which `output_router_logits` says as in transformers; else None.

    TrainingError for an architecture that does not say what its routers' loss is.
    """
    if not getattr(config, "output_router_logits", False):
        return None
    found = [
        next((value for name in names if (value := getattr(config, name, None))), None) for names in (_EXPERTS, _CHOSEN)
    ]
    experts, top_k = found
    coefficient = getattr(config, "router_aux_loss_coef", None)
    if not isinstance(experts, int) or not isinstance(top_k, int) or coefficient is None:
        raise TrainingError(
            f"model.config.output_router_logits: how {config.model_type} judges its routers is not known here",
            hint="leave it out, and train without the routers' loss",
        )
    return Routers(experts, top_k, float(coefficient))


def routers_loss(routers: Routers, outputs: Any, targets: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """The routers' loss, summed over counted targets, and how many tokens each expert of each block got.

    targets: (batch, sequence). The formula is that of transformers (Switch Transformers, equations 4 to 6, over all
    blocks at once), for each sample alone and weighed by its counted targets, so that it does not depend on how samples
    are spread over micro batches and ranks; padding behind the last target is left out. The second result has shape
    (blocks, experts).
    """
    given = tuple(each for each in getattr(outputs, "router_logits", None) or () if each is not None)
    if not given or any(each.shape[-1] != routers.experts for each in given):
        raise TrainingError(
            "model.config.output_router_logits: the model does not give what its routers computed",
            hint="leave it out, and train without the routers' loss",
        )
    counted = targets != ignored
    inside = (counted.flip(1).cumsum(1).flip(1) > 0).float()  # (batch, sequence)
    shape = (len(given), *targets.shape, routers.experts)
    probabilities = torch.stack([each.float() for each in given]).view(shape).softmax(dim=-1)
    chosen = probabilities.topk(routers.top_k, dim=-1).indices
    assigned = functional.one_hot(chosen, routers.experts).sum(dim=-2)  # (blocks, batch, sequence, experts)
    tokens = inside.sum(dim=1).clamp(min=1)[:, None] * len(given)
    share = torch.einsum("lbse,bs->be", assigned.float(), inside) / tokens
    mean = torch.einsum("lbse,bs->be", probabilities, inside) / tokens
    balance = routers.experts * (share * mean).sum(dim=-1)  # (batch,)
    return routers.coefficient * (balance * counted.sum(dim=1)).sum(), assigned.sum(dim=(1, 2))
