"""Main memory that this process may use, in bytes: the machine's, or less where a cgroup says so."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from trainkit.machine.probes import cgroups

# controller, where its groups are, the files of the limit and of what is in use; cgroups of version 2, then 1
CGROUPS = (
    ("", cgroups.ROOT, "memory.max", "memory.current"),
    ("memory", f"{cgroups.ROOT}/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def probe(root: Path = Path("/")) -> Mapping[str, int | None]:
    """root: where /proc and /sys are looked for."""
    total = min([_installed(), *(limit for _, limit, _ in _limits(root))])
    free = _without_swapping(root)
    return {"memory_total": total, "memory_available": None if free is None else min(free, total)}


def available(root: Path = Path("/")) -> int:
    """Bytes that processes can still take: the system's estimate, or less where a cgroup leaves less.

    What there is in all where the system does not tell.
    """
    free = _without_swapping(root)
    left = [_installed()] if free is None else [_installed(), free]
    for folder, limit, in_use in _limits(root):
        # what the kernel holds of files, it gives back when asked
        statistics = cgroups.values(folder / "memory.stat")
        files = dict(zip(statistics[::2], statistics[1::2], strict=False)).get("inactive_file", "0")
        left.append(max(0, limit - (in_use - int(files))))
    return min(left)


def _installed() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _without_swapping(root: Path) -> int | None:
    """What the kernel would give without swapping, on the whole machine."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", (root / "proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def _limits(root: Path) -> list[tuple[Path, int, int]]:
    """(cgroup, its limit, what is in use of it) of every cgroup around this process that has a limit."""
    return [
        (folder, limit, sum(_number(folder / usage)))
        for controller, mount, name, usage in CGROUPS
        for folder in cgroups.folders(root, controller, mount)
        for limit in _number(folder / name)
    ]


def _number(path: Path) -> list[int]:
    """The number in a file; none for `max` and where there is no such file."""
    return [int(word) for word in cgroups.values(path) if word.isdigit()]
