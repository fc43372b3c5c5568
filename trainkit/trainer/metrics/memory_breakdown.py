"""How much memory a rank has used, in bytes, and what for: parameters, gradients, optimizer state, activations."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainkit.optimizers import optimizer
from trainkit.recipe.schema import Recipe
from trainkit.trainer.metrics.watched_memory import Kept, Temporaries
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
    try:
        text = _STATUS.read_bytes()
    except FileNotFoundError:
        return {}
    found = {name: text.partition(f"\n{name}:".encode())[2].split(maxsplit=1)[:1] for name in names}
    return {name: int(number) * 1024 for name, numbers in found.items() for number in numbers}


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
    """Sizes in bytes, from the tensors: what a step takes once, in the first and second, the rest at the end."""

    def __init__(self, recipe: Recipe) -> None:
        self._kept: Kept | None = None
        # The hooks that see what is saved would compile a compiled model again.
        self._look = not recipe.efficiency.compile.enabled
        # Others than torch's own may compile their update, or do it in what is no operator of torch.
        self._plain_update = optimizer(recipe.optimizer.name).path.startswith("torch.optim:")
        self._gradients: int | None = None
        self._update: int | None = None
        self._updates = 0

    @contextmanager
    def micro_step(self) -> Iterator[None]:
        """Context of one forward pass. The first one is looked at, the others are left alone."""
        if not self._look or self._kept is not None:
            yield
            return
        self._kept = Kept()
        with self._kept.watch():
            yield

    @contextmanager
    def update(self, strategy: Strategy) -> Iterator[None]:
        """Context of one update."""
        self._updates += 1
        if self._updates == 1:  # every step has the same gradients, in size; afterwards they are cleared
            self._gradients = total_bytes(strategy.held().get("gradients"))
        # In the first one the optimizer makes its state. Engines that hide their gradients hide their update, too.
        if self._updates != 2 or not self._plain_update or self._gradients is None:
            yield
            return
        with Temporaries() as seen:
            yield
        self._update = seen.peak

    def record(self, strategy: Strategy, peak: int | None) -> dict[str, int | None]:
        """Bytes by part; null where nothing could be measured. other: the peak without the known parts.

        weight_copies: autocast's, in 16 bits. recomputed_block: activations of the largest block whose activations are
        computed again, while it is. update_temporaries: are there when all of these are not.
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
        # On a CPU the peak is that of the process, so the rest holds the interpreter and its libraries.
        return {
            **lasting,
            **passing,
            "update_temporaries": self._update,
            "other": None if peak is None else max(0, peak - known),
        }


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
