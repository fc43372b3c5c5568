"""Parameters, gradients and optimizer state sharded over ranks (FSDP2, `fully_shard`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from trainkit.errors import TrainingError
from trainkit.recipe.schema import Fsdp as FsdpSettings
from trainkit.trainer.models.base import Model, entries
from trainkit.trainer.models.quantized import is_quantized, quantize_later
from trainkit.trainer.models.weights import Slices, as_slice, gathered, slice_in
from trainkit.trainer.optim import DTYPES
from trainkit.trainer.parallel.single_and_ddp import Engine
from trainkit.trainer.settings import Settings, World


class Fsdp(Engine):
    """Every unit's parameters are gathered just before use; each rank keeps and updates its shard."""

    def __init__(self, model: Model, settings: Settings, world: World, device: torch.device) -> None:
        asked = cast("FsdpSettings", settings.recipe.strategy)
        options: dict[str, Any] = {"mesh": init_device_mesh(device.type, (world.size,))}
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
        # Full sharding gathers again for the backward pass; `shard_grad_op` keeps what it has gathered.
        for unit in WRAPPING[asked.auto_wrap](model, asked):
            fully_shard(unit, reshard_after_forward=asked.sharding == "full_shard", **options)
        if asked.prefetch > 1:  # 1 is what FSDP2 does by itself
            # In the order of the forward pass: the next units' shards are gathered while one computes.
            units: list[Any] = [unit for unit in model.modules() if isinstance(unit, FSDPModule)]
            for index, unit in enumerate(units):
                unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + asked.prefetch])
                unit.set_modules_to_backward_prefetch(units[max(0, index - asked.prefetch) : index][::-1])
        if "mp_policy" in options:  # what leaves the model is fp32; what passes between blocks stays in their format
            options["mp_policy"] = dataclasses.replace(options["mp_policy"], output_dtype=torch.float32)
        # Last: the outermost unit takes what the units inside have left (fully_shard: bottom-up).
        self._sharded: FSDPModule = fully_shard(model, **options)
        if hasattr(model, "write"):  # of the outermost unit the weights are gathered for it, too
            register_fsdp_forward_method(model, "write")
        if slices is not None:
            place(model, slices, named, torch.device("cpu") if asked.offload else device)
        self._each = asked.reduce_gradients == "each_micro_step"
        super().__init__(model, settings, device)

    def micro_step(self, *, last: bool) -> AbstractContextManager[object]:
        """Gradients are reduced and scattered in each micro step, or, whole on each rank until then, in the last."""
        self._sharded.set_requires_gradient_sync(last or self._each)
        return nullcontext()


@torch.no_grad()
def place(model: Model, slices: Slices, named: Mapping[str, nn.Parameter], device: torch.device) -> None:
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
        given = slices.take(parameter)
        if (given.shape, given.placements) == (shard.shape, shard.placements) and shard.device_mesh.ndim == 1:
            local = given._local_tensor.to(device)
        else:  # another mesh, or another tensor: it is put together, and cut again
            whole = gathered(given, shard.device_mesh.device_type)
            if is_quantized(module):
                whole = quantize_later(module, whole, whole.device)
            local = slice_in(whole, shard).to(device, copy=True)
        made = nn.Parameter(as_slice(local.contiguous(), shard), shard.requires_grad)
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
