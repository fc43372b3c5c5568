"""Copies of a state in host memory, for a checkpoint that is written while training goes on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainkit.trainer.metrics.memory_breakdown import local

WORTH_LOCKING = 1 << 16  # bytes


class HostCopies:
    """Copies a nest of mappings and lists, with the tensors in it.

    keeps: whether the copies' memory is kept for the next time, page-locked where it is copied to from a card: fresh
    pages cost more than the copy, and from a card to pages that may move everything is copied twice. Whoever has the
    last copies must be done with them by then.
    """

    def __init__(self, *, keeps: bool) -> None:
        self._keeps = keeps
        self._kept: dict[tuple[object, ...], Tensor] = {}

    def __call__(self, state: Any) -> Any:
        """The copy, finished."""
        made = self._copied(state, ())
        if self._keeps and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.current_stream().synchronize()
        return made

    def _copied(self, value: Any, place: tuple[object, ...]) -> Any:
        # Copies also of what is on the host already: counters of steps, and all that is offloaded, train on.
        if isinstance(value, Tensor):
            return self._tensor(value.detach(), place)
        if isinstance(value, dict):
            return {key: self._copied(each, (*place, key)) for key, each in value.items()}
        if isinstance(value, list):
            return [self._copied(each, (*place, index)) for index, each in enumerate(value)]
        return value

    def _tensor(self, value: Tensor, place: tuple[object, ...]) -> Tensor:
        kept = self._kept.get(place)
        if kept is not None and (kept.shape, kept.dtype) == (value.shape, value.dtype):
            local(kept).copy_(local(value), non_blocking=True)
            return kept
        made = value.to("cpu", copy=True)
        if self._keeps:
            if value.is_cuda and made.nbytes >= WORTH_LOCKING:
                made = page_locked(made)
            self._kept[place] = made
        return made


def page_locked(tensor: Tensor) -> Tensor:
    """The same in page-locked memory, or as it is where the system gives none."""
    try:
        locked = local(tensor).pin_memory()
    except RuntimeError:  # a limit of the system: the copies are slower, and as right
        return tensor
    if isinstance(tensor, DTensor):
        tensor._local_tensor = locked  # no constructor takes shards of a mesh of cards that are on the host
        return tensor
    return locked
