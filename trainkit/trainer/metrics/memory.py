"""How much memory this process has used, in bytes."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

from trainkit.trainer.settings import World

_STATUS = Path("/proc/self/status")


def peak_resident() -> int:
    """Peak resident set size. VmHWM starts at exec, whereas `ru_maxrss` may carry the parent's over."""
    peak = status_bytes("VmHWM").get("VmHWM")
    return peak or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def resident() -> int:
    """Resident set size by now; where the system does not tell, its peak."""
    return status_bytes("VmRSS").get("VmRSS") or peak_resident()


def status_bytes(*names: str) -> dict[str, int]:
    """Sizes of this process by their names in Linux's /proc/self/status; nothing elsewhere."""
    if not _STATUS.exists():
        return {}
    fields = (line.split() for line in _STATUS.read_text().splitlines())
    return {words[0][:-1]: int(words[1]) * 1024 for words in fields if words and words[0][:-1] in names}


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
