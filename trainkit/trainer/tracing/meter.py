"""Records which storages come and go while operators run on the meta device, and the work of each operator."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from trainkit.foresight.trace import ACTIVATIONS, TEMPORARIES, Kind
from trainkit.trainer.tracing.answers import ANSWERS, grouped_flops
from trainkit.trainer.tracing.quantized import kernel_of

_ATEN = torch.ops.aten
FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
# Answered by the operators themselves, for they are views or say nothing of memory.
_AS_THEY_ARE = (_ATEN.detach.default, _ATEN.lift_fresh.default)


def _flash_workspace(args: Sequence[Any]) -> list[int]:
    """Bytes that FlashAttention 2 takes in backward: the sum for dq in fp32, and dk, dv of each query head."""
    # Tri Dao's flash_api.cpp (mha_bwd): rows rounded to 128, columns to 32.
    query, key = args[1], args[2]
    batch, heads, length, width = query.shape
    rows, columns = -(-length // 128) * 128, -(-width // 32) * 32
    sizes = [batch * heads * rows * columns * 4, batch * heads * rows * 4]
    if key.shape[1] != heads:
        sizes += [batch * heads * key.shape[2] * width * query.element_size()] * 2
    return sizes


def _efficient_workspace(args: Sequence[Any]) -> list[int]:
    """Bytes that the memory-efficient kernel takes in backward: a row's sum, and dq in fp32 for 16-bit inputs."""
    query = args[1]
    batch, heads, length, width = query.shape
    return [batch * heads * length * 4] + [batch * heads * length * width * 4] * (query.element_size() == 2)


# What torch's own register lacks.
FLOPS: Mapping[Any, Callable[..., float]] = {_ATEN._grouped_mm: grouped_flops} if hasattr(_ATEN, "_grouped_mm") else {}
# Memory that a kernel of CUDA takes and gives back by itself.
WORKSPACES: Mapping[Any, Callable[[Sequence[Any]], list[int]]] = {
    _ATEN._scaled_dot_product_flash_attention_backward.default: _flash_workspace,
    _ATEN._scaled_dot_product_efficient_attention_backward.default: _efficient_workspace,
}


# On a CPU these cast what has not the format of the result, whole (aten/src/ATen/TensorIterator.cpp: compute_types).
_MIXING = frozenset(getattr(_ATEN, name + end).Tensor for name in ("add", "sub", "mul", "div") for end in ("", "_"))


def _mixed_casts(func: Any, args: Sequence[Any]) -> list[int]:
    """Bytes of the casts of an operator on tensors of two formats, on a CPU."""
    tensors = [each for each in args[:2] if isinstance(each, Tensor)]
    if len(tensors) < 2 or tensors[0].dtype == tensors[1].dtype:
        return []
    common = torch.result_type(*tensors)
    cast = [each for each in tensors if each.dtype != common and each.dim()]
    if func._schema.is_mutable and tensors[0].dtype != common:
        cast.append(tensors[0])
    return [each.numel() * common.itemsize for each in cast]


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """events: (kind, number), one after the other. recomputing: whether backward computes a forward pass again."""

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[int] = []
        self.sizes: list[int] = []
        self.parts: list[int] = []
        self.operators: list[int] = []
        self.names: dict[str, int] = {}
        self.work: Counter[tuple[float, float, str]] = Counter()
        self.recomputed, self.recomputing = 0.0, False
        self._cuda = device == "cuda"
        self._alone = _alone()
        self._live: dict[int, int] = {}  # storage -> number
        self._watched: dict[int, Any] = {}
        self._kinds: dict[Any, str] = {}
        self._known: dict[Any, Any] = {}

    # -- storages

    def exclude(self, tensors: Sequence[Tensor]) -> None:
        """These are no memory of the micro step: parameters and buffers, which the estimate counts itself."""
        for tensor in tensors:
            self._live[tensor.untyped_storage()._cdata] = -1

    def number(self, tensor: Tensor) -> int | None:
        """That of a tensor's storage; None for one that is excluded or was never met."""
        found = self._live.get(tensor.untyped_storage()._cdata, -1)
        return found if found >= 0 else None

    def mark(self, kind: Kind, number: int = 0) -> None:
        self.events += (kind, number)

    def _take(self, storage: Any, size: int, operator: str) -> None:
        key = storage._cdata
        number = self._new(size, operator)
        self._live[key] = number
        self._watched[key] = weakref.ref(storage, lambda _: self._gone(key))

    def _new(self, size: int, operator: str) -> int:
        number = len(self.sizes)
        self.sizes.append(size)
        self.parts.append(TEMPORARIES)
        self.operators.append(self.names.setdefault(operator, len(self.names)))
        self.events += (Kind.TAKE, number)
        return number

    def _pass(self, sizes: Sequence[int], operator: str) -> None:
        """Memory that an operator takes and gives back."""
        for number in [self._new(size, operator) for size in sizes]:
            self.events += (Kind.FREE, number)

    def _gone(self, key: int) -> None:
        self._watched.pop(key, None)
        self.events += (Kind.FREE, self._live.pop(key))

    # -- operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ATEN._local_scalar_dense.default:  # no value is known; those who look at masks want a yes
            return True if args[0].dtype is torch.bool else 1
        if inside := kernel_of(func):
            with self:
                return inside(args, kwargs or {})
        if func is _ATEN.add.Tensor and _by_autograd() and _holders(args[0]) == self._alone:
            self._count(_ATEN.add_.Tensor, args, {}, args[0], 0)
            return args[0]
        out = self._answer(func, args, kwargs or {})
        if self._cuda and func in WORKSPACES:
            self._pass(WORKSPACES[func](args), func.__name__)
        elif not self._cuda and func in _MIXING:
            self._pass(_mixed_casts(func, args), func.__name__)
        fresh = 0
        outputs = out if isinstance(out, tuple | list) else (out,)
        tensors = [each for each in outputs if isinstance(each, Tensor)]
        for each in tensors:
            storage = each.untyped_storage()
            if storage._cdata not in self._live:
                size = storage.nbytes()
                fresh += size
                self._take(storage, size, func.__name__)
        if fresh or func._schema.is_mutable:  # views do no work
            self._count(func, args, kwargs or {}, out, fresh)
        return out

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any, fresh: int) -> None:
        """Note the work of an operator. fresh: bytes of what it makes."""
        inputs, outputs = _tensors(args), _tensors(out if isinstance(out, tuple | list) else (out,))
        moved = fresh + sum(map(_bytes, inputs)) + (sum(map(_bytes, outputs)) if func._schema.is_mutable else 0)
        count = flop_registry.get(func._overloadpacket) or FLOPS.get(func._overloadpacket)
        flops = float(count(*args, **kwargs, out_val=out)) if count else 0.0
        format = FORMATS.get(inputs[0].dtype, "fp32") if inputs else "fp32"
        self.work[flops, float(moved), format] += 1
        self.recomputed += flops if self.recomputing else 0.0

    def _answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The outputs. Kernels of meta are Python and take up to a millisecond: like calls are answered from memory."""
        answer = ANSWERS.get(func)
        if answer is not None and (found := answer(*args, **kwargs)) is not None:
            return found
        kind = self._kinds.get(func) or self._kinds.setdefault(func, _kind(func))
        if kind == "other":
            return func(*args, **kwargs)
        try:
            key = (func, *map(_key, args), *((name, _key(value)) for name, value in kwargs.items()))
            known = self._known.get(key)
        except TypeError:  # something that cannot be compared
            return func(*args, **kwargs)
        if known is None:
            return self._remember(key, kind, func(*args, **kwargs), args)
        if known is True:
            return args[0]
        several, shapes = known
        made = [torch.empty_strided(size, stride, dtype=dtype, device="meta") for size, stride, dtype in shapes]
        return tuple(made) if several else made[0]

    def _remember(self, key: Any, kind: str, out: Any, args: Any) -> Any:
        outputs = out if isinstance(out, tuple | list) else (out,)
        if kind == "in place":
            if out is args[0]:
                self._known[key] = True
        elif all(isinstance(each, Tensor) and each.untyped_storage()._cdata not in self._live for each in outputs):
            shapes = [(each.shape, each.stride(), each.dtype) for each in outputs]
            if all(_bytes(each) == each.untyped_storage().nbytes() for each in outputs):
                self._known[key] = isinstance(out, tuple | list), shapes
        return out

    def survivors(self, begin: int) -> None:
        """Storages of a forward pass that live into its backward pass are activations. begin: of its events."""
        backward = False
        born: set[int] = set()
        for kind, number in zip(self.events[begin::2], self.events[begin + 1 :: 2], strict=True):
            if kind == Kind.TAKE and not backward:
                born.add(number)
            elif kind == Kind.FREE and not backward:
                born.discard(number)
            elif kind == Kind.BACKWARD:
                backward = True
        for number in born:
            if self.parts[number] == TEMPORARIES:
                self.parts[number] = ACTIVATIONS


# Autograd adds a gradient to an earlier one in place where nobody else holds that, but under a mode it never does
# (torch/csrc/autograd/input_buffer.cpp: accumulate).


def _by_autograd() -> bool:
    """Whether the operator that is being dispatched is autograd's own, and not that of a function in Python."""
    frame = None if torch.is_grad_enabled() else sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.endswith(("eval_frame.py", "_compile.py")):  # decorators
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


def _holders(tensor: Tensor) -> tuple[int, int]:
    """How many hold a tensor, and its storage."""
    counts: Any = torch._C
    return tensor._use_count(), counts._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]


@cache
def _alone() -> tuple[int, int]:
    """The same of a gradient that nobody but autograd holds."""
    found: list[tuple[int, int]] = []

    class Looking(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is _ATEN.add.Tensor and _by_autograd():
                found.append(_holders(args[0]))
            return func(*args, **(kwargs or {}))

    weight = torch.zeros(2, 2, device="meta", requires_grad=True)
    row = torch.zeros(1, 2, device="meta")
    with torch.enable_grad(), Looking():  # type: ignore[no-untyped-call]
        torch.autograd.backward([torch.mm(row, weight).sum(), torch.mm(row, weight).sum()])
    return found[0]


def _tensors(values: Any) -> list[Tensor]:
    """The tensors among arguments, also those in lists."""
    flat = [each for value in values for each in (value if isinstance(value, tuple | list) else (value,))]
    return [each for each in flat if isinstance(each, Tensor)]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _kind(func: Any) -> str:
    """`fresh` for an operator whose outputs are new, `in place` for one that gives its first argument back."""
    schema = func._schema
    shares = any(each.alias_info is not None for each in schema.returns)
    plain = schema.returns and all(str(each.type) == "Tensor" for each in schema.returns)
    if plain and not schema.is_mutable and not shares and func not in _AS_THEY_ARE:
        return "fresh"
    first = schema.arguments[0] if schema.arguments else None
    if schema.is_mutable and len(schema.returns) == 1 and schema.name.endswith("_") and first and first.alias_info:
        return "in place"
    return "other"


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.is_meta
    if isinstance(value, tuple | list):
        return tuple(map(_key, value))
    hash(value)
    return type(value), value
