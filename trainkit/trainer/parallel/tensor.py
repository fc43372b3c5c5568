"""Blocks over several ranks: each matrix in parts (Megatron-LM, Shoeybi et al. 2019, section 3), each expert on one.

Of layers that follow one another the first is divided by its outputs, attention's by heads, and the second by its
inputs: its outputs are sums over the ranks. So a block exchanges two sums forward, and two backward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.nn import functional

from trainkit.errors import TrainingError
from trainkit.trainer.models.base import Model
from trainkit.trainer.models.moe import MixtureOfExperts
from trainkit.trainer.parallel.grid import Cut


def summed(values: Tensor, group: Any) -> Tensor:
    """The sum over the ranks of a group."""
    return _there(collectives.all_reduce(values, "sum", group))


def _there(values: Tensor) -> Tensor:
    """What a collective gives, once it is there."""
    return cast("Tensor", collectives.wait_tensor(values))  # type: ignore[no-untyped-call]


class _Shared(torch.autograd.Function):
    """A tensor that each rank of a group reads for its part: its gradient is the sum of theirs."""

    @staticmethod
    def forward(context: Any, values: Tensor, group: Any) -> Tensor:
        context.group = group
        return values.view_as(values)

    @staticmethod
    def backward(context: Any, slope: Tensor) -> tuple[Tensor, None]:
        return summed(slope.contiguous(), context.group), None


class _Summed(torch.autograd.Function):
    """The sum of the ranks' tensors, which each of them goes on with: the gradient is that of each."""

    @staticmethod
    def forward(context: Any, values: Tensor, group: Any) -> Tensor:
        return summed(values.contiguous(), group)

    @staticmethod
    def backward(context: Any, slope: Tensor) -> tuple[Tensor, None]:
        return slope, None


def divide_blocks(model: Model, group: Any) -> tuple[dict[str, Cut], set[str]]:
    """Divide the blocks of a model on the meta device. TrainingError for what cannot be divided.

    Returns how each divided parameter is cut, by its name; and the whole ones that are used beside parts, whose
    gradients are parts of a sum.
    """
    plan = model.tensor_plan()
    if plan is None:
        why = "strategy.tensor: the model brings no plan by which it could be divided"
        raise TrainingError(why, hint="set strategy.tensor to 1")
    inside = {module for block in model.blocks for module in block.modules()}
    cuts: dict[str, Cut] = {}
    partial_sums: set[str] = set()
    for place, module in model.named_modules():
        name = place.rpartition(".")[2]
        if module not in inside:
            continue
        if name in plan.entries:
            module.register_forward_pre_hook(partial(_enter, group=group), with_kwargs=True)
            partial_sums |= {
                f"{place}.{key}"
                for key, _ in module.named_parameters()
                if not {*plan.columns, *plan.rows} & set(f"{place}.{key}".split("."))
            }
        if name in plan.columns:
            cut = Cut(group, 0, plan.columns[name])
            cuts |= {f"{place}.{key}": cut for key in _cut(module, cut, "weight", "bias")}
        if name in plan.rows:
            cuts |= {f"{place}.{key}": Cut(group, 1) for key in _cut(module, Cut(group, 1), "weight")}
            module.forward = partial(_sum_of_parts, module, group)
    return cuts, partial_sums


def _enter(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], group: Any) -> Any:
    """What a module reads first is shared by the ranks."""
    if given:
        return (_Shared.apply(given[0], group), *given[1:]), named  # type: ignore[no-untyped-call]
    first = next(iter(named))
    return given, {**named, first: _Shared.apply(named[first], group)}  # type: ignore[no-untyped-call]


def _sum_of_parts(layer: nn.Linear, group: Any, values: Tensor) -> Tensor:
    """The forward pass of a linear layer that is divided by its inputs; the bias is added once."""
    made = cast("Tensor", _Summed.apply(functional.linear(values, layer.weight), group))  # type: ignore[no-untyped-call]
    return made if layer.bias is None else made + layer.bias


def _cut(module: nn.Module, cut: Cut, *keys: str) -> list[str]:
    """Put parts in the place of a module's parameters, still without values; the names of those that it has."""
    done = []
    for key in keys:
        if (whole := module._parameters.get(key)) is None:
            continue
        if whole.shape[cut.dimension] % (cut.of * cut.layers):
            raise TrainingError(
                f"strategy.tensor: {tuple(whole.shape)} of a block cannot be divided into {cut.of} equal parts"
            )
        part = torch.empty(cut.shape(whole.shape), dtype=whole.dtype, device="meta")
        module._parameters[key] = nn.Parameter(part, whole.requires_grad)
        done.append(key)
    return done


def share_out_experts(model: Model, group: Any) -> dict[str, Cut]:
    """Have each rank of a group keep some of each block's experts, without values yet; how each stack is cut."""
    cuts: dict[str, Cut] = {}
    for place, module in model.named_modules():
        if isinstance(module, MixtureOfExperts):
            cut = Cut(group, 0)
            cuts |= {f"{place}.experts.{key}": cut for key in _cut(module.experts, cut, "up", "down")}
            module.on_ranks = partial(_through_ranks, module.experts, group)
    return cuts


def _through_ranks(experts: Callable[[Tensor, Tensor], Tensor], group: Any, rows: Tensor, counts: Tensor) -> Tensor:
    """Rows, sorted by expert, through experts of which each rank of a group has as many; counts: of all of them."""
    ranks = group.size()
    own = len(counts) // ranks
    # From each rank for each of this one's experts.
    come = _there(collectives.all_to_all_single(counts, None, None, group))
    sends, receives = torch.stack((counts, come)).view(2, ranks, own).sum(dim=2).tolist()
    arrived = collectives.all_to_all_single_autograd(rows, receives, sends, group)
    # They arrive by rank and then by expert.
    of = torch.arange(own, device=rows.device).repeat(ranks).repeat_interleave(come, output_size=sum(receives))
    order = of.argsort(stable=True)
    made = experts(arrived[order], come.view(ranks, own).sum(dim=0))
    returned = torch.empty_like(made).index_copy(0, order, made)
    return collectives.all_to_all_single_autograd(returned, sends, receives, group)
