"""Measurements of runs in the user's cache, a file for each device, driver and torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainkit.files import cache_folder, read_json, write_json
from trainkit.foresight.calibration import MOST, Record, device_key, records_of
from trainkit.machine.facts import Facts


def device_of(facts: Facts, card: str) -> dict[str, str]:
    """What a measurement holds for. card: the GPU's name; empty for the CPU."""
    version = facts.packages.get("torch", "")
    return {"device": card or f"{facts.cpu_name or facts.machine}, {facts.cpu_cores} cores",
            "driver": facts.driver if card else "", "torch": version}  # fmt: skip


def _path(device: Mapping[str, str], environ: Mapping[str, str]) -> Path | None:
    folder = cache_folder(environ, "measured")
    return Path(folder, f"{device_key(*device.values())}.json") if folder else None


def measurements(device: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> list[Record]:
    """Those of a device, the oldest first."""
    path = _path(device, environ)
    return records_of(read_json(path)) if path else []


def every_measurement(environ: Mapping[str, str] = os.environ) -> list[tuple[dict[str, str], list[Record]]]:
    """Each device of which something is known, with its measurements."""
    folder = cache_folder(environ, "measured")
    found = []
    for path in sorted(Path(folder).glob("*.json")) if folder else ():
        data: dict[str, Any] = read_json(path)
        if records := records_of(data):
            found.append(({name: str(data.get(name, "")) for name in ("device", "driver", "torch")}, records))
    return found


def remember(device: Mapping[str, str], record: Record, environ: Mapping[str, str] = os.environ) -> None:
    """Add a measurement; the oldest give way. Without a home, or on a full disk, it is lost, which ends nothing."""
    path = _path(device, environ)
    if path is None:
        return
    kept = [*measurements(device, environ), record][-MOST:]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {**device, "records": [each._asdict() for each in kept]})
    except OSError:
        return
