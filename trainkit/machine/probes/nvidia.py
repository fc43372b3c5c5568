"""NVIDIA cards, by NVML, asked only where a driver is present."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from trainkit.machine.facts import Gpu, GpuProcess, MigInstance
from trainkit.machine.probes.processes import described

# Where a driver shows itself: on Linux, and in WSL. Elsewhere LD_LIBRARY_PATH leads to its library.
DRIVERS = ("dev/nvidiactl", "proc/driver/nvidia", "usr/lib/wsl/lib/libnvidia-ml.so.1")
LIBRARY = "libnvidia-ml.so.1"
NO_DRIVER = "no NVIDIA driver is loaded (neither /dev/nvidiactl nor /proc/driver/nvidia is there)"

# Bits of nvmlClocksEventReasons (NVML API reference) that hold a clock down, and what they mean.
THROTTLING: Mapping[int, str] = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "heat",
    0x40: "heat (hardware)",
    0x80: "power brake",
}
COMPUTE_MODES: Mapping[int, Literal["default", "exclusive", "prohibited"]] = {
    1: "exclusive",
    2: "prohibited",
    3: "exclusive",
}
_SM, _TEMPERATURE, _UNCORRECTED, _VOLATILE = 1, 0, 1, 0  # NVML's numbers for what is asked


def probe(root: Path = Path("/")) -> Mapping[str, Any]:
    """The cards in PCI order; none, and nothing imported, without a driver. Raises pynvml.NVMLError when NVML fails."""
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    shown = [root / driver for driver in DRIVERS] + [Path(folder, LIBRARY) for folder in libraries if folder]
    if not any(path.exists() for path in shown):
        return {"gpus": (), "notes": {"nvidia": NO_DRIVER}}
    import pynvml

    pynvml.nvmlInit()
    try:
        ask = Asked(pynvml)
        count = pynvml.nvmlDeviceGetCount()
        found: dict[str, Any] = {"gpus": tuple(ask.card(index) for index in range(count))}
        found["driver"] = ask.maybe("nvmlSystemGetDriverVersion", default="")
        version = ask.maybe("nvmlSystemGetCudaDriverVersion", default=0)
        found["cuda_driver"] = f"{version // 1000}.{version % 1000 // 10}" if version else ""
        if not count:
            found["notes"] = {"nvidia": "the NVIDIA driver sees no card"}
        return found
    finally:
        pynvml.nvmlShutdown()


class Asked:
    """NVML's answers about cards. What a card does not support is None; what it must know raises."""

    def __init__(self, pynvml: Any) -> None:
        self._nvml = pynvml

    def maybe(self, question: str, *arguments: Any, default: Any = None) -> Any:
        """The answer, or the default where card, driver or the installed nvidia-ml-py cannot give it."""
        ask = getattr(self._nvml, question, None)
        try:
            return default if ask is None else _text(ask(*arguments))
        except self._nvml.NVMLError:
            return default

    def card(self, index: int) -> Gpu:
        """Everything about one card."""
        nvml = self._nvml
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        total, free, reserved = self._memory(handle)
        pci = self.maybe("nvmlDeviceGetPciInfo", handle)
        enforced = self.maybe("nvmlDeviceGetEnforcedPowerLimit", handle)
        default = self.maybe("nvmlDeviceGetPowerManagementDefaultLimit", handle)
        use = self.maybe("nvmlDeviceGetUtilizationRates", handle)
        mode = self.maybe("nvmlDeviceGetMigMode", handle)
        mig = bool(mode and mode[0])
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        return Gpu(
            index=index,
            uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
            name=_text(nvml.nvmlDeviceGetName(handle)),
            memory_total=total,
            memory_free=free,
            compute_capability=(int(major), int(minor)),
            memory_reserved=reserved,
            pci_bus_id=_text(pci.busId) if pci else "",
            numa_node=near_node(_text(pci.busId)) if pci else None,
            cores=self.maybe("nvmlDeviceGetNumGpuCores", handle),
            clock=self.maybe("nvmlDeviceGetClockInfo", handle, _SM),
            clock_limit=self.maybe("nvmlDeviceGetMaxClockInfo", handle, _SM),
            power=_watts(self.maybe("nvmlDeviceGetPowerUsage", handle)),
            power_limit=_watts(enforced),
            power_default=_watts(default),
            temperature=self.maybe("nvmlDeviceGetTemperature", handle, _TEMPERATURE),
            utilization=int(use.gpu) if use else None,
            compute_mode=COMPUTE_MODES.get(self.maybe("nvmlDeviceGetComputeMode", handle, default=0), "default"),
            throttling=self._throttling(handle),
            ecc_errors=self.maybe("nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _VOLATILE),
            pending_repair=self._pending_repair(handle),
            mig=mig,
            instances=self._instances(handle) if mig else (),
            processes=self._processes(handle),
        )

    def _memory(self, handle: Any) -> tuple[int, int, int]:
        """Total, free, and the driver's own; zeros where a card shares the machine's memory and does not tell.

        The first version of the question counts the driver's own as used; the second, of driver 510, tells it apart.
        """
        memory = self.maybe("nvmlDeviceGetMemoryInfo", handle)
        if not memory:
            return 0, 0, 0
        version = getattr(self._nvml, "nvmlMemory_v2", None)
        newer = self.maybe("nvmlDeviceGetMemoryInfo", handle, version) if version is not None else None
        return int(memory.total), int(memory.free), int(newer.reserved) if newer else 0

    def _throttling(self, handle: Any) -> tuple[str, ...]:
        bits = self.maybe("nvmlDeviceGetCurrentClocksThrottleReasons", handle, default=0)
        return tuple(reason for bit, reason in THROTTLING.items() if bits & bit)

    def _pending_repair(self, handle: Any) -> bool | None:
        """Rows (Ampere and later) or pages (before) that wait for a reset."""
        rows = self.maybe("nvmlDeviceGetRemappedRows", handle)
        if rows is not None:
            return bool(rows[2])
        pages = self.maybe("nvmlDeviceGetRetiredPagesPendingStatus", handle)
        return None if pages is None else bool(pages)

    def _instances(self, handle: Any) -> tuple[MigInstance, ...]:
        found = []
        for place in range(self.maybe("nvmlDeviceGetMaxMigDeviceCount", handle, default=0)):
            part = self.maybe("nvmlDeviceGetMigDeviceHandleByIndex", handle, place)
            if part is None:  # places need not be filled
                continue
            total, free, _ = self._memory(part)
            name = self.maybe("nvmlDeviceGetName", part, default="")
            profile = name.partition("MIG ")[2] or f"{round(total / 2**30)}gb"
            found.append(
                MigInstance(_text(self._nvml.nvmlDeviceGetUUID(part)), profile, total, free, self._processes(part))
            )
        return tuple(found)

    def _processes(self, handle: Any) -> tuple[GpuProcess, ...]:
        """Those that compute, then those that only draw."""
        computing = self.maybe("nvmlDeviceGetComputeRunningProcesses", handle, default=[])
        drawing = self.maybe("nvmlDeviceGetGraphicsRunningProcesses", handle, default=[])
        pids = {each.pid for each in computing}
        return tuple(
            described(each.pid, memory=each.usedGpuMemory, graphics=graphics)
            for graphics, listed in ((False, computing), (True, drawing))
            for each in listed
            if not graphics or each.pid not in pids
        )


def near_node(bus_id: str, root: Path = Path("/")) -> int | None:
    """The NUMA node that a card hangs on, as the kernel tells; it writes domains with 4 digits, NVML with 8."""
    folder = root / "sys/bus/pci/devices" / bus_id.lower()[-12:]
    try:
        node = int((folder / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _text(value: Any) -> Any:
    """Older releases of nvidia-ml-py give bytes."""
    return value.decode() if isinstance(value, bytes) else value
