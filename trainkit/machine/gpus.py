"""Probe the GPUs: NVIDIA's through NVML, AMD's from the driver's files under /sys. No torch.

The compute topology (/sys/class/kfd) lists the nodes in the order in which ROCm counts them; a node with SIMD units is
a GPU (linux/drivers/gpu/drm/amd/amdkfd/kfd_topology.c).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from trainkit.machine.facts import Gpu, GpuProcess, MigInstance
from trainkit.machine.gpu_locks import user_name
from trainkit.machine.host import PCI, numa_node, number, text

TOPOLOGY = "sys/class/kfd/kfd/topology/nodes"


def probe_amd(root: Path = Path("/")) -> Mapping[str, Any]:
    """The GPUs under the name `amd`, which `probe` joins to the others; none without the driver."""
    folders = sorted((root / TOPOLOGY).glob("[0-9]*"), key=lambda path: int(path.name))
    pairs = [[line.split() for line in text(folder / "properties").splitlines()] for folder in folders]
    nodes = [{pair[0]: pair[1] for pair in lines if len(pair) == 2} for lines in pairs]
    cards = [node for node in nodes if int(node.get("simd_count", "0"))]  # the others are processors
    return {"amd": tuple(_card(root, index, node) for index, node in enumerate(cards))}


def _card(root: Path, index: int, node: Mapping[str, str]) -> Gpu:
    location, domain = int(node.get("location_id", "0")), int(node.get("domain", "0"))
    # As PCI packs it: 8 bits of bus, 5 of device, 3 of function.
    bus = f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7}"
    device = root / PCI / bus
    total, used = (number(device / f"mem_info_vram_{which}") or 0 for which in ("total", "used"))
    version = int(node.get("gfx_target_version", "0"))  # 90402 is gfx942: 9.4.2
    unique = int(node.get("unique_id", "0"))
    return Gpu(
        index=index,
        uuid=f"GPU-{unique:016x}" if unique else f"PCI-{bus}",
        name=text(device / "product_name") or f"AMD gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}",
        memory_total=total,
        memory_free=total - used,
        compute_capability=(version // 10000, version // 100 % 100),
        vendor="amd",
        pci_bus_id=bus,
        numa_node=numa_node(root, bus),
        clock_limit=int(node.get("max_engine_clk_fcompute", "0")) or None,
        utilization=number(device / "gpu_busy_percent"),
    )


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
# 3 is one process; 1, one thread, is deprecated (NVML API reference, device enumerations).
COMPUTE_MODES: Mapping[int, Literal["default", "exclusive", "prohibited"]] = {
    1: "exclusive",
    2: "prohibited",
    3: "exclusive",
}
_SM, _TEMPERATURE, _UNCORRECTED, _VOLATILE = 1, 0, 1, 0  # NVML's numbers for what is asked
LONGEST = 200  # characters of a command that a person still reads


def probe_nvidia(root: Path = Path("/")) -> Mapping[str, Any]:
    """The GPUs in PCI order; none, and nothing imported, without a driver. Raises pynvml.NVMLError when NVML fails."""
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    shown = [root / driver for driver in DRIVERS] + [Path(folder, LIBRARY) for folder in libraries if folder]
    if not any(path.exists() for path in shown):
        return {"gpus": (), "notes": {"nvidia": NO_DRIVER}}
    import pynvml

    pynvml.nvmlInit()
    try:
        ask = NvmlQueries(pynvml)
        count = pynvml.nvmlDeviceGetCount()
        # 1000 x major + 10 x minor: 12040 is CUDA 12.4.
        version = ask.maybe("nvmlSystemGetCudaDriverVersion", default=0)
        return {
            "gpus": tuple(ask.card(index) for index in range(count)),
            "driver": ask.maybe("nvmlSystemGetDriverVersion", default=""),
            "cuda_driver": f"{version // 1000}.{version % 1000 // 10}" if version else "",
            "notes": {} if count else {"nvidia": "the NVIDIA driver sees no GPU"},
        }
    finally:
        pynvml.nvmlShutdown()


class NvmlQueries:
    """NVML's answers about GPUs. What a GPU does not support is None; what it must know raises."""

    def __init__(self, pynvml: Any) -> None:
        self._nvml = pynvml

    def must(self, question: str, *arguments: Any) -> Any:
        """The answer. Raises pynvml.NVMLError."""
        return _text(getattr(self._nvml, question)(*arguments))

    def maybe(self, question: str, *arguments: Any, default: Any = None) -> Any:
        """The answer, or the default where GPU, driver or the installed nvidia-ml-py cannot give it."""
        try:
            return self.must(question, *arguments) if hasattr(self._nvml, question) else default
        except self._nvml.NVMLError:
            return default

    def card(self, index: int) -> Gpu:
        """Everything about one GPU."""
        handle = self.must("nvmlDeviceGetHandleByIndex", index)
        total, free, reserved = self.memory(handle) or (0, 0, 0)
        pci = self.maybe("nvmlDeviceGetPciInfo", handle)
        bus_id = _text(pci.busId) if pci else ""
        use = self.maybe("nvmlDeviceGetUtilizationRates", handle)
        mode = self.maybe("nvmlDeviceGetMigMode", handle)
        mig = bool(mode and mode[0])
        major, minor = self.must("nvmlDeviceGetCudaComputeCapability", handle)
        throttled = self.maybe("nvmlDeviceGetCurrentClocksThrottleReasons", handle, default=0)
        return Gpu(
            index=index,
            uuid=self.must("nvmlDeviceGetUUID", handle),
            name=self.must("nvmlDeviceGetName", handle),
            memory_total=total,
            memory_free=free,
            compute_capability=(int(major), int(minor)),
            memory_reserved=reserved,
            pci_bus_id=bus_id,
            numa_node=numa_node(Path("/"), bus_id) if pci else None,
            cores=self.maybe("nvmlDeviceGetNumGpuCores", handle),
            clock=self.maybe("nvmlDeviceGetClockInfo", handle, _SM),
            clock_limit=self.maybe("nvmlDeviceGetMaxClockInfo", handle, _SM),
            power=self._watts("nvmlDeviceGetPowerUsage", handle),
            power_limit=self._watts("nvmlDeviceGetEnforcedPowerLimit", handle),
            power_default=self._watts("nvmlDeviceGetPowerManagementDefaultLimit", handle),
            temperature=self.maybe("nvmlDeviceGetTemperature", handle, _TEMPERATURE),
            utilization=int(use.gpu) if use else None,
            compute_mode=COMPUTE_MODES.get(self.maybe("nvmlDeviceGetComputeMode", handle, default=0), "default"),
            throttling=tuple(reason for bit, reason in THROTTLING.items() if throttled & bit),
            ecc_errors=self.maybe("nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _VOLATILE),
            pending_repair=self._pending_repair(handle),
            mig=mig,
            instances=self._instances(handle) if mig else (),
            processes=self._processes(handle),
        )

    def _watts(self, question: str, handle: Any) -> float | None:
        milliwatts = self.maybe(question, handle)
        return None if milliwatts is None else milliwatts / 1000

    def memory(self, handle: Any) -> tuple[int, int, int] | None:
        """Total, free, and the driver's own; None where a GPU shares the machine's memory and does not report it."""
        # The first version of the question counts the driver's own as used; the second, of driver 510, keeps it apart.
        version = getattr(self._nvml, "nvmlMemory_v2", None)
        if version is not None and (newer := self.maybe("nvmlDeviceGetMemoryInfo", handle, version)):
            return int(newer.total), int(newer.free), int(newer.reserved)
        memory = self.maybe("nvmlDeviceGetMemoryInfo", handle)
        return (int(memory.total), int(memory.free), 0) if memory else None

    def _pending_repair(self, handle: Any) -> bool | None:
        """Rows (Ampere and later) or pages (before) that wait for a reset."""
        rows = self.maybe("nvmlDeviceGetRemappedRows", handle)
        waiting = self.maybe("nvmlDeviceGetRetiredPagesPendingStatus", handle) if rows is None else rows[2]
        return None if waiting is None else bool(waiting)

    def _instances(self, handle: Any) -> tuple[MigInstance, ...]:
        found = []
        for place in range(self.maybe("nvmlDeviceGetMaxMigDeviceCount", handle, default=0)):
            part = self.maybe("nvmlDeviceGetMigDeviceHandleByIndex", handle, place)
            if part is None:  # places need not be filled
                continue
            total, free, reserved = self.memory(part) or (0, 0, 0)
            name = self.maybe("nvmlDeviceGetName", part, default="")  # NVIDIA A100-SXM4-80GB MIG 1g.10gb
            profile = name.partition("MIG ")[2] or f"{round(total / 2**30)}gb"
            uuid = self.must("nvmlDeviceGetUUID", part)
            found.append(MigInstance(uuid, profile, total, free, self._processes(part), memory_reserved=reserved))
        return tuple(found)

    def _processes(self, handle: Any) -> tuple[GpuProcess, ...]:
        """Those that compute, then those that only draw."""
        computing = self.maybe("nvmlDeviceGetComputeRunningProcesses", handle, default=[])
        drawing = self.maybe("nvmlDeviceGetGraphicsRunningProcesses", handle, default=[])
        pids = {each.pid for each in computing}
        found = [(each, False) for each in computing] + [(each, True) for each in drawing if each.pid not in pids]
        return tuple(
            GpuProcess(each.pid, *owner_and_command(each.pid), each.usedGpuMemory, graphics) for each, graphics in found
        )


def _text(value: Any) -> Any:
    """Older releases of nvidia-ml-py give bytes."""
    return value.decode() if isinstance(value, bytes) else value


def owner_and_command(pid: int) -> tuple[str, str]:
    """The user's name and the command line, secret values masked; empty for what is not visible.

    A driver gives pids of the host, which a container may not see.
    """
    from trainkit.recipe.secrets import mask_words

    owner = ""
    try:
        owner = user_name(os.stat(f"/proc/{pid}").st_uid)  # noqa: PTH116 - one system call
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
        name = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return owner, ""
    text = " ".join(mask_words(words)) if words else name  # kernel threads have no argv
    # A terminal would obey control characters.
    return owner, "".join(letter if letter.isprintable() else "?" for letter in text[:LONGEST])
