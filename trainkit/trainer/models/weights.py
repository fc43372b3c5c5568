"""Where a model's values come from, tensor by tensor, and how each rank gets its own alone.

A model is built without values, on the meta device. Each tensor is then read from its file, or drawn by a generator
that is seeded by its module's name: equal on every rank, for every strategy and number of ranks. Where a strategy
divides the model, each parameter is a row-wise slice on each rank from the start (`divide`), and the strategy takes
them out one by one and puts them where it wants them (:class:`Slices`). So no rank holds more than its share and the
tensor that is being moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainkit.seeds import derived_seed
from trainkit.trainer.perf.heap import keep_out_of_heap

LARGE = 10**8  # parameters


def replace_parameters(root: nn.Module, make: Callable[[nn.Parameter], nn.Parameter]) -> None:
    """Put what is made of each parameter in its place; of a tied one, one for all its modules."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter not in made:
                made[parameter] = make(parameter)
                vars(made[parameter]).update(vars(parameter))
            module._parameters[name] = made[parameter]


def divide(root: nn.Module, mesh: DeviceMesh) -> None:
    """Make each parameter of a model on the meta device a slice of rows on each rank; tied ones stay tied."""
    # Who divides a model has little memory. The activations of small ones are in small blocks, too: fresh pages for
    # each would double the time of a step.
    large = sum(parameter.numel() for parameter in root.parameters()) >= LARGE
    keep_out_of_heap((1 if large else 4) << 20)

    def slice_of(parameter: nn.Parameter) -> nn.Parameter:
        if not parameter.dim():  # a number has no rows, and is on every rank
            return parameter
        rows = [Shard(0)]
        shape, _ = compute_local_shape_and_global_offset(parameter.shape, mesh, rows)
        local = torch.empty(shape, dtype=parameter.dtype, device="meta")
        made = DTensor.from_local(local, mesh, rows, run_check=False, shape=parameter.shape, stride=parameter.stride())
        return nn.Parameter(made, requires_grad=parameter.requires_grad)

    replace_parameters(root, slice_of)


def give_memory(root: nn.Module, device: torch.device | str) -> None:
    """Give parameters and buffers on the meta device memory, of a slice its own; values are still to come."""

    def real(parameter: nn.Parameter) -> nn.Parameter:
        own: Tensor = getattr(parameter, "_local_tensor", parameter)  # of a slice
        if not own.is_meta:
            return parameter
        memory = torch.empty_like(own, device=device)
        made = as_slice(memory, parameter) if isinstance(parameter, DTensor) else memory
        return nn.Parameter(made, requires_grad=parameter.requires_grad)

    replace_parameters(root, real)
    for module in root.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)


def as_slice(local: Tensor, like: Any) -> Tensor:
    """This rank's values of a divided tensor like another, wherever they are."""
    return cast("Tensor", cast("Any", DTensor)(local, like._spec, requires_grad=False))


def slice_in(whole: Tensor, slices: Any) -> Tensor:
    """The part of a whole tensor that this rank has of a divided one."""
    shape, offsets = compute_local_shape_and_global_offset(slices.shape, slices.device_mesh, slices.placements)
    for dimension, (size, start) in enumerate(zip(shape, offsets, strict=True)):
        whole = whole.narrow(dimension, min(start, whole.shape[dimension]), size)
    return whole


@torch.no_grad()
def put(whole: Tensor, parameter: Tensor) -> None:
    """Set a parameter, or this rank's slice of it, from the whole values."""
    if isinstance(parameter, DTensor):
        parameter._local_tensor.copy_(slice_in(whole, parameter))
    else:
        parameter.data.copy_(whole)


@contextmanager
def drawn(seed: int, name: str, modules: Iterable[nn.Module]) -> Iterator[set[nn.Parameter]]:
    """In this context the modules' own parameters are whole, on the CPU and in 32 bits, to be set in place.

    torch's generator is seeded for this name. What is set reaches the parameters at the end; these are yielded then.
    """
    stand_ins: dict[nn.Parameter, nn.Parameter] = {}
    places = []
    for module in modules:
        for key, parameter in module._parameters.items():
            # What is read already needs none (transformers' mark).
            if parameter is None or getattr(parameter, "_is_hf_initialized", False):
                continue
            if parameter not in stand_ins:
                dtype = torch.float32 if parameter.is_floating_point() else parameter.dtype
                stand_ins[parameter] = nn.Parameter(torch.empty(parameter.shape, dtype=dtype), requires_grad=False)
                vars(stand_ins[parameter]).update(vars(parameter))
            module._parameters[key] = stand_ins[parameter]
            places.append((module, key, parameter))
    before = {parameter: stand_in._version for parameter, stand_in in stand_ins.items()}
    torch.default_generator.manual_seed(derived_seed(seed, "weights", name))
    done: set[nn.Parameter] = set()
    try:
        yield done
    finally:
        for module, key, parameter in places:
            module._parameters[key] = parameter
    for parameter, stand_in in stand_ins.items():
        if stand_in._version != before[parameter]:
            put(stand_in, parameter)
            done.add(parameter)


class Slices:
    """The divided values of a model's parameters, in whose place there are some without values.

    They are by the parameters that took their place, so that what works on the model in between may rename them.
    """

    def __init__(self, root: nn.Module) -> None:
        self._of: dict[nn.Parameter, Tensor] = {}

        def empty(parameter: nn.Parameter) -> nn.Parameter:
            if not isinstance(parameter, DTensor):
                return parameter
            made = nn.Parameter(
                torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"),
                requires_grad=parameter.requires_grad,
            )
            self._of[made] = parameter.detach()
            return made

        replace_parameters(root, empty)

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._of

    def follow(self, parameter: nn.Parameter, successor: nn.Parameter) -> None:
        """Another parameter has taken the place of one of these, as of a layer that is quantised."""
        self._of[successor] = self._of.pop(parameter)

    def look(self, parameter: nn.Parameter) -> Any:
        """This rank's slice, as a divided tensor on the CPU."""
        return self._of[parameter]

    def take(self, parameter: nn.Parameter) -> Any:
        """The same, which is no longer held here."""
        return self._of.pop(parameter)


def gathered(slices: Any, device: str) -> Tensor:
    """The whole of a tensor that is divided on the CPU, exchanged and made on a kind of device; on every rank."""
    if device == "cpu":
        return slices.full_tensor()  # type: ignore[no-any-return]
    ranks = DeviceMesh(device, slices.device_mesh.mesh)
    moved = DTensor.from_local(
        slices._local_tensor, ranks, slices.placements, run_check=False, shape=slices.shape, stride=slices.stride()
    )
    return cast("Any", moved).full_tensor()  # type: ignore[no-any-return]


@torch.no_grad()
def copy_stretch(slices: Any, length: int, to: Tensor, device: torch.device) -> None:
    """Copy this rank's stretch of `length` values of a tensor that is divided by rows; of the whole, rank r's is r-th.

    Only values that lie on another rank are exchanged, and these on the given device in the format of `to`.
    """
    shape, mesh, rank = slices.shape, slices.device_mesh, dist.get_rank()
    size, count, width = mesh.size(), slices.numel(), slices.numel() // max(1, shape[0])
    rows = -(-shape[0] // size)  # as torch divides them: the last ranks may have fewer, or none
    has = [(min(each * rows * width, count), min((each + 1) * rows * width, count)) for each in range(size)]
    wants = [(min(each * length, count), min((each + 1) * length, count)) for each in range(size)]
    local = slices._local_tensor.reshape(-1)
    exchanges, arrived = [], []
    for other in range(size):
        start, end = _common(has[rank], wants[other])
        mine = local[start - has[rank][0] : end - has[rank][0]]
        if other == rank:
            to.view(-1)[start - wants[rank][0] : end - wants[rank][0]].copy_(mine)
            continue
        if start < end:
            exchanges.append(dist.P2POp(dist.isend, mine.to(device, to.dtype), other))
        start, end = _common(has[other], wants[rank])
        if start < end:
            arrived.append((start - wants[rank][0], torch.empty(end - start, dtype=to.dtype, device=device)))
            exchanges.append(dist.P2POp(dist.irecv, arrived[-1][1], other))
    for work in dist.batch_isend_irecv(exchanges) if exchanges else ():
        work.wait()
    for at, values in arrived:
        to.view(-1)[at : at + len(values)].copy_(values)


def _common(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    """The stretch that two have in common; empty if they have none."""
    start, end = max(one[0], other[0]), min(one[1], other[1])
    return start, max(start, end)


def sampled(parameter: Tensor, most: int) -> Tensor:
    """Up to so many values of a parameter, evenly spaced; of a divided one those of all ranks, on each of them."""
    step = max(1, parameter.numel() // most)
    if not isinstance(parameter, DTensor):
        return parameter.flatten()[::step][:most]
    places = torch.arange(0, parameter.numel(), step)[:most]
    local = parameter._local_tensor
    _, (first, *_) = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    places = places - first * (parameter.numel() // parameter.shape[0])
    mine = (places >= 0) & (places < local.numel())
    found = torch.zeros(len(places), dtype=torch.float32)
    found[mine] = local.flatten()[places[mine]].float()
    torch.distributed.all_reduce(found)  # each value is on one rank, and zero on the others
    return found.to(parameter.dtype)


def make_whole(root: nn.Module, few: Iterable[nn.Parameter]) -> None:
    """Give each rank all values of these of a divided model's parameters, which are few."""
    chosen = set(few)

    def whole(parameter: nn.Parameter) -> nn.Parameter:
        if parameter not in chosen or not isinstance(parameter, DTensor):
            return parameter
        return nn.Parameter(cast("Any", parameter.detach()).full_tensor(), requires_grad=parameter.requires_grad)

    replace_parameters(root, whole)
