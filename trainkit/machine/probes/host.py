"""The machine's own name and system, and whether it has Apple's GPU."""

from __future__ import annotations

import platform
import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from trainkit.machine.versions import at_least


def probe(root: Path = Path("/")) -> Mapping[str, str]:
    """As the kernel tells it; no name service is asked, and no tool is started."""
    return {"hostname": socket.gethostname(), "system": _system(root), "kernel": platform.release()}


def probe_mps() -> Mapping[str, bool]:
    """PyTorch can use the GPU of every Mac with Apple silicon, from macOS 12.3 on.

    An interpreter under Rosetta reports x86_64 and cannot use MPS.
    """
    silicon = sys.platform == "darwin" and platform.machine() == "arm64"
    return {"mps": silicon and at_least(platform.mac_ver()[0], "12.3")}


def _system(root: Path) -> str:
    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]}"
    try:
        named = re.search(r'^PRETTY_NAME="?([^"\n]+)', (root / "etc/os-release").read_text(), re.MULTILINE)
    except OSError:
        named = None
    return named[1] if named else platform.system()
