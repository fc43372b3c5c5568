"""How much memory a rank has used, in bytes, and what for: parameters, gradients, optimizer state, activations."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainkit.trainer.parallel import Strategy
from trainkit.trainer.settings import World

_STATUS = Path("/proc/self/status")


def peak_resident() -> int:
    """Peak resident set size."""
    # VmHWM starts at exec, whereas `ru_maxrss` may carry the parent's over (getrusage(2)).
    peak = status_bytes("VmHWM").get("VmHWM")
    return peak or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def resident() -> int:
    """Current resident set size; where the system does not report it, its peak."""
    return status_bytes("VmRSS").get("VmRSS") or peak_resident()


def status_bytes(*names: str) -> dict[str, int]:
    """Sizes of this process by their names in Linux's /proc/self/status; nothing elsewhere."""
    if not _STATUS.exists():
        return {}
    fields = (line.split() for line in _STATUS.read_text().splitlines())
    return {field[0][:-1]: int(field[1]) * 1024 for field in fields if field and field[0][:-1] in names}


def memory_now(device: torch.device) -> int:
    """What the step line shows: the allocator's peak on CUDA, the driver's figure on MPS, peak resident on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    return peak_resident()


def memory_record(device: torch.device, world: World) -> dict[str, int | None]:
    """This rank's line in the result. The allocator's figures are null where there is no CUDA allocator."""
    on_cuda = device.type == "cuda"
    return {
        "rank": world.rank,
        "peak_allocated": torch.cuda.max_memory_allocated(device) if on_cuda else None,
        "peak_reserved": torch.cuda.max_memory_reserved(device) if on_cuda else None,
        "rss": peak_resident(),
    }


class MemoryBreakdown:
    """Sizes in bytes, from the tensors: activations and gradients once, in the first step, the rest at the end."""

    def __init__(self, *, compiled: bool) -> None:
        self._activations: int | None = None
        self._gradients: int | None = None
        # The hooks that see what is saved would compile a compiled model again.
        self._look = not compiled
        self._updated = False

    @contextmanager
    def micro_step(self) -> Iterator[None]:
        """Context of one forward pass. The first one is looked at, the others are left alone."""
        if not self._look:
            yield
            return
        self._look = False
        sizes: dict[int, int] = {}  # by address: two operations may save the same tensor

        def look(tensor: Tensor) -> Tensor:
            whole = tensor if tensor._base is None else tensor._base  # a saved view, such as a transposed weight
            if not isinstance(whole, nn.Parameter):
                storage = local(tensor).untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(look, lambda tensor: tensor):
            yield
        self._activations = sum(sizes.values())

    def before_update(self, strategy: Strategy) -> None:
        """Gradients are there now; afterwards they are cleared."""
        if not self._updated:  # every step has the same gradients, in size
            self._updated = True
            self._gradients = total_bytes(strategy.held().get("gradients"))

    def record(self, strategy: Strategy, peak: int | None) -> dict[str, int | None]:
        """Bytes by part; null where nothing could be measured. other: the peak without the known parts."""
        held = strategy.held()
        known = {
            "parameters": total_bytes(held.get("parameters")),
            "gradients": self._gradients,
            "optimizer_state": total_bytes(held.get("optimizer_state")),
            "activations": self._activations,
        }
        # On a CPU the peak is that of the process, so the rest holds the interpreter and its libraries.
        other = None if peak is None else max(0, peak - sum(size or 0 for size in known.values()))
        return {**known, "other": other}


def local(tensor: Tensor) -> Tensor:
    """What of a tensor lies on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def total_bytes(tensors: Iterable[Tensor] | None) -> int | None:
    """Bytes on this rank; storage that several tensors share counts once. None for what is not known."""
    if tensors is None:
        return None
    storages = (local(tensor).untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Every tensor of an optimizer's state."""
    values = chain.from_iterable(state.values() for state in optimizer.state.values())
    return (value for value in values if isinstance(value, Tensor))
