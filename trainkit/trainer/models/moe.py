"""Mixture of experts: each token's feed-forward layer is a few of many, chosen by a router that is trained with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainkit.data.encode import IGNORE_INDEX
from trainkit.errors import TrainingError
from trainkit.recipe.schema import Moe
from trainkit.trainer.models.losses import in_32_bits

# Plain tuples: the hooks of FSDP, DDP and ZeRO look for tensors in these, not in classes of ours.
Routing = Sequence[Tensor]  # balance loss (batch,), z-loss (batch, sequence), tokens of each expert (experts,)
Routed = tuple[Tensor, Tensor, Tensor, Tensor]  # the output first


class Experts(nn.Module):
    """Feed-forward layers without biases, in one stack: an expert without tokens has a gradient too."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(experts, width, 4 * width))
        self.down = nn.Parameter(torch.empty(experts, 4 * width, width))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """x: (rows, width), sorted by expert; counts: rows of each expert."""
        # `tolist` waits for the device: the rows of each expert are shapes, which only the host can know.
        shares = torch.split(x, even(x.shape[0], len(counts)) if counts.is_meta else counts.tolist())
        outputs = [
            functional.gelu(share @ up) @ down for share, up, down in zip(shares, self.up, self.down, strict=True)
        ]
        return torch.cat(outputs)


def even(rows: int, experts: int) -> list[int]:
    """Rows of each expert where they are routed evenly, as in a trace, which knows no values."""
    return [rows // experts + (number < rows % experts) for number in range(experts)]


class MixtureOfExperts(nn.Module):
    """The top-k experts of every token, weighted by the router; no token is ever dropped."""

    def __init__(self, width: int, settings: Moe) -> None:
        super().__init__()
        self.top_k = settings.top_k
        self.router = nn.Linear(width, settings.experts, bias=False)
        self.experts = Experts(settings.experts, width)
        self.on_ranks: Callable[[Tensor, Tensor], Tensor] | None = None  # in place of `experts`, where others have some

    def forward(self, x: Tensor) -> Routed:
        """(batch, sequence, width) -> the same shape, and what :data:`Routing` holds."""
        logits = in_32_bits(self.router(x))  # the softmax over experts is unstable in 16 bits (Switch, section 2.4)
        probabilities = logits.softmax(dim=-1)
        weights, chosen = probabilities.topk(self.top_k, dim=-1)
        # The one weight of top-1 stays as it is (Switch): divided by itself, it would teach the router nothing.
        if self.top_k > 1:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        assigned = functional.one_hot(chosen, logits.shape[-1]).sum(dim=2)  # (batch, sequence, experts)
        load = assigned.sum(dim=(0, 1))
        # Sorted by expert, so that each computes its tokens in one product; `index_add` puts them back and adds up.
        order = chosen.flatten().argsort(stable=True)
        rows, flat = order // self.top_k, x.flatten(0, 1)
        outputs = (self.on_ranks or self.experts)(flat[rows], load) * weights.flatten()[order, None]
        mixed = torch.zeros_like(flat).index_add(0, rows, outputs.to(x.dtype))
        return mixed.view_as(x), balance_loss(probabilities, assigned), z_loss(logits), load


def balance_loss(probabilities: Tensor, assigned: Tensor) -> Tensor:
    """How unevenly each sample's tokens fall on the experts: 1 when even, up to experts / top_k (batch,)."""
    # experts x sum over experts of (share of tokens) x (mean probability): Switch Transformers, equation 4 (Fedus et
    # al. 2021), over a sequence instead of a batch (DeepSeek-V3, equation 17), so that it is a sum over samples and
    # does not depend on how they are spread over micro batches and ranks.
    experts = probabilities.shape[-1]
    share = assigned.float().mean(dim=1)
    share = share / share.sum(dim=-1, keepdim=True)
    return experts * (share * probabilities.mean(dim=1)).sum(dim=-1)


def z_loss(logits: Tensor) -> Tensor:
    """Squared log of the sum of exponentials, to keep logits small: ST-MoE, equation 5 (Zoph et al. 2022)."""
    return logits.logsumexp(dim=-1).square()


def auxiliary_loss(routings: Sequence[Routing], targets: Tensor, settings: Moe) -> Tensor:
    """The routers' losses of all blocks, summed over counted tokens as the loss of the targets is."""
    counted = (targets != IGNORE_INDEX).float()
    balance = torch.stack([balance for balance, _, _ in routings]).sum(dim=0)
    router_z = torch.stack([router_z for _, router_z, _ in routings]).sum(dim=0)
    # A sample's balance loss weighs as many as its counted tokens.
    return settings.balance_coef * (balance * counted.sum(dim=1)).sum() + settings.z_coef * (router_z * counted).sum()


# transformers has no common names for these settings.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k")


@dataclass(frozen=True, slots=True)
class Routers:
    """The routers of a configuration. coefficient: weight of their loss."""

    experts: int
    top_k: int
    coefficient: float


def routers_of(config: Any) -> Routers | None:
    """The routers of a model that trains with their loss, else None. TrainingError where their loss is not known."""
    # transformers' own switch.
    if not getattr(config, "output_router_logits", False):
        return None
    experts, top_k = (
        next((value for name in names if (value := getattr(config, name, None))), None) for names in (_EXPERTS, _CHOSEN)
    )
    coefficient = getattr(config, "router_aux_loss_coef", None)
    if not isinstance(experts, int) or not isinstance(top_k, int) or coefficient is None:
        raise TrainingError(
            f"model.config.output_router_logits: the loss of {config.model_type}'s routers is not known here",
            hint="leave it out, and train without the routers' loss",
        )
    return Routers(experts, top_k, float(coefficient))


def routers_loss(routers: Routers, outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The routers' loss, summed over counted targets (batch, sequence), and the tokens of each (blocks, experts)."""
    # The formula is that of transformers (Switch Transformers, equations 4 to 6, over all blocks at once), for each
    # sample alone and weighed by its counted targets, so that it does not depend on how samples are spread over micro
    # batches and ranks; padding behind the last target is left out.
    given = tuple(each for each in getattr(outputs, "router_logits", None) or () if each is not None)
    if not given or any(each.shape[-1] != routers.experts for each in given):
        raise TrainingError(
            "model.config.output_router_logits: the model does not give what its routers computed",
            hint="leave it out, and train without the routers' loss",
        )
    counted = targets != IGNORE_INDEX
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
