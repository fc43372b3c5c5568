"""Machines with made-up cards, for the real trainkit: a stand-in for nvidia-ml-py tells of them."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

GIGABYTE = 1024**3
FAKE = Path(__file__).parent / "machine" / "nvml"
CUDA = Path(__file__).parent / "machine" / "cuda"  # first on PYTHONPATH, it lets torch count the made-up cards
Cards = Callable[..., dict[str, str]]


def card(number: int, kind: str = "A100", **more: Any) -> dict[str, Any]:
    """A card as the stand-in tells of it; UUIDs begin with the card's number."""
    kinds = {
        "A100": {"name": "NVIDIA A100-SXM4-80GB", "capability": [8, 0], "cores": 6912, "clock_limit": 1410},
        "V100": {"name": "Tesla V100-SXM2-16GB", "capability": [7, 0], "cores": 5120, "clock_limit": 1530},
        "T4": {"name": "Tesla T4", "capability": [7, 5], "cores": 2560, "clock_limit": 1590},
    }
    total = {"A100": 80, "V100": 16, "T4": 15}[kind] * GIGABYTE
    return {
        "uuid": f"GPU-{number:x}0000000-1111-2222-3333-444444444444",
        "bus": f"00000000:{number + 1:02X}:00.0",
        "total": total,
        "free": total - GIGABYTE // 2,
        "use": 0,
        **kinds[kind],
        **more,
    }


def environments(tmp_path: Path, clean_environment: Mapping[str, str]) -> Cards:
    """`cards(card(0), card(1))` is the environment in which trainkit finds these cards; keywords tell of the driver."""

    def build(*found: Mapping[str, Any], **machine: Any) -> dict[str, str]:
        told = tmp_path / "nvml.json"
        told.write_text(json.dumps({"cards": found, **machine}))
        library = tmp_path / "driver"
        library.mkdir(exist_ok=True)
        (library / "libnvidia-ml.so.1").touch()
        built = tmp_path / "built"  # the torch of a machine with cards is not the one for CPUs
        (built / "torch-2.13.0.dist-info").mkdir(parents=True, exist_ok=True)
        metadata = "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n"
        (built / "torch-2.13.0.dist-info" / "METADATA").write_text(metadata)
        return {
            "FAKE_NVML": str(told),
            "PYTHONPATH": f"{FAKE}:{built}:{clean_environment['PYTHONPATH']}",
            "LD_LIBRARY_PATH": str(library),
            "TRAINKIT_CARD_LOCKS": str(tmp_path / "locks"),
        }

    return build


def stand_in() -> Any:
    """The stand-in as a module of its own, for tests that ask it in their own process."""
    spec = importlib.util.spec_from_file_location("stand_in", FAKE / "pynvml.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
