"""`efficiency.offload_activations`: what blocks keep for backward waits in the machine's memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from trainkit.trainer.metrics.memory_breakdown import expired, storage_of

SMALLEST = 1 << 20  # bytes; below, a copy takes longer to start than to run
AHEAD = 2  # copies under way at a time, to the host in forward and back in backward


def offload_blocks(blocks: Iterable[nn.Module], smallest: int = SMALLEST) -> None:
    """Let the blocks' saved tensors of so many bytes or more wait on the host; parameters stay where they are.

    Checkpointed blocks save their inputs alone. After :func:`checkpoint_blocks`, whose recomputation offloads nothing.
    """
    blocks, store = list(blocks), _Store(smallest)
    for place, block in enumerate(blocks):
        block.forward = partial(_offloaded, store, place == 0, block.forward)


def _offloaded(store: _Store, first: bool, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if first:
        store.begin()
    with saved_tensors_hooks(store.pack, store.unpack):
        return forward(*args, **kwargs)


class _Saved:
    """A tensor on the host. uses: by how many operators it is saved. back: on the device, while backward needs it."""

    def __init__(self, host: Tensor, device: torch.device, place: int) -> None:
        self.host, self.device, self.place = host, device, place
        self.uses = 1
        self.back: Tensor | None = None
        self.arrived: torch.cuda.Event | None = None


class _Store:
    """The saved tensors of a forward pass, in the order in which they were saved; backward takes them in reverse.

    On CUDA copies run on a stream of their own. A tensor is let go only when the stream that computes has waited for
    its copy, so that its memory is not used again under the copy.
    """

    def __init__(self, smallest: int) -> None:
        self._smallest = smallest
        self._stream: torch.cuda.Stream | None = None
        self.begin()

    def begin(self) -> None:
        """A forward pass begins; what an earlier one has left is autograd's alone."""
        self._order: list[_Saved | None] = []
        self._known: dict[tuple[Any, ...], tuple[StorageWeakRef, _Saved]] = {}
        self._leaving: deque[tuple[torch.cuda.Event, Tensor]] = deque()

    def pack(self, tensor: Tensor) -> Tensor | tuple[_Saved, torch.Size]:
        """What autograd keeps in place of a tensor that an operator saves."""
        whole = tensor if tensor._base is None else tensor._base  # of a transposed weight the weight
        if isinstance(whole, nn.Parameter) or type(tensor) is not Tensor or isinstance(whole, DTensor):
            return tensor
        if tensor.nbytes < self._smallest or _is_weight_copy(whole):
            return tensor
        storage = tensor.untyped_storage()
        # A linear layer saves its input as a matrix, and the layer before it the same values as a batch of them.
        form = (tensor.numel(),) if tensor.is_contiguous() else (tensor.shape, tensor.stride())
        key = (storage.data_ptr(), tensor.storage_offset(), form, tensor.dtype, tensor._version)
        known = self._known.get(key)
        if known is not None and not expired(known[0]) and known[1].uses:
            known[1].uses += 1
            return known[1], tensor.shape
        saved = _Saved(self._to_host(tensor), tensor.device, len(self._order))
        self._order.append(saved)
        self._known[key] = (storage_of(tensor)[0], saved)
        return saved, tensor.shape

    def unpack(self, kept: Tensor | tuple[_Saved, torch.Size]) -> Tensor:
        """The tensor again, on its device; those that backward needs next are under way then."""
        if isinstance(kept, Tensor):
            return kept
        packed, shape = kept
        self._end_forward(packed.device)
        self._fetch(packed)
        for place in range(packed.place - 1, max(-1, packed.place - 1 - AHEAD), -1):
            if place < len(self._order) and (each := self._order[place]) is not None and each.uses:
                self._fetch(each)
        if packed.arrived is not None:
            torch.cuda.current_stream(packed.device).wait_event(packed.arrived)
        assert packed.back is not None
        back = packed.back.view(shape) if packed.back.is_contiguous() else packed.back
        packed.uses -= 1
        if packed.uses <= 0:  # a second backward pass over the same graph fetches it again
            packed.back = packed.arrived = None
            if packed.place < len(self._order) and self._order[packed.place] is packed:
                self._order[packed.place] = None
        return back

    def _end_forward(self, device: torch.device) -> None:
        """Backward has begun: nothing more is saved, and what was under way may go from the device."""
        self._known.clear()
        while self._leaving:
            copied, _ = self._leaving[0]
            torch.cuda.current_stream(device).wait_event(copied)
            self._leaving.popleft()

    def _to_host(self, tensor: Tensor) -> Tensor:
        source = tensor.detach()
        host = torch.empty_like(source, device="cpu", pin_memory=source.is_cuda)
        if not source.is_cuda:
            return host.copy_(source)
        computing = torch.cuda.current_stream(source.device)
        while len(self._leaving) >= AHEAD:
            copied, _ = self._leaving[0]
            computing.wait_event(copied)
            self._leaving.popleft()
        stream = self._side(source.device)
        stream.wait_stream(computing)
        with torch.cuda.stream(stream):
            host.copy_(source, non_blocking=True)
        self._leaving.append((stream.record_event(), source))
        return host

    def _fetch(self, saved: _Saved) -> None:
        if saved.back is not None:
            return
        saved.back = torch.empty_like(saved.host, device=saved.device)
        if saved.device.type != "cuda":
            saved.back.copy_(saved.host)
            return
        stream = self._side(saved.device)
        stream.wait_stream(torch.cuda.current_stream(saved.device))  # the memory may have been another tensor's
        with torch.cuda.stream(stream):
            saved.back.copy_(saved.host, non_blocking=True)
        saved.arrived = stream.record_event()

    def _side(self, device: torch.device) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._stream


def _is_weight_copy(tensor: Tensor) -> bool:
    """Whether it is a parameter in another format, which autocast keeps for all passes of a step."""
    made = tensor.grad_fn
    if made is None or made.name() != "ToCopyBackward0":
        return False
    return any(each is not None and each.name().endswith("AccumulateGrad") for each, _ in made.next_functions)
