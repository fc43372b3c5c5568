"""Main memory that this process may use, in bytes: the machine's, or less where a cgroup says so."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from trainkit.machine.probes.cpu import cgroup

LIMITS = (("", "sys/fs/cgroup", "memory.max"), ("memory", "sys/fs/cgroup/memory", "memory.limit_in_bytes"))
USAGE = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}


def probe(root: Path = Path("/")) -> Mapping[str, int | None]:
    """root: where /proc and /sys are looked for."""
    total = min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_limits(root)])
    available = _available(root)
    return {"memory_total": total, "memory_available": None if available is None else min(available, total)}


def _available(root: Path) -> int | None:
    """What the kernel would give without swapping, on the whole machine."""
    try:
        told = re.search(r"^MemAvailable:\s+(\d+) kB", (root / "proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(told[1]) * 1024 if told else None


def available(root: Path = Path("/")) -> int:
    """Bytes that processes can still take: the system's estimate, or less where a cgroup leaves less.

    What there is in all where the system does not tell.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    told = _available(root)
    free = [total] if told is None else [total, told]
    for controller, mount, name in LIMITS:
        usage = USAGE[name]
        for folder in _folders(root, controller, mount):
            for limit in _number(folder / name):
                # what the kernel holds of files, it gives back when asked
                used = sum(_number(folder / usage)) - _field(folder / "memory.stat", "inactive_file")
                free.append(max(0, limit - used))
    return min(free)


def _field(path: Path, name: str) -> int:
    """The number behind a name; 0 where there is none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(words[1]) for line in lines if (words := line.split())[:1] == [name]), 0)


def _limits(root: Path) -> list[int]:
    found = []
    for controller, mount, name in LIMITS:
        for folder in _folders(root, controller, mount):
            found += _number(folder / name)
    return found


def _folders(root: Path, controller: str, mount: str) -> tuple[Path, ...]:
    """The cgroup's folder and all above it."""
    group = cgroup(root, controller)
    if group is None:
        return ()
    folder = root / mount / group.strip("/")
    return (folder, *folder.parents)


def _number(path: Path) -> list[int]:
    try:
        words = path.read_text().split()
    except OSError:
        return []
    return [int(word) for word in words if word.isdigit()]
