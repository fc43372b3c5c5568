"""Memory occupied on the run's NVIDIA cards, as the driver sees it: CUDA contexts and NCCL buffers included."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

EVERY_SECONDS = 1.0


class GpuMemory:
    """The highest occupancy seen on each card, in bytes, by UUID. Cards that NVML does not know are left out."""

    def __init__(self, devices: Sequence[str]) -> None:
        self.peak: dict[str, int] = {}
        self._nvml: Any = None
        self._handles: dict[str, Any] = {}
        self._next = 0.0
        if devices:
            with contextlib.suppress(ImportError):
                self._open(devices)

    def look(self) -> None:
        """Take a sample, once a second at most."""
        if not self._handles or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + EVERY_SECONDS
        for uuid, handle in self._handles.items():
            with contextlib.suppress(self._nvml.NVMLError):
                used = int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used)
                self.peak[uuid] = max(used, self.peak.get(uuid, 0))

    def close(self) -> None:
        """Let go of the driver."""
        if self._nvml is not None:
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()

    def _open(self, devices: Sequence[str]) -> None:
        import pynvml

        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:  # no driver: there is nothing to measure, and the summary says so by its absence
            return
        self._nvml = pynvml
        for device in devices:
            with contextlib.suppress(pynvml.NVMLError):
                by_index = device.isdigit()  # in PCI order, as the plan counts
                find = pynvml.nvmlDeviceGetHandleByIndex if by_index else pynvml.nvmlDeviceGetHandleByUUID
                handle = find(int(device) if by_index else device.encode())
                uuid = pynvml.nvmlDeviceGetUUID(handle)
                self._handles[uuid.decode() if isinstance(uuid, bytes) else uuid] = handle
