"""The limits that cgroups of both versions set on this process."""

from __future__ import annotations

from pathlib import Path

ROOT = "sys/fs/cgroup"


def folders(root: Path, controller: str, mount: str = ROOT) -> tuple[Path, ...]:
    """The process's own cgroup and all above it: of the unified hierarchy for an empty controller, else of version 1.

    Inside a container the path may not exist, and the mount itself counts.
    """
    group = _group(root, controller)
    if group is None:
        return ()
    top = root / mount
    folder = top / group.strip("/")
    return tuple(path for path in (folder, *folder.parents) if path == top or top in path.parents)


def values(path: Path) -> list[str]:
    """The values in a cgroup's file; none where there is no such file."""
    try:
        return path.read_text().split()
    except OSError:
        return []


def _group(root: Path, controller: str) -> str | None:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    entries = (line.split(":", 2) for line in lines)
    return next((path for _, controllers, path in entries if controller in controllers.split(",")), None)
