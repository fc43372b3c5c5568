"""CPU cores that this process may use, affinity and cgroup limits counted, and the NUMA nodes that they belong to."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainkit.machine.cpu_affinity import core_list
from trainkit.machine.facts import NumaNode
from trainkit.machine.probes.kernel_files import CGROUPS, cgroups, text


def probe(root: Path = Path("/")) -> Mapping[str, Any]:
    """At least one core. root: where /proc and /sys are looked for."""
    affinity = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []  # macOS has none
    total = os.cpu_count()
    cores = len(affinity) or total or 1
    limit, name = _limit(root), ""
    # Line by line: the kernel makes the file while it is read, core by core.
    with contextlib.suppress(OSError), (root / "proc/cpuinfo").open(errors="replace") as lines:
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "cpu_cores": max(min(cores, cores if limit is None else int(limit)), 1),
        "cpu_total": total,
        "cpu_affinity": tuple(affinity),
        "cpu_limit": limit,
        "cpu_name": name,
    }


def _limit(root: Path) -> float | None:
    """The tightest limit of the process's own cgroup and of those above it, in cores; None without one."""
    files: list[tuple[Path, ...]] = [(folder / "cpu.max",) for folder in cgroups(root, "")]
    for mount in ("cpu", "cpu,cpuacct"):
        groups = cgroups(root, "cpu", f"{CGROUPS}/{mount}")
        files += [(folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us") for folder in groups]
    quotas = [[word for path in paths for word in text(path).split()] for paths in files]
    # microseconds of CPU in each period; `max` and -1 are no limit
    limited = [pair for pair in quotas if len(pair) == 2 and pair[0].isdigit() and pair[1].isdigit() and int(pair[1])]
    return min((int(quota) / int(period) for quota, period in limited), default=None)


def probe_numa(root: Path = Path("/")) -> Mapping[str, tuple[NumaNode, ...]]:
    """Which cores are near to which part of the memory, in the order of nodes; none where the system does not say."""
    found = [_node(path) for path in (root / "sys/devices/system/node").glob("node*") if path.name[4:].isdigit()]
    return {"numa": tuple(sorted(found, key=lambda node: node.index))}


def _node(folder: Path) -> NumaNode:
    memory = re.search(r"MemTotal:\s+(\d+) kB", (folder / "meminfo").read_text())
    cpus = core_list((folder / "cpulist").read_text())
    return NumaNode(int(folder.name[4:]), cpus, int(memory[1]) * 1024 if memory else 0)
