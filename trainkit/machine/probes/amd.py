"""AMD cards, from what the amdgpu driver shows under /sys: no library, no tool, no torch.

The compute topology (/sys/class/kfd) lists the nodes in the order in which ROCm counts them; a node with SIMD units is
a card (linux/drivers/gpu/drm/amd/amdkfd/kfd_topology.c).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainkit.machine.facts import Gpu

TOPOLOGY = "sys/class/kfd/kfd/topology/nodes"
PCI = "sys/bus/pci/devices"


def probe(root: Path = Path("/")) -> Mapping[str, Any]:
    """The cards under the name `amd`, which `probe` joins to the others; none without the driver."""
    nodes = sorted((root / TOPOLOGY).glob("[0-9]*"), key=lambda path: int(path.name))
    if not nodes:
        return {"amd": ()}
    cards = [node for node in map(_properties, nodes) if int(node.get("simd_count", "0"))]
    return {"amd": tuple(_card(root, index, node) for index, node in enumerate(cards))}


def _card(root: Path, index: int, node: Mapping[str, str]) -> Gpu:
    location, domain = int(node.get("location_id", "0")), int(node.get("domain", "0"))
    bus = f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7}"
    device = root / PCI / bus
    total, used = _number(device / "mem_info_vram_total"), _number(device / "mem_info_vram_used")
    version = int(node.get("gfx_target_version", "0"))  # 90402 is gfx942: 9.4.2
    unique = int(node.get("unique_id", "0"))
    numa = _number(device / "numa_node")
    return Gpu(
        index=index,
        uuid=f"GPU-{unique:016x}" if unique else f"PCI-{bus}",
        name=_line(device / "product_name") or f"AMD gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}",
        memory_total=total or 0,
        memory_free=(total or 0) - (used or 0),
        compute_capability=(version // 10000, version // 100 % 100),
        vendor="amd",
        pci_bus_id=bus,
        numa_node=numa if numa is not None and numa >= 0 else None,
        clock_limit=int(node.get("max_engine_clk_fcompute", "0")) or None,
        utilization=_number(device / "gpu_busy_percent"),
    )


def _properties(node: Path) -> Mapping[str, str]:
    pairs = (line.split() for line in _line(node / "properties", whole=True).splitlines())
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def _line(path: Path, *, whole: bool = False) -> str:
    try:
        text = path.read_text()
    except OSError:
        return ""
    return text if whole else text.strip()


def _number(path: Path) -> int | None:
    text = _line(path)
    return int(text) if text.lstrip("-").isdigit() else None
