"""What the kernel shows in small files: texts and numbers, the cgroups around this process, a card's NUMA node."""

from __future__ import annotations

from pathlib import Path

CGROUPS, PCI = "sys/fs/cgroup", "sys/bus/pci/devices"


def text(path: Path) -> str:
    """What a file holds, without white space around it; empty where there is no such file."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def number(path: Path) -> int | None:
    """The number in a file; None for `max` and for all else that is none, and where there is no such file."""
    content = text(path)
    return int(content) if content.lstrip("-").isdigit() else None


def numa_node(root: Path, bus_id: str) -> int | None:
    """The NUMA node that a PCI device is near to."""
    # The kernel writes a bus's domain with 4 digits, NVML with 8; -1 is for a board that does not say.
    node = number(root / PCI / bus_id.lower()[-12:] / "numa_node")
    return node if node is not None and node >= 0 else None


def cgroups(root: Path, controller: str, mount: str = CGROUPS) -> tuple[Path, ...]:
    """The process's own cgroup and those above it: of the unified hierarchy for an empty controller, else version 1."""
    # Each line is hierarchy:controllers:path, as cgroups(7) says.
    entries = (line.split(":", 2) for line in text(root / "proc/self/cgroup").splitlines())
    group = next((path for _, controllers, path in entries if controller in controllers.split(",")), None)
    if group is None:
        return ()
    top = root / mount  # inside a container the path may not exist, and the mount itself counts
    folder = top / group.strip("/")
    return tuple(path for path in (folder, *folder.parents) if path == top or top in path.parents)
