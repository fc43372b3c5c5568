"""Measure what a forward pass keeps for backward, and the temporaries of an update, by observing torch's operators."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainkit.optimizers import optimizer
from trainkit.recipe.schema import Recipe
from trainkit.trainer.parallel import Strategy
from trainkit.trainer.settings import World

_DEVICES = ("cpu", "cuda", "mps")
# Bytes by storage. A weak reference keeps the storage's id from being reused, and holds no memory.
Sizes = dict[StorageWeakRef, int]
_watched: list[SavedForBackward] = []  # the pass that is being observed, if any


class SavedForBackward:
    """Bytes kept from a forward pass for its backward pass; a tensor kept by several operators counts once."""

    def __init__(self) -> None:
        self._kept: Sizes = {}
        self._copies = AutocastCopies()
        self.weight_copies = 0  # weights in 16 bits, cached by autocast for all passes of a step
        # The most that a recomputed block keeps, from its recomputation until its backward is done.
        self.recomputed_block: int | None = 0

    @property
    def activations(self) -> int:
        """Bytes of the whole pass, without recomputed blocks."""
        return sum(self._kept.values())

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Context around one forward pass, inside autocast."""
        with ExitStack() as stack:
            stack.enter_context(saved_tensors_hooks(partial(self._noted, sizes=self._kept), lambda tensor: tensor))
            if any(torch.is_autocast_enabled(device) for device in _DEVICES):
                stack.enter_context(self._copies)
            _watched.append(self)
            stack.callback(_watched.clear)
            yield
            self.weight_copies = sum(size for storage, size in self._copies.known.items() if not expired(storage))

    @contextmanager
    def block(self, kept: Collection[object]) -> Iterator[None]:
        """Context around a block whose activations are recomputed, except the outputs of the operators in `kept`."""
        mine: Sizes = {}
        # The hooks of the surrounding checkpoint must still see every tensor; torch 2.8 can return them.
        top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
        if top is None:
            self.recomputed_block = None
            yield
            return
        pack, unpack = top(False)

        with (
            saved_tensors_hooks(lambda tensor: pack(self._noted(tensor, mine)), unpack),
            OperatorOutputs(kept, self._kept),
        ):
            yield
        rest = sum(size for storage, size in mine.items() if storage not in self._kept)
        self.recomputed_block = max(self.recomputed_block or 0, rest)

    def _noted(self, tensor: Tensor, sizes: Sizes) -> Tensor:
        whole = tensor if tensor._base is None else tensor._base  # a saved view, such as a transposed weight
        if not isinstance(whole, nn.Parameter):
            storage, size = storage_of(tensor)
            if storage not in self._copies.known:
                sizes[storage] = size
        return tensor


def watched_block(forward: Callable[..., Any], kept: Collection[object], *args: Any, **kwargs: Any) -> Any:
    """Call a block whose activations are recomputed; see :meth:`SavedForBackward.block`."""
    if not _watched:
        return forward(*args, **kwargs)
    with _watched[0].block(kept):
        return forward(*args, **kwargs)


class AutocastCopies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context that finds copies of parameters in another format."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known: Sizes = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and isinstance(args[0], nn.Parameter):
            storage, size = storage_of(made)
            self.known[storage] = size
        return made


class OperatorOutputs(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context that adds the outputs of some operators to `sizes`."""

    def __init__(self, operators: Collection[object], sizes: Sizes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operators, self._sizes = operators, sizes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in self._operators:
            self._sizes |= dict(storage_of(each) for each in tree_leaves(made) if isinstance(each, Tensor))
        return made


class Temporaries(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context that finds the peak bytes of tensors that operators create."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._there: Sizes = {}
        self._given: set[StorageWeakRef] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [storage_of(each)[0] for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        self._given.update(storage for storage in given if storage not in self._there)
        made = func(*args, **(kwargs or {}))
        new = dict(storage_of(each) for each in tree_leaves(made) if isinstance(each, Tensor))
        new = {storage: size for storage, size in new.items() if storage not in self._given}
        self._there = {storage: size for storage, size in self._there.items() if not expired(storage)} | new
        self.peak = max(self.peak, sum(self._there.values()))
        return made


def storage_of(tensor: Tensor) -> tuple[StorageWeakRef, int]:
    """The storage of a tensor's local part, and its bytes."""
    storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
    return StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]


def expired(storage: StorageWeakRef) -> bool:
    """Whether the storage has been freed."""
    return bool(storage.expired())  # type: ignore[no-untyped-call]


_STATUS = Path("/proc/self/status")


def peak_resident() -> int:
    """Peak resident set size."""
    # VmHWM starts at exec, whereas `ru_maxrss` may include the parent's (getrusage(2)).
    peak = status_bytes("VmHWM").get("VmHWM")
    return peak or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def resident() -> int:
    """Current resident set size, or its peak if the system does not report it."""
    return status_bytes("VmRSS").get("VmRSS") or peak_resident()


def status_bytes(*names: str) -> dict[str, int]:
    """Sizes of this process from Linux's /proc/self/status, by name; empty on other systems."""
    try:
        text = _STATUS.read_bytes()
    except FileNotFoundError:
        return {}
    found = {name: text.partition(f"\n{name}:".encode())[2].split(maxsplit=1)[:1] for name in names}
    return {name: int(number) * 1024 for name, numbers in found.items() for number in numbers}


def memory_now(device: torch.device) -> int:
    """The step line's memory figure: the allocator's peak on CUDA, the driver's figure on MPS, peak resident on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    return peak_resident()


def memory_record(device: torch.device, world: World) -> dict[str, int | None]:
    """This rank's line in the result. The allocator's figures are null without a CUDA allocator."""
    on_cuda = device.type == "cuda"
    return {
        "rank": world.rank,
        "peak_allocated": torch.cuda.max_memory_allocated(device) if on_cuda else None,
        "peak_reserved": torch.cuda.max_memory_reserved(device) if on_cuda else None,
        "rss": peak_resident(),
    }


class MemoryBreakdown:
    """Sizes in bytes, from the tensors: a step's own in the first and second step, the rest at the end."""

    def __init__(self, recipe: Recipe) -> None:
        self._kept: SavedForBackward | None = None
        # The hooks would make a compiled model compile again.
        self._look = not recipe.efficiency.compile.enabled
        # Optimizers other than torch's may compile their update, or not use torch's operators.
        self._plain_update = optimizer(recipe.optimizer.name).path.startswith("torch.optim:")
        self._gradients: int | None = None
        self._update: int | None = None
        self._updates = 0

    @contextmanager
    def micro_step(self) -> Iterator[None]:
        """Context of one forward pass. Only the first one is observed."""
        if not self._look or self._kept is not None:
            yield
            return
        self._kept = SavedForBackward()
        with self._kept.watch():
            yield

    @contextmanager
    def update(self, strategy: Strategy) -> Iterator[None]:
        """Context of one update."""
        self._updates += 1
        if self._updates == 1:  # gradients have the same size in every step, and are cleared afterwards
            self._gradients = total_bytes(strategy.held().get("gradients"))
        # In the first update the optimizer creates its state. Engines that hide their gradients also hide their update.
        if self._updates != 2 or not self._plain_update or self._gradients is None:
            yield
            return
        with Temporaries() as seen:
            yield
        self._update = seen.peak

    def record(self, strategy: Strategy, peak: int | None) -> dict[str, int | None]:
        """Bytes by part; null if it could not be measured. other: the peak without the known parts.

        weight_copies: autocast's, in 16 bits. recomputed_block: activations of the largest recomputed block, during its
        recomputation. update_temporaries: exist only while the former do not.
        """
        held, kept = strategy.held(), self._kept
        lasting = {
            "parameters": total_bytes(held.get("parameters")),
            "gradients": self._gradients,
            "optimizer_state": total_bytes(held.get("optimizer_state")),
        }
        passing = {
            "activations": kept.activations if kept else None,
            "recomputed_block": kept.recomputed_block if kept else None,
            "weight_copies": kept.weight_copies if kept else None,
        }
        known = sum(size or 0 for size in lasting.values())
        known += max(sum(size or 0 for size in passing.values()), self._update or 0)
        # On a CPU the peak is the process's, so `other` includes the interpreter and its libraries.
        return {
            **lasting,
            **passing,
            "update_temporaries": self._update,
            "other": None if peak is None else max(0, peak - known),
        }


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def total_bytes(tensors: Iterable[Tensor] | None) -> int | None:
    """Bytes on this rank; shared storage counts once. None for None."""
    if tensors is None:
        return None
    storages = (local(tensor).untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Every tensor of an optimizer's state."""
    values = chain.from_iterable(state.values() for state in optimizer.state.values())
    return (value for value in values if isinstance(value, Tensor))
