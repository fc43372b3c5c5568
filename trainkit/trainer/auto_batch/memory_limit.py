"""How much memory this rank may take, and when it has taken too much."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from trainkit.errors import TrainingError
from trainkit.machine.probes.memory import available
from trainkit.trainer.metrics.memory import peak_resident, resident, status_bytes

SHARE = 0.9  # of what is free: the rest is for what grows later, and for others
_CLEAR = Path("/proc/self/clear_refs")
_OUT_OF_MEMORY = ("can't allocate memory", "bad_alloc", "out of memory")


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that a rank's memory may reach: the allocator's on CUDA, resident on a CPU.

    limit: as the recipe has it. there: what the machine has for this rank; beyond it the system would end processes.
    """

    limit: int
    there: int


def room(device: torch.device, asked_mib: int | None, environ: Mapping[str, str] = os.environ) -> Room:
    """The room of this rank. asked_mib: MiB that the recipe allows it, None for :data:`SHARE` of what is free.

    The ranks of one machine share the memory of its CPU.
    """
    if device.type == "cuda":
        used, free = torch.cuda.memory_reserved(device), torch.cuda.mem_get_info(device)[0]
    else:
        share = available() // max(1, int(environ.get("LOCAL_WORLD_SIZE", "1")))
        used, free = resident(), min([share, *_left_of_limits()])
    return Room(asked_mib * 2**20 if asked_mib else used + int(SHARE * free), used + free)


def _left_of_limits() -> list[int]:
    """What the process may still map, under `ulimit -v` and `ulimit -d`."""
    used = status_bytes("VmSize", "VmData")
    kinds = {"VmSize": resource.RLIMIT_AS, "VmData": resource.RLIMIT_DATA}
    limits = {name: resource.getrlimit(kind)[0] for name, kind in kinds.items()}
    return [limits[name] - size for name, size in used.items() if limits[name] != resource.RLIM_INFINITY]


def give_back(device: torch.device) -> None:
    """Let the system have what is free inside this process: CUDA's allocator and glibc's keep it for later use."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # malloc_trim(3); other C libraries have none
    if trim is not None:
        trim(0)


def restart_peak(device: torch.device) -> None:
    """Forget the peak so far. TrainingError where the system cannot."""
    give_back(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        _CLEAR.write_text("5")  # resets the peak of the resident set (proc(5))
    except OSError as error:
        raise TrainingError(
            f"batch.micro is auto, and this system does not measure peaks anew ({_CLEAR}: {error.strerror})",
            hint="set batch.micro to a number",
        ) from error


def peak(device: torch.device) -> int:
    """Bytes at the highest since :func:`restart_peak`."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else peak_resident()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation has failed, on the device or on the host. torch has a class of its own for CUDA only."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)
