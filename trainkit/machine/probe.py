"""Probe this machine once and give its Facts. Each probe is one module in `probes/`; a failing one becomes a note."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from trainkit.machine.bounded import answers
from trainkit.machine.facts import Facts, TorchBuild
from trainkit.machine.held_cards import with_holders
from trainkit.machine.probes import amd, cpu, host, memory, nvidia, packages, scheduler

Probe = Callable[[], Mapping[str, Any]]

# Name in Facts.notes -> what finds out a part of the facts: fields of Facts by name.
PROBES: Mapping[str, Probe] = {
    "host": host.probe,
    "cpu": cpu.probe,
    "memory": memory.probe,
    "numa": cpu.probe_numa,
    "torch": packages.probe_torch,
    "packages": packages.probe,
    "mps": host.probe_mps,
    "scheduler": scheduler.probe,
    "amd": amd.probe,
    "gpus": nvidia.probe,
}
CARD_PROBES = {name: PROBES[name] for name in ("host", "torch", "mps", "amd", "gpus")}
SECONDS = 5.0  # for one probe
# A driver without persistence mode wakes each card first, which takes seconds for every one of them.
LIMITS: Mapping[str, float] = {"gpus": 30.0}


def probe(probes: Mapping[str, Probe] = PROBES, limits: Mapping[str, float] = LIMITS) -> Facts:
    """The facts of this machine. What a probe cannot find out is a note; neither torch nor a launcher is imported.

    limits: seconds that a probe may take, SECONDS where it is not named.
    """
    found: dict[str, Any] = {"hostname": "", "cpu_cores": 1, "memory_total": 0}
    notes: dict[str, str] = {}
    for name, answer in answers(probes, lambda name: limits.get(name, SECONDS)):
        if isinstance(answer, str):
            notes[name] = answer
            continue
        notes |= answer.get("notes", {})
        found |= {key: value for key, value in answer.items() if key != "notes"}
    _choose_make(found, notes)
    facts = Facts(
        platform=sys.platform,
        machine=platform.machine(),
        python=platform.python_version(),
        executable=sys.executable,
        notes=notes,
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        device_order=os.environ.get("CUDA_DEVICE_ORDER"),
        hip_devices=os.environ.get("HIP_VISIBLE_DEVICES"),
        rocr_devices=os.environ.get("ROCR_VISIBLE_DEVICES"),
        **found,
    )
    return replace(facts, gpus=with_holders(facts.gpus, os.environ)) if facts.gpus else facts


def _choose_make(found: dict[str, Any], notes: dict[str, str]) -> None:
    """One torch is built for one make of cards; AMD's count where it is ROCm's."""
    cards, build = found.pop("amd", ()), found.get("torch")
    if not cards:
        return
    if isinstance(build, TorchBuild) and build.hip:
        found["gpus"] = cards
    else:
        notes["amd"] = f"{len(cards)} AMD card(s) are here, and the installed torch is no ROCm build"
