"""What the kernels of bitsandbytes take beside their outputs, as its release 0.50 has them (bitsandbytes/backends)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

BITSANDBYTES = "bitsandbytes"
Given = Mapping[str, Any]  # the arguments by name; those that are left at their defaults may be absent


def kernel_of(func: Any) -> Callable[[Any, Any], Any] | None:
    """What computes in the place of an operator of bitsandbytes, from its arguments; None for other operators."""
    inside = KERNELS.get(func.name()) if func.namespace == BITSANDBYTES else None
    if inside is None:
        return None
    names = [each.name for each in func._schema.arguments]
    return lambda args, kwargs: inside({**dict(zip(names, args, strict=False)), **kwargs})


def _gemm_4bit(given: Given) -> Tensor:
    """The weight as it was, in the format of the product, and the product.

    A kernel of CUDA that needs no such weight is for few rows alone, and backward has the weight all the same.
    """
    value, largest = given["A"], given["absmax"]
    if given.get("absmax_8bit") is not None:
        plain = torch.ops.bitsandbytes.dequantize_blockwise.default
        largest = (
            plain(given["absmax_8bit"], largest, given["absmax_code"], 256, torch.float32) + given["absmax_offset"]
        )
    made = torch.ops.bitsandbytes.dequantize_4bit.default
    weight = made(given["B"], largest, given["blocksize"], given["quant_type"], given["shapeB"], value.dtype)
    return functional.linear(value, weight, given.get("bias"))


def _quantize_rows(given: Given) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rows in 8 bits and the largest value of each; of outliers, which depend on values, there are none."""
    value, threshold = given["A"], given.get("threshold", 0.0)
    scales = torch.empty(value.numel() // value.shape[-1], device=value.device, dtype=torch.float32)
    made = torch.empty(value.shape, device=value.device, dtype=torch.int8)
    outliers = value.abs() >= threshold if threshold else None
    places = None if outliers is None else torch.empty(0, device=value.device, dtype=torch.int64)
    return made, scales, places


def _product(given: Given) -> Tensor:
    """Of 8 bits: in 32, then in fp16, then in the format that is asked for."""
    value, weight, bias = given["A"], given["B"], given.get("bias")
    whole = torch.empty((*value.shape[:-1], weight.shape[0]), device=value.device, dtype=torch.int32)
    made = torch.empty_like(whole, dtype=torch.float16)
    if bias is not None and bias.dtype != torch.float16:
        made.add_(bias)
    return made.to(given.get("dtype") or torch.float16)


def _mixed(given: Given) -> tuple[Tensor, Tensor]:
    """The same beside a product of outliers, of which there are none."""
    value = given["A"]
    aside = torch.empty(0, device=value.device, dtype=value.dtype)
    return _product({"A": given["CA"], "B": given["CB"], "bias": given.get("bias"), "dtype": value.dtype}), aside


KERNELS: Mapping[str, Callable[[Given], Any]] = {
    "bitsandbytes::gemm_4bit": _gemm_4bit,
    "bitsandbytes::int8_vectorwise_quant": _quantize_rows,
    "bitsandbytes::int8_scaled_mm": _product,
    "bitsandbytes::int8_mixed_scaled_mm": _mixed,
}
