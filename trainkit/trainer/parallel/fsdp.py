"""Parameters, gradients and optimizer state sharded over ranks (FSDP2, `fully_shard`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainkit.errors import TrainingError
from trainkit.recipe.schema import Fsdp as FsdpSettings
from trainkit.trainer.checkpoint.pieces import Box, Pieces
from trainkit.trainer.metrics.memory_breakdown import local
from trainkit.trainer.models.base import Model, entries
from trainkit.trainer.models.moe import Experts
from trainkit.trainer.models.quantized import is_quantized, quantize_later
from trainkit.trainer.models.sample_parts import SampleParts
from trainkit.trainer.models.weights import Slices, as_slice, gathered, slice_in
from trainkit.trainer.optim import DTYPES
from trainkit.trainer.parallel.grid import Cut, Grid
from trainkit.trainer.parallel.single_and_ddp import Engine
from trainkit.trainer.parallel.tensor import divide_blocks, share_out_experts
from trainkit.trainer.settings import Settings, World


class Fsdp(Engine):
    """Every unit's parameters are gathered just before use; each rank keeps and updates its shard."""

    def __init__(self, model: Model, settings: Settings, world: World, device: torch.device) -> None:
        asked = cast("FsdpSettings", settings.recipe.strategy)
        grid: Grid | None = world.grid
        options: dict[str, Any] = {"mesh": grid.shards if grid else init_device_mesh(device.type, (world.size,))}
        if settings.dtype != "fp32":
            # Weights that are in the format of the computation need no casting, only their gradients a wider sum: one
            # over many ranks loses digits in 16 bits.
            cast_to = DTYPES[settings.dtype] if settings.recipe.precision.weights == "fp32" else None
            sum_in = torch.float32 if asked.reduce_dtype == "fp32" else None
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=cast_to, reduce_dtype=sum_in)
        if asked.offload:
            # Page-locked memory is only available, and useful, with CUDA.
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
        slices = model.slices
        named = {name: each for name, each in model.named_parameters() if slices is not None and each in slices}
        self._cuts, sums = divided(model, grid) if grid else ({}, frozenset())
        # Full sharding gathers again for the backward pass; `shard_grad_op` keeps what it has gathered.
        frees = asked.sharding in ("full_shard", "hybrid_shard")
        units = [*WRAPPING[asked.auto_wrap](model, asked)]
        if grid and grid.experts:
            for experts in [each for each in model.modules() if isinstance(each, Experts)]:
                apart = {**options, "mesh": grid.expert_shards}
                fully_shard(experts, reshard_after_forward=frees, shard_placement_fn=_by_width(grid), **apart)
        for unit in units:
            if not isinstance(unit, FSDPModule):  # as experts are by now
                fully_shard(unit, reshard_after_forward=frees, **options)
        if asked.prefetch > 1:  # 1 is what FSDP2 does by itself
            gather_ahead(model, asked.prefetch)
        if "mp_policy" in options:  # what leaves the model is fp32; what passes between blocks stays in their format
            options["mp_policy"] = dataclasses.replace(options["mp_policy"], output_dtype=torch.float32)
        # Last: the outermost unit takes what the units inside have left (fully_shard: bottom-up).
        self._sharded: FSDPModule = fully_shard(model, **options)
        if hasattr(model, "write"):  # of the outermost unit the weights are gathered for it, too
            register_fsdp_forward_method(model, "write")
        if slices is not None:
            place(model, slices, named, torch.device("cpu") if asked.offload else device, self._cuts)
        self._each = asked.reduce_gradients == "each_micro_step"
        super().__init__(model, settings, device)
        self._grid, self._alike, self._sums = grid, list[nn.Parameter](), list[nn.Parameter]()
        if grid:
            self._sort_parameters(grid, sums)

    def _sort_parameters(self, grid: Grid, sums: Set[str]) -> None:
        """By what the ranks have of them: parts of matrices, experts, or the same."""
        trained = {name: each for name, each in self.model.named_parameters() if each.requires_grad}
        cut = {name: self._cuts[name].group for name in trained.keys() & self._cuts.keys()}
        stacks, parts = (
            [each for name, each in trained.items() if group is not None and cut.get(name) is group]
            for group in (grid.experts, grid.tensor)
        )
        apart = {*stacks, *parts}
        same = [each for each in self._parameters if each not in apart]
        self._experts = stacks
        if grid.tensor:
            self._sums = [each for name, each in trained.items() if name in sums]
            self._alike = [each for each in self._parameters if each not in {*parts, *self._sums}]
        groups = ((same, None), (parts, grid.tensor), (stacks, grid.experts))
        self._divided = [(parameters, group) for parameters, group in groups if parameters]

    def update(self, learning_rate: float) -> Tensor:
        if self._grid:
            self._exchange_gradients(self._grid)
        return super().update(learning_rate)

    @torch.no_grad()
    def _exchange_gradients(self, grid: Grid) -> None:
        """What fully_shard leaves to do: it knows of one dimension of ranks, and of that of copies."""
        for parameter in self._experts:
            # Each is the sum over the samples of all ranks that share out experts, and a mean over the others.
            if parameter.grad is not None:
                local(parameter.grad).div_(grid.sizes.experts)
        if grid.tensor:
            _reduce([each.grad for each in self._sums if each.grad is not None], grid.tensor, 1)
            # Equal but for operators that add up in any order, of which the ranks would drift apart.
            _reduce([each.grad for each in self._alike if each.grad is not None], grid.tensor, grid.sizes.tensor)

    def _in_file(self, state: dict[str, Any]) -> dict[str, Any]:
        if not self._cuts:
            return state
        model = {name: self._piece(name, each) for name, each in state["model"].items()}
        kept = state["optimizer"].get("state", {})
        kept = {name: {key: self._piece(name, each) for key, each in values.items()} for name, values in kept.items()}
        return {**state, "model": model, "optimizer": {**state["optimizer"], "state": kept}}

    def _piece(self, name: str, value: Any) -> Any:
        """Of a parameter's part, or of a tensor of its optimizer's, the boxes of the whole."""
        cut = self._cuts.get(name)
        if cut is None or not isinstance(value, DTensor):
            return value
        whole = list(value.shape)
        whole[cut.dimension] *= cut.of
        return Pieces.of(whole, value.dtype, [*boxes_of_cut(whole, value, cut)])

    def micro_step(self, *, last: bool) -> AbstractContextManager[object]:
        """Gradients are reduced and scattered in each micro step, or, whole on each rank until then, in the last."""
        self._sharded.set_requires_gradient_sync(last or self._each)
        return nullcontext()


def divided(model: Model, grid: Grid) -> tuple[dict[str, Cut], Set[str]]:
    """Have a rank compute its part of a model's blocks and samples. TrainingError where that is not known.

    Returns how parameters are cut, and which are whole but used for a part alone (:func:`divide_blocks`).
    """
    if grid.sizes.alike > 1 and model.stochastic:
        why = "the model draws dropout masks, which parts of heads or of samples would draw otherwise"
        raise TrainingError(f"strategy.tensor, strategy.context: {why}", hint="set its dropout to 0")
    cuts, sums = divide_blocks(model, grid.tensor) if grid.tensor else ({}, set())
    if grid.experts:
        cuts |= share_out_experts(model, grid.experts)
    if grid.context:
        model.divide_samples(SampleParts(grid.context))
    return cuts, sums


def gather_ahead(model: nn.Module, count: int) -> None:
    """In the order of the forward pass: the shards of so many following units are gathered while one computes."""
    every: list[Any] = [unit for unit in model.modules() if isinstance(unit, FSDPModule)]
    # Experts gather nothing ahead: theirs are gathered with their block's, which may be computed again in backward.
    chain = [unit for unit in every if not isinstance(unit, Experts)]
    for index, unit in enumerate(chain):
        own = [each for each in unit.modules() if isinstance(each, Experts) and each in every]
        unit.set_modules_to_forward_prefetch([*own, *chain[index + 1 : index + 1 + count]])
        unit.set_modules_to_backward_prefetch([*own, *chain[max(0, index - count) : index][::-1]])


def _layout(tensor: Any) -> tuple[Any, ...]:
    """All that decides which values a rank has."""
    return tensor.shape, tensor.placements, tensor.device_mesh.shape


def _by_width(grid: Grid) -> Callable[[nn.Parameter], Shard | None]:
    """Experts are sharded by their width where it is divisible: a rank may hold fewer of them than there are shards."""
    ranks = grid.expert_shards.size(-1)
    return lambda stack: Shard(1) if stack.shape[1] % ranks == 0 else None


def _reduce(gradients: Sequence[Tensor], group: Any, divisor: int) -> None:
    """Sums over a group, divided; small ones together, in one exchange."""
    few = [local(each) for each in gradients if each.dim() < 2]
    if few:
        flat = torch.cat([each.flatten() for each in few])
        dist.all_reduce(flat, group=group)
        for each, reduced in zip(few, torch.split(flat.div_(divisor), [each.numel() for each in few]), strict=True):
            each.copy_(reduced.view_as(each))
    for each in (local(gradient) for gradient in gradients if gradient.dim() >= 2):
        dist.all_reduce(each, group=group)
        each.div_(divisor)


def boxes_of_cut(whole: Sequence[int], shard: Any, cut: Cut) -> Iterator[Box]:
    """The boxes of a whole tensor that this rank has of a part of it, which is sharded besides; views of the shard."""
    shape, starts = compute_local_shape_and_global_offset(shard.shape, shard.device_mesh, shard.placements)
    values, along = local(shard), cut.dimension
    if not values.numel():
        return
    for begin, place, size in cut.regions(whole[along], starts[along], shape[along]):
        at = list(starts)
        at[along] = place
        yield tuple(at), values.narrow(along, begin, size)


@torch.no_grad()
def place(
    model: Model,
    slices: Slices,
    named: Mapping[str, nn.Parameter],
    device: torch.device,
    cuts: Mapping[str, Cut],
) -> None:
    """Give the shards of a model without values theirs, on a device, one parameter after the other."""
    holders: dict[nn.Parameter, list[tuple[Any, str]]] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                holders.setdefault(parameter, []).append((module, key))
    shards = dict(model.named_parameters())
    for name, parameter in named.items():
        shard: Any = shards[name]
        (module, _), *_ = places = holders[shard]
        given, cut = slices.take(parameter), cuts.get(name)
        if cut is None and _layout(given) == _layout(shard):
            values = given._local_tensor.to(device)
        else:  # another mesh, or another tensor: it is put together, and cut again
            whole = gathered(given, shard.device_mesh.device_type)
            if is_quantized(module):
                whole = quantize_later(module, whole, whole.device)
            if cut is None:
                values = slice_in(whole, shard).to(device, copy=True)
            else:
                values = torch.empty(local(shard).shape, dtype=whole.dtype, device=device)
                for at, box in boxes_of_cut(whole.shape, as_slice(values, shard), cut):
                    box.copy_(
                        whole[tuple(slice(start, start + size) for start, size in zip(at, box.shape, strict=True))]
                    )
        made = nn.Parameter(as_slice(values.contiguous(), shard), shard.requires_grad)
        for module, key in places:
            module._parameters[key] = made


def _by_class(model: Model, asked: FsdpSettings) -> Iterator[nn.Module]:
    """Transformer blocks, or the classes that the recipe names. Tied modules stay in the outer unit."""
    if not asked.wrap_classes:
        yield from model.blocks
        return
    known = {type(module).__name__ for module in model.modules()}
    unknown = [name for name in asked.wrap_classes if name not in known]
    if unknown:
        raise TrainingError(
            f"strategy.wrap_classes: the model has no module of class {', '.join(unknown)}",
            hint=f"it has {', '.join(sorted(known))}",
        )
    wrapped = [
        module for module in model.modules() if type(module).__name__ in asked.wrap_classes and module not in model.tied
    ]
    split = sorted({type(module).__name__ for module in wrapped if splits_tied(model, module)})
    if split:
        raise TrainingError(
            f"strategy.wrap_classes: {', '.join(split)} holds a weight that a module outside it shares",
            hint="name smaller modules; what is tied stays in the outer unit",
        )
    yield from reversed(wrapped)  # inner modules first: a unit holds what its own units leave


def splits_tied(model: Model, module: nn.Module) -> bool:
    """Whether a module contains only some of the modules that share weights: one unit must contain all of them."""
    inside = set(module.modules())
    held = [each for each in model.tied if each in inside]
    return 0 < len(held) < len(model.tied)


def _by_size(model: Model, asked: FsdpSettings) -> Iterator[nn.Module]:
    """Innermost modules that hold at least `min_params` parameters outside units made before; tied ones stay out."""
    taken: set[nn.Parameter] = set()
    candidates = [module for module in list(model.modules())[1:] if not isinstance(module, nn.ModuleList)]
    for module in reversed(candidates):
        own = {parameter for parameter in module.parameters() if parameter not in taken}
        tied = module in model.tied or splits_tied(model, module)
        if sum(entries(parameter) for parameter in own) >= asked.min_params and not tied:
            taken |= own
            yield module


WRAPPING: Mapping[str, Callable[[Model, FsdpSettings], Iterator[nn.Module]]] = {
    "transformer": _by_class,
    "size": _by_size,
    "none": lambda model, asked: iter(()),
}
