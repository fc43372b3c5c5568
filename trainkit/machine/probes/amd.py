"""AMD cards, from what the amdgpu driver shows under /sys: no library, no tool, no torch.

The compute topology (/sys/class/kfd) lists the nodes in the order in which ROCm counts them; a node with SIMD units is
a card (linux/drivers/gpu/drm/amd/amdkfd/kfd_topology.c).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainkit.machine.facts import Gpu
from trainkit.machine.probes.host import PCI, numa_node, number, text

TOPOLOGY = "sys/class/kfd/kfd/topology/nodes"


def probe(root: Path = Path("/")) -> Mapping[str, Any]:
    """The cards under the name `amd`, which `probe` joins to the others; none without the driver."""
    folders = sorted((root / TOPOLOGY).glob("[0-9]*"), key=lambda path: int(path.name))
    pairs = [[line.split() for line in text(folder / "properties").splitlines()] for folder in folders]
    nodes = [{pair[0]: pair[1] for pair in lines if len(pair) == 2} for lines in pairs]
    cards = [node for node in nodes if int(node.get("simd_count", "0"))]  # the others are processors
    return {"amd": tuple(_card(root, index, node) for index, node in enumerate(cards))}


def _card(root: Path, index: int, node: Mapping[str, str]) -> Gpu:
    location, domain = int(node.get("location_id", "0")), int(node.get("domain", "0"))
    # As PCI packs it: 8 bits of bus, 5 of device, 3 of function.
    bus = f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7}"
    device = root / PCI / bus
    total, used = (number(device / f"mem_info_vram_{which}") or 0 for which in ("total", "used"))
    version = int(node.get("gfx_target_version", "0"))  # 90402 is gfx942: 9.4.2
    unique = int(node.get("unique_id", "0"))
    return Gpu(
        index=index,
        uuid=f"GPU-{unique:016x}" if unique else f"PCI-{bus}",
        name=text(device / "product_name") or f"AMD gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}",
        memory_total=total,
        memory_free=total - used,
        compute_capability=(version // 10000, version // 100 % 100),
        vendor="amd",
        pci_bus_id=bus,
        numa_node=numa_node(root, bus),
        clock_limit=int(node.get("max_engine_clk_fcompute", "0")) or None,
        utilization=number(device / "gpu_busy_percent"),
    )
