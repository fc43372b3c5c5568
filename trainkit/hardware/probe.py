"""Probe this machine once and give its Facts. Each probe is one module in `probes/`; a failing one becomes a note."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Mapping
from typing import Any

from trainkit.hardware.facts import Facts
from trainkit.hardware.probes import cpu, gpus, host, memory, mps, packages

# Name in Facts.notes -> what finds out a part of the facts: fields of Facts by name.
PROBES: Mapping[str, Callable[[], Mapping[str, Any]]] = {
    "host": host.probe,
    "cpu": cpu.probe,
    "memory": memory.probe,
    "gpus": gpus.probe,
    "mps": mps.probe,
    "packages": packages.probe,
}


def probe(probes: Mapping[str, Callable[[], Mapping[str, Any]]] = PROBES) -> Facts:
    """The facts of this machine. What a probe cannot find out is a note; neither torch nor a launcher is imported."""
    found: dict[str, Any] = {"hostname": "", "cpu_cores": 1, "memory_total": 0}
    notes: dict[str, str] = {}
    for name, find in probes.items():
        try:
            found |= find()
        except Exception as error:  # noqa: BLE001 - a library of a driver may raise anything; the reason is kept as a fact
            notes[name] = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return Facts(
        platform=sys.platform,
        machine=platform.machine(),
        python=platform.python_version(),
        executable=sys.executable,
        notes={**found.pop("notes", {}), **notes},
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        **found,
    )
