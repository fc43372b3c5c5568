"""Memory and utilization of the run's NVIDIA GPUs, from the driver: with CUDA contexts and NCCL buffers."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainkit.files import open_regular, read_json_lines
from trainkit.launch_plan.model import PlannedGpu
from trainkit.machine.gpus import NvmlQueries

# NVML's utilization is a mean over a sixth of a second to one second: sampling more often would show nothing more.
EVERY_SECONDS = 1.0
STUCK_SECONDS = 2.0  # a hanging driver must not block the run's end


class GpuWatch:
    """Samples each GPU once a second, by UUID, into a file of JSON lines, and keeps figures for the summary.

    A line is {"time": seconds since 1970, "cards": [{"local_rank", "uuid", "memory_bytes", "utilization"}, …]}, with
    null for figures that the driver does not have, and without GPUs unknown to NVML.
    peak: the most occupied memory of each GPU, in bytes, by UUID.
    """

    def __init__(self, cards: Sequence[PlannedGpu], file: Path) -> None:
        self.peak: dict[str, int] = {}
        self._cards = tuple(cards)
        self._file = file
        self._nvml: Any = None
        self._handles: list[tuple[int, str, Any]] = []
        self._used: dict[str, list[int]] = {}
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to sample, in a thread of its own: a driver that hangs must not block the run."""
        if self._cards:
            self._thread = threading.Thread(target=self._run, name="gpu-watch", daemon=True)
            self._thread.start()

    @property
    def utilization(self) -> Mapping[str, float]:
        """The mean of each GPU's utilization over the run, in percent, by UUID."""
        return {uuid: round(sum(found) / len(found), 1) for uuid, found in self._used.items() if found}

    def close(self) -> None:
        self._ending.set()
        if self._thread is not None:
            self._thread.join(STUCK_SECONDS)

    def open(self) -> bool:
        """Find the GPUs in NVML; False if it has none of them."""
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception:  # noqa: BLE001 - no library, no driver, a broken one: the summary then has null
            return False
        self._nvml = pynvml
        # By UUID: NVML numbers GPUs in PCI order and ignores CUDA_VISIBLE_DEVICES.
        for rank, card in enumerate(self._cards):
            with contextlib.suppress(pynvml.NVMLError):
                self._handles.append((rank, card.uuid, pynvml.nvmlDeviceGetHandleByUUID(card.uuid.encode())))
        return bool(self._handles)

    def sample(self) -> list[dict[str, Any]]:
        """Sample every GPU once."""
        found, ask = [], NvmlQueries(self._nvml)
        for rank, uuid, handle in self._handles:
            # Not every GPU supports every query: MIG instances have no utilization.
            memory, busy = ask.memory(handle), ask.maybe("nvmlDeviceGetUtilizationRates", handle)
            used = None if memory is None else memory[0] - memory[1] - memory[2]
            share = None if busy is None else int(busy.gpu)
            found.append({"local_rank": rank, "uuid": uuid, "memory_bytes": used, "utilization": share})
        self._keep(found)
        return found

    def recall(self) -> None:
        """Read the samples of an earlier watch from the file."""
        for line in read_json_lines(self._file):
            self._keep(line.get("cards") or [])

    def _keep(self, cards: Sequence[Mapping[str, Any]]) -> None:
        for card in cards:
            uuid, memory, busy = (card.get(name) for name in ("uuid", "memory_bytes", "utilization"))
            if isinstance(memory, int):
                self.peak[str(uuid)] = max(memory, self.peak.get(str(uuid), 0))
            if isinstance(busy, int):
                self._used.setdefault(str(uuid), []).append(busy)

    def _run(self) -> None:
        if not self.open():
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with (
            contextlib.suppress(OSError),  # the run itself continues
            os.fdopen(open_regular(self._file, flags), "a", encoding="utf-8") as lines,
        ):
            while True:
                lines.write(json.dumps({"time": round(time.time(), 3), "cards": self.sample()}) + "\n")
                lines.flush()
                if self._ending.wait(EVERY_SECONDS):
                    break
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()
