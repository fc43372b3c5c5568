"""Facts: what is true of a machine. Frozen, serializable, gathered by probes, consumed by planning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Gpu:
    """One accelerator. `index` is its position in PCI order (as nvidia-smi counts)."""

    index: int
    uuid: str
    name: str
    memory_total: int  # bytes
    memory_free: int  # bytes
    compute_capability: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Facts:
    """What planning may know of a machine.

    packages: version by distribution name, for the packages that plans depend on; absent means not installed.
    notes: what a probe could not find out, and why, by probe name (``nvml: driver not loaded``).
    visible_devices: the caller's CUDA_VISIBLE_DEVICES, None where unset.
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

    def to_json(self) -> dict[str, Any]:
        """Builtins only; :meth:`from_json` gives an equal value back."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Facts:
        """The inverse of :meth:`to_json`."""
        gpus = tuple(Gpu(**{**gpu, "compute_capability": tuple(gpu["compute_capability"])}) for gpu in data["gpus"])
        return cls(**{**data, "gpus": gpus})
