"""NVIDIA cards, by NVML, asked only where a driver is present."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainkit.hardware.facts import Gpu

# Where a driver shows itself: on Linux, and in WSL.
DRIVERS = ("dev/nvidiactl", "proc/driver/nvidia", "usr/lib/wsl/lib/libnvidia-ml.so.1")


def probe(root: Path = Path("/")) -> Mapping[str, Any]:
    """The cards in PCI order; none, and nothing imported, without a driver. Raises pynvml.NVMLError when NVML fails."""
    if not any((root / driver).exists() for driver in DRIVERS):
        return {"gpus": ()}
    import pynvml

    pynvml.nvmlInit()
    try:
        return {"gpus": tuple(_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount()))}
    finally:
        pynvml.nvmlShutdown()


def _gpu(pynvml: Any, index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(
        index=index,
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        memory_total=int(memory.total),
        memory_free=int(memory.free),
        compute_capability=(int(major), int(minor)),
    )


def _text(value: str | bytes) -> str:
    """Older releases of nvidia-ml-py give bytes."""
    return value.decode() if isinstance(value, bytes) else value
