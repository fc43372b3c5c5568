"""The facts of a machine that a plan is made from: GPUs, packages, cores, memory; as data, nothing is probed here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from trainkit.decode import DecodeError, decode
from trainkit.errors import UsageError

# feature -> (package, first version that has it)
FEATURES: dict[str, tuple[str, str]] = {
    # https://github.com/pytorch/pytorch/pull/172596, seen in 2.13; taken as absent before, to be safe
    "torchrun --shutdown-timeout": ("torch", "2.13"),
    # https://github.com/pytorch/pytorch/pull/160690
    "torchrun --signals-to-handle": ("torch", "2.9"),
    # accelerate, utils/launch.py of 1.8 to 1.15: what is set for a worker
    "accelerate sets KMP_* on a CPU only": ("accelerate", "1.13"),
    "accelerate sets FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": ("accelerate", "1.15"),
    # deepspeed/__init__.py of 0.18.9 to 0.19.8
    "deepspeed sets PYTORCH_NVML_BASED_CUDA_CHECK": ("deepspeed", "0.19.3"),
}

_RELEASE = re.compile(r"\d+(?:\.\d+)*")


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version: ``2.13.0+cpu`` is (2, 13, 0); an unreadable one is ()."""
    found = _RELEASE.match(version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def at_least(version: str | None, minimum: str) -> bool:
    """Whether an installed version is the minimum or newer; False where it is not installed."""
    return version is not None and release(version) >= release(minimum)


def has(facts: Facts, feature: str) -> bool:
    """Whether the installed libraries have a feature of the table."""
    package, minimum = FEATURES[feature]
    return at_least(facts.packages.get(package), minimum)


FACTS_VERSION = 1


@dataclass(frozen=True, slots=True)
class Hold:
    """Who has taken a GPU for a run of trainkit's, or waits for it. run: its directory; of one that waits its name."""

    pid: int
    user: str
    run: str


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process on a GPU. pid and user as this process sees them; in a container others may have neither.

    memory: bytes, None where the driver does not say (MIG, WSL). graphics: it only draws (a desktop).
    """

    pid: int
    user: str = ""
    command: str = ""
    memory: int | None = None
    graphics: bool = False


@dataclass(frozen=True, slots=True)
class MigInstance:
    """A part of a GPU that MIG split off. profile: as NVIDIA names it (``1g.10gb``). Memory in bytes."""

    uuid: str
    profile: str
    memory_total: int
    memory_free: int
    processes: tuple[GpuProcess, ...] = ()
    held_by: Hold | None = None
    memory_reserved: int = 0  # the driver's own, never free
    wanted_by: Hold | None = None


@dataclass(frozen=True, slots=True)
class Gpu:
    """One accelerator. `index` is its position in PCI order (as nvidia-smi counts).

    What a driver or a GPU does not report is None (for counts and rates) or empty.
    cores: arithmetic units as NVIDIA counts them. mig: whether the GPU is split; then only its `instances`
    can be used.
    throttling: why the clock is held down just now (``power cap``, ``heat``), without the harmless reasons.
    ecc_errors: uncorrectable memory errors since the driver was loaded.
    pending_repair: the GPU waits for a reset to take bad memory out of use.
    wanted_by: the first run in line that may take it, which waits for this or other GPUs (machine/gpu_queue.py).
    """

    index: int
    uuid: str
    name: str
    memory_total: int  # bytes
    memory_free: int  # bytes
    compute_capability: tuple[int, int]
    memory_reserved: int = 0  # bytes, the driver's own, never free
    vendor: Literal["nvidia", "amd"] = "nvidia"
    pci_bus_id: str = ""  # domain:bus:device.function
    numa_node: int | None = None
    cores: int | None = None
    clock: int | None = None  # MHz, of the arithmetic units, now
    clock_limit: int | None = None  # MHz
    power: float | None = None  # watts, now
    power_limit: float | None = None  # watts, in force
    power_default: float | None = None  # watts, as delivered
    temperature: int | None = None  # degrees Celsius
    utilization: int | None = None  # percent of the last second or so in which a kernel ran
    compute_mode: Literal["default", "exclusive", "prohibited"] = "default"
    throttling: tuple[str, ...] = ()
    ecc_errors: int | None = None
    pending_repair: bool | None = None
    mig: bool = False
    instances: tuple[MigInstance, ...] = ()
    processes: tuple[GpuProcess, ...] = ()
    held_by: Hold | None = None
    wanted_by: Hold | None = None


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """What torch was built for, from its version file. cuda, hip: the toolkit's version, if any.

    backends: what it compiles with, as it says itself where a plan depends on it; empty where it was not asked.
    """

    version: str
    cuda: str | None = None
    hip: str | None = None
    backends: tuple[str, ...] = ()

    @property
    def built_for(self) -> str:
        """The platform: CUDA or ROCm with the version, or CPUs."""
        return f"CUDA {self.cuda}" if self.cuda else f"ROCm {self.hip}" if self.hip else "CPUs"

    @property
    def label(self) -> str:
        return f"torch {self.version}, built for {self.built_for}"


@dataclass(frozen=True, slots=True)
class NumaNode:
    """Cores that are near to one part of the memory. cpus: all of the node's, whether usable here or not."""

    index: int
    cpus: tuple[int, ...]
    memory_total: int  # bytes


@dataclass(frozen=True, slots=True)
class Allocation:
    """What a scheduler gave to this process. variables: those of its environment that describe it, unchanged."""

    scheduler: str
    job: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Facts:
    """What planning may know of a machine.

    packages: version by distribution name, for the packages that plans depend on; absent means not installed.
    notes: what a probe could not find out, and why, by probe name (``gpus: the driver is not loaded``); ``nvidia`` and
    ``amd`` say why there is no GPU of that make where nothing failed.
    visible_devices, device_order, hip_devices, rocr_devices: the caller's CUDA_VISIBLE_DEVICES, CUDA_DEVICE_ORDER,
    HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES, None where unset. allocator: what the caller tells torch's allocator
    for CUDA (PYTORCH_CUDA_ALLOC_CONF, or PYTORCH_ALLOC_CONF), None where both are unset.
    driver, cuda_driver: of the NVIDIA driver, its version and the newest CUDA that it runs; empty without one.
    architectures: by type of model that the installed transformers knows, the tasks that it has a class for; looked
        up for recipes alone that train one.
    nccl: version of the NCCL that is installed beside torch; empty where there is none.
    price_per_hour: of the machine, in whatever currency its profile is in; None where nothing says it.
    origin: where facts that were not probed here come from (a file, a profile); empty for this machine.
    """

    platform: str  # sys.platform
    machine: str  # platform.machine()
    hostname: str
    python: str  # version
    executable: str  # sys.executable
    cpu_cores: int  # usable by this process: affinity and cgroup limits counted
    memory_total: int  # bytes
    gpus: tuple[Gpu, ...] = ()
    mps: bool = False
    packages: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    visible_devices: str | None = None
    device_order: str | None = None
    hip_devices: str | None = None
    rocr_devices: str | None = None
    allocator: str | None = None
    system: str = ""  # name and version of the operating system
    kernel: str = ""
    cpu_name: str = ""
    cpu_total: int | None = None  # logical cores of the whole machine
    cpu_affinity: tuple[int, ...] = ()  # logical cores that this process may use
    cpu_limit: float | None = None  # cores, of the tightest cgroup
    memory_available: int | None = None  # bytes, now
    numa: tuple[NumaNode, ...] = ()
    torch: TorchBuild | None = None
    architectures: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    driver: str = ""
    cuda_driver: str = ""
    nccl: str = ""
    allocation: Allocation | None = None
    price_per_hour: float | None = None
    origin: str = ""

    def to_json(self) -> dict[str, Any]:
        """Builtins only; :meth:`from_json` gives an equal value back."""
        return {"facts_version": FACTS_VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, data: object) -> Facts:
        """The inverse of :meth:`to_json`. Raises UsageError for what is not the facts of a machine."""
        hint = "make them on the machine in question: trainkit env facts > FACTS.json"
        if not isinstance(data, Mapping) or "facts_version" not in data:
            raise UsageError("these are not the facts of a machine: there is no facts_version", hint=hint)
        if (found := data["facts_version"]) != FACTS_VERSION:
            what = f"these facts are of version {found!r}, and this trainkit reads version {FACTS_VERSION}"
            raise UsageError(what, hint=hint)
        try:
            facts: Facts = decode(cls, {name: value for name, value in data.items() if name != "facts_version"})
        except DecodeError as error:
            raise UsageError(f"facts: {error}", hint=hint) from error
        return facts
