"""Operators that the meta device refuses, or whose outputs depend on values, which a trace does not know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

_ATEN = torch.ops.aten


def _grouped(left: Tensor, right: Tensor, *more: Any, **options: Any) -> Tensor:
    """Products of groups of rows, or sums over groups of columns: torch asks for bf16 on meta, and on a GPU alone."""
    if left.dim() == right.dim() == 2:
        offsets = more[0] if more else options["offs"]
        shape: tuple[int, ...] = (offsets.shape[0], left.shape[0], right.shape[1])
    elif left.dim() == right.dim() == 3:
        shape = (left.shape[0], left.shape[1], right.shape[2])
    else:
        shape = (left.shape[-2], right.shape[-1])
    dtype = options.get("out_dtype") or (more[2] if len(more) > 2 else None) or left.dtype
    return torch.empty(shape, dtype=dtype, device="meta")


def grouped_flops(left: Tensor, right: Tensor, *_: Any, **__: Any) -> float:
    """Of the same products: each row is in one group."""
    groups = left.shape[0] if left.dim() > right.dim() else 1
    return 2.0 * left.numel() * right.shape[-1] / groups


def _chosen(value: Tensor, indices: list[Tensor | None]) -> Tensor | None:
    """Values at a mask: one of each row, as where models read a label at the last token. None for other indices."""
    mask = indices[0] if indices else None
    if mask is None or mask.dtype is not torch.bool or any(each is not None for each in indices[1:]):
        return None
    return value.new_empty((mask.shape[0], *value.shape[mask.dim() :]))


def _alike(value: Tensor, return_inverse: bool = False, return_counts: bool = False, dim: Any = None) -> Any:
    """What differs from its neighbour: nothing."""
    return value.new_empty(1), value.new_empty(value.shape if return_inverse else 0), value.new_empty(1)


# Operator -> what answers in its place; None where it is to answer itself.
ANSWERS: Mapping[Any, Callable[..., Any]] = {
    _ATEN.index.Tensor: _chosen,
    _ATEN.unique_consecutive.default: _alike,
    **({_ATEN._grouped_mm.default: _grouped} if hasattr(_ATEN, "_grouped_mm") else {}),
}
