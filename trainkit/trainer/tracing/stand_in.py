"""What torch does on a CPU or a GPU and not on the meta device: autocast, fused dropout, the choice of kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

_ATEN = torch.ops.aten
# What autocast computes in 16 bits (aten/src/ATen/autocast_mode.h), as Python calls it.
LOWER: frozenset[Any] = frozenset(
    (
        *(functional.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, torch.bmm, Tensor.bmm),
        *(torch.mm, Tensor.mm, torch.addmm, Tensor.addmm, torch.baddbmm, Tensor.baddbmm, torch.einsum),
        *(functional.conv1d, functional.conv2d, torch.conv1d, torch.conv2d, functional.scaled_dot_product_attention),
    )
)
# What it computes in fp32 on CUDA. On a CPU hardly anything that a language model does.
HIGHER: frozenset[Any] = frozenset(
    (
        *(functional.layer_norm, functional.softmax, torch.softmax, Tensor.softmax, functional.log_softmax),
        *(torch.log_softmax, Tensor.log_softmax, functional.cross_entropy, functional.nll_loss, torch.pow, Tensor.pow),
        *(
            Tensor.__pow__,
            torch.rsqrt,
            Tensor.rsqrt,
            torch.exp,
            Tensor.exp,
            torch.log,
            Tensor.log,
            torch.sum,
            Tensor.sum,
        ),
        *(torch.logsumexp, Tensor.logsumexp, functional.mse_loss, functional.group_norm, torch.cumsum, Tensor.cumsum),
        *(functional.softplus, torch.sum, Tensor.sum),
    )
)
_standing: list[StandIn] = []  # the one in force, if any


class StandIn(TorchFunctionMode):
    """Computes on meta as a device would.

    device: `cuda` or `cpu`. capability: of the GPU. format: of autocast; None without it. zero3: whether DeepSpeed
    computes linear layers. `copies` are the weights that autocast has cast, which stay until the step ends.
    """

    def __init__(
        self, device: str, capability: tuple[int, int], format: torch.dtype | None, *, zero3: bool = False
    ) -> None:
        super().__init__()
        self.zero3 = zero3
        self.device, self.capability, self.format = device, capability, format
        self.casting = False  # whether autocast is on
        self.copies: dict[int, Tensor] = {}
        self.copied: Callable[[Tensor], None] = lambda made: None  # is told of each
        self.recomputing: Callable[[bool], None] = lambda begins: None  # is told when backward computes forward again

    def __enter__(self) -> Any:
        _standing.append(self)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        _standing.pop()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    @contextmanager
    def autocast(self, enabled: bool = True) -> Iterator[None]:
        """As torch.autocast."""
        before, self.casting = self.casting, enabled and self.format is not None
        try:
            yield
        finally:
            self.casting = before

    def again(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, which also computes as the device does when backward calls it, to recompute."""

        def inside(*args: Any, **kwargs: Any) -> Any:
            if self in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
                return forward(*args, **kwargs)
            self.recomputing(True)
            try:
                with self, self.autocast():
                    return forward(*args, **kwargs)
            finally:
                self.recomputing(False)

        return inside

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.casting:
            change = self._low if func in LOWER else self._high if func in HIGHER and self.device == "cuda" else None
            if change is not None:
                args = tuple(_each(change, each) for each in args)
                kwargs = {name: _each(change, each) for name, each in kwargs.items()}
        if func is functional.linear and self.zero3:
            return _Linear.apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        if func is functional.dropout and self.device == "cuda":
            return self._dropout(*args, **kwargs)
        if func is functional.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        return func(*args, **kwargs)

    def _low(self, value: Any) -> Any:
        if (
            not isinstance(value, Tensor)
            or not value.is_floating_point()
            or value.dtype in (self.format, torch.float64)
        ):
            return value
        # autocast keeps the copies of trained fp32 leaves; frozen ones it casts each time
        if not (value.is_leaf and value.requires_grad and value.dtype == torch.float32):
            return value.to(self.format)
        made = self.copies.get(id(value))
        if made is None:
            made = self.copies[id(value)] = value.to(self.format)
            self.copied(made)
        return made

    @staticmethod
    def _high(value: Any) -> Any:
        low = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
        return value.float() if low else value

    @staticmethod
    def _dropout(value: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return torch.native_dropout(value, p, True)[0] if training and 0 < p < 1 else value

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any
    ) -> Any:
        """The kernel that torch chooses (aten/src/ATen/native/transformers: sdp_utils.cpp, sdp_utils_cpp.cpp)."""
        dropout_p, is_causal = options.get("dropout_p", 0.0), options.get("is_causal", False)
        scale, enable_gqa = options.get("scale"), options.get("enable_gqa", False)
        # Kernels want as many heads everywhere, or to be told of groups (check_batch_size_and_num_heads_dense).
        alike = query.shape[:-2] == key.shape[:-2] == value.shape[:-2] or (enable_gqa and query.dim() == 4)
        width, half = query.shape[-1], query.dtype in (torch.float16, torch.bfloat16)
        heads = query.shape[1] // key.shape[1] if query.dim() == 4 else 1
        if not alike:
            pass
        elif self.device == "cpu":
            if not dropout_p and not (attn_mask is not None and attn_mask.requires_grad):
                attn_mask = self._added(attn_mask, query.dtype)
                return _ATEN._scaled_dot_product_flash_attention_for_cpu(
                    query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
                )[0]
        elif half and attn_mask is None and width <= 256 and self.capability >= (8, 0):
            return _ATEN._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
        elif half or query.dtype == torch.float32:
            if heads > 1:
                key, value = key.repeat_interleave(heads, 1), value.repeat_interleave(heads, 1)
            bias = self._added(attn_mask, query.dtype)
            if bias is not None:
                bias = bias.expand(*query.shape[:3], key.shape[2])
            return _ATEN._scaled_dot_product_efficient_attention(
                query, key, value, bias, query.requires_grad, dropout_p, is_causal, scale=scale
            )[0]
        return _ATEN._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]

    @staticmethod
    def _added(mask: Tensor | None, format: torch.dtype) -> Tensor | None:
        """A mask as the kernels add it to scores (transformers/attention.cpp: convert_boolean_attn_mask)."""
        if mask is None or mask.dtype != torch.bool:
            return mask
        return torch.zeros_like(mask, dtype=format).masked_fill_(mask.logical_not(), float("-inf"))


class _Linear(torch.autograd.Function):
    """DeepSpeed's linear layer for ZeRO-3, which keeps its input whether or not the weight is trained.

    After LinearFunctionForZeroStage3 (deepspeed/runtime/zero/linear.py).
    """

    @staticmethod
    def forward(context: Any, value: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        context.save_for_backward(value, weight, bias)
        if value.dim() == 2 and bias is not None:
            return torch.addmm(bias, value, weight.t())
        made = value.matmul(weight.t())
        return made if bias is None else made.add_(bias)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        value, weight, _ = context.saved_tensors
        (gradient,) = gradients
        wanted = (*context.needs_input_grad, False)
        rows = gradient.reshape(-1, gradient.shape[-1])
        for_value = gradient.matmul(weight) if wanted[0] else None
        for_weight = rows.t().matmul(value.reshape(-1, value.shape[-1])) if wanted[1] else None
        for_bias = rows.sum(0) if wanted[2] else None
        return (for_value, for_weight, for_bias)[: len(context.needs_input_grad)]


def _each(change: Callable[[Any], Any], value: Any) -> Any:
    return type(value)(map(change, value)) if type(value) in (list, tuple) else change(value)


def standing_in(tensor: Tensor) -> StandIn | None:
    """Who answers for a tensor's device; None for a tensor that is on one."""
    return _standing[-1] if _standing and tensor.is_meta else None


def device_type(tensor: Tensor) -> str:
    """The device that computes with it, in the end."""
    stand_in = standing_in(tensor)
    return stand_in.device if stand_in else tensor.device.type


def autocast_format(tensor: Tensor) -> torch.dtype | None:
    """The format of the autocast around; None outside of any."""
    stand_in, device = standing_in(tensor), tensor.device.type
    if stand_in:
        return stand_in.format if stand_in.casting else None
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def without_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    """Context in which nothing is cast."""
    stand_in = standing_in(tensor)
    if stand_in:
        return stand_in.autocast(enabled=False)
    return nullcontext() if tensor.is_meta else torch.autocast(tensor.device.type, enabled=False)
