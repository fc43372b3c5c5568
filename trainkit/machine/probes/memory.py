"""Main memory that this process may use, in bytes: the machine's, or less where a cgroup says so."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from trainkit.machine.probes.kernel_files import CGROUPS, cgroups, number, text

# controller, where its groups are, the files of the limit and of what is in use; cgroups of version 2, then 1
LIMITS = (
    ("", CGROUPS, "memory.max", "memory.current"),
    ("memory", f"{CGROUPS}/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def probe(root: Path = Path("/")) -> Mapping[str, int | None]:
    """root: where /proc and /sys are looked for."""
    installed, free = _whole_machine(root)
    total = min([installed, *(limit for _, limit, _ in _limits(root))])
    return {"memory_total": total, "memory_available": None if free is None else min(free, total)}


def available(root: Path = Path("/")) -> int:
    """Bytes that processes can still take: the system's estimate, or less where a cgroup leaves less.

    What there is in all where the system does not say.
    """
    installed, free = _whole_machine(root)
    left = [installed if free is None else min(installed, free)]
    for folder, limit, in_use in _limits(root):
        # What the kernel holds of files counts as in use, and is given back when asked for.
        statistics = text(folder / "memory.stat").split()
        files = dict(zip(statistics[::2], statistics[1::2], strict=False)).get("inactive_file", "0")
        left.append(max(0, limit - (in_use - int(files))))
    return min(left)


def _whole_machine(root: Path) -> tuple[int, int | None]:
    """What is installed, and what the kernel would give of it without swapping (None where it does not say)."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text(root / "proc/meminfo"), re.MULTILINE)
    return installed, int(found[1]) * 1024 if found else None


def _limits(root: Path) -> list[tuple[Path, int, int]]:
    """(cgroup, its limit, what is in use of it) of every cgroup around this process that has a limit."""
    return [
        (folder, limit, number(folder / usage) or 0)
        for controller, mount, name, usage in LIMITS
        for folder in cgroups(root, controller, mount)
        if (limit := number(folder / name)) is not None
    ]
