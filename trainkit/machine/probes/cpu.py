"""CPU cores that this process may use: affinity and cgroup limits counted."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def probe(root: Path = Path("/")) -> Mapping[str, Any]:
    """At least one core. root: where /proc and /sys are looked for."""
    affinity = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    total = os.cpu_count()
    cores = len(affinity) or total or 1
    limit = min((each for each in (quota_v2(root), quota_v1(root)) if each is not None), default=None)
    return {
        "cpu_cores": max(min(cores, cores if limit is None else int(limit)), 1),
        "cpu_total": total,
        "cpu_affinity": tuple(affinity),
        "cpu_limit": limit,
        "cpu_name": _name(root),
    }


def _name(root: Path) -> str:
    """What the processor calls itself; empty where /proc does not say."""
    try:
        with (root / "proc/cpuinfo").open(errors="replace") as lines:
            told = next((line for line in lines if line.startswith("model name")), "")
    except OSError:
        return ""
    return told.partition(":")[2].strip()


def quota_v2(root: Path) -> float | None:
    """The tightest `cpu.max` from the process's own cgroup up to the root, in cores."""
    group = cgroup(root, "")
    if group is None:
        return None
    found = [_ratio(*_words(folder / "cpu.max")) for folder in _upwards(root / "sys/fs/cgroup", group)]
    return min((limit for limit in found if limit is not None), default=None)


def quota_v1(root: Path) -> float | None:
    """The tightest CFS quota, in cores."""
    group = cgroup(root, "cpu")
    if group is None:
        return None
    found = []
    for mount in ("cpu", "cpu,cpuacct"):
        for folder in _upwards(root / "sys/fs/cgroup" / mount, group):
            quota, period = _words(folder / "cpu.cfs_quota_us"), _words(folder / "cpu.cfs_period_us")
            found.append(_ratio(*quota, *period))
    return min((limit for limit in found if limit is not None), default=None)


def cgroup(root: Path, controller: str) -> str | None:
    """The process's cgroup path: of the unified hierarchy for an empty controller, else of that controller's (v1)."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path
    return None


def _upwards(mount: Path, group: str) -> list[Path]:
    """The group's folder and all above it; inside a container the path may not exist, and the mount itself counts."""
    folder = mount / group.strip("/")
    return [path for path in (folder, *folder.parents) if path == mount or mount in path.parents]


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _ratio(quota: str = "", period: str = "") -> float | None:
    """Cores from microseconds of CPU in each period; `max` and -1 are no limit."""
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:
        return None
    return int(quota) / int(period)
