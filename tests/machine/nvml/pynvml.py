"""A stand-in for nvidia-ml-py: first on PYTHONPATH, it tells of the made-up machine in the JSON file FAKE_NVML names.

The file is {"cards": [CARD…], "driver": …} or {"fails": "init" | "cards", "message": …} or {"hangs": SECONDS} or
{"crashes": true}. A CARD has uuid, name, total, free and capability, and may have any of the keys that are read below.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    """As NVML's: any question may end in one."""


_machine: dict[str, Any] = {}


def nvmlInit() -> None:
    _machine.clear()
    _machine.update(json.loads(Path(os.environ["FAKE_NVML"]).read_text()))
    if _machine.get("fails") == "init":
        raise NVMLError(_machine["message"])
    if "hangs" in _machine:
        time.sleep(_machine["hangs"])
    if "crashes" in _machine:
        os.abort()


def nvmlShutdown() -> None:
    _machine.clear()


def nvmlSystemGetDriverVersion() -> bytes:
    return str(_machine.get("driver", "580.82.07")).encode()


def nvmlSystemGetCudaDriverVersion() -> int:
    return int(_machine.get("cuda", 13000))


def nvmlDeviceGetCount() -> int:
    return len(_machine["cards"])


def nvmlDeviceGetHandleByIndex(index: int) -> dict[str, Any]:
    if _machine.get("fails") == "cards":
        raise NVMLError(_machine["message"])
    card: dict[str, Any] = _machine["cards"][index]
    return card


def nvmlDeviceGetHandleByUUID(uuid: bytes | str) -> dict[str, Any]:
    wanted = uuid.decode() if isinstance(uuid, bytes) else uuid
    for card in _machine["cards"]:
        for part in (card, *card.get("instances", [])):
            if part["uuid"] == wanted:
                return dict(part)
    raise NVMLError("Not Found")


def _told(card: dict[str, Any], key: str) -> Any:
    if key not in card:
        raise NVMLError("Not Supported")
    return card[key]


def nvmlDeviceGetUUID(card: dict[str, Any]) -> str:
    return str(card["uuid"])


def nvmlDeviceGetName(card: dict[str, Any]) -> str:
    return str(card["name"])


nvmlMemory_v2 = 0x02000028


def nvmlDeviceGetMemoryInfo(card: dict[str, Any], version: int | None = None) -> SimpleNamespace:
    total, free = _told(card, "total"), _told(card, "free")
    if version is None:
        return SimpleNamespace(total=total, free=free, used=total - free)
    reserved = _told(card, "reserved")
    return SimpleNamespace(total=total, free=free, used=total - free - reserved, reserved=reserved)


def nvmlDeviceGetCudaComputeCapability(card: dict[str, Any]) -> tuple[int, int]:
    major, minor = card["capability"]
    return major, minor


def nvmlDeviceGetPciInfo(card: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(busId=str(_told(card, "bus")).encode())


def nvmlDeviceGetUtilizationRates(card: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(gpu=_told(card, "use"), memory=0)


def nvmlDeviceGetNumGpuCores(card: dict[str, Any]) -> int:
    return int(_told(card, "cores"))


def nvmlDeviceGetMaxClockInfo(card: dict[str, Any], kind: int) -> int:
    return int(_told(card, "clock_limit"))


def nvmlDeviceGetEnforcedPowerLimit(card: dict[str, Any]) -> int:
    return int(_told(card, "power_limit") * 1000)


def nvmlDeviceGetPowerUsage(card: dict[str, Any]) -> int:
    return int(_told(card, "power") * 1000)


def nvmlDeviceGetTemperature(card: dict[str, Any], sensor: int) -> int:
    return int(_told(card, "temperature"))


def nvmlDeviceGetComputeMode(card: dict[str, Any]) -> int:
    return int(_told(card, "compute_mode"))


def nvmlDeviceGetCurrentClocksThrottleReasons(card: dict[str, Any]) -> int:
    return int(_told(card, "throttling"))


def nvmlDeviceGetTotalEccErrors(card: dict[str, Any], kind: int, counter: int) -> int:
    return int(_told(card, "ecc_errors"))


def nvmlDeviceGetRemappedRows(card: dict[str, Any]) -> tuple[int, int, int, int]:
    return 0, 0, int(_told(card, "pending_repair")), 0


def nvmlDeviceGetMigMode(card: dict[str, Any]) -> list[int]:
    return [int("instances" in card)] * 2


def nvmlDeviceGetMaxMigDeviceCount(card: dict[str, Any]) -> int:
    return 7


def nvmlDeviceGetMigDeviceHandleByIndex(card: dict[str, Any], place: int) -> dict[str, Any]:
    if place >= len(card["instances"]):
        raise NVMLError("Not Found")
    part: dict[str, Any] = card["instances"][place]
    return part


def _processes(card: dict[str, Any], kind: str) -> list[SimpleNamespace]:
    return [SimpleNamespace(pid=each["pid"], usedGpuMemory=each.get("memory")) for each in card.get(kind, [])]


def nvmlDeviceGetComputeRunningProcesses(card: dict[str, Any]) -> list[SimpleNamespace]:
    return _processes(card, "computing")


def nvmlDeviceGetGraphicsRunningProcesses(card: dict[str, Any]) -> list[SimpleNamespace]:
    return _processes(card, "drawing")
