"""NUMA nodes: which cores are near to which part of the memory (Linux)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from trainkit.machine.facts import NumaNode

NODES = "sys/devices/system/node"


def probe(root: Path = Path("/")) -> Mapping[str, tuple[NumaNode, ...]]:
    """Nodes in order; none where the system does not tell."""
    folders = [path for path in (root / NODES).glob("node*") if path.name[4:].isdigit()]
    return {"numa": tuple(_node(path) for path in sorted(folders, key=lambda path: int(path.name[4:])))}


def _node(folder: Path) -> NumaNode:
    memory = re.search(r"MemTotal:\s+(\d+) kB", (folder / "meminfo").read_text())
    cpus = core_list((folder / "cpulist").read_text())
    return NumaNode(int(folder.name[4:]), cpus, int(memory[1]) * 1024 if memory else 0)


def core_list(text: str) -> tuple[int, ...]:
    """The numbers that the kernel's list format names (``0-3,8``)."""
    cores: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cores += range(int(first), int(last or first) + 1)
    return tuple(cores)
