"""The machine's own name and system."""

from __future__ import annotations

import platform
import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path


def probe(root: Path = Path("/")) -> Mapping[str, str]:
    """As the kernel tells it; no name service is asked, and no tool is started."""
    return {"hostname": socket.gethostname(), "system": _system(root), "kernel": platform.release()}


def _system(root: Path) -> str:
    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]}"
    try:
        told = re.search(r'^PRETTY_NAME="?([^"\n]+)', (root / "etc/os-release").read_text(), re.MULTILINE)
    except OSError:
        told = None
    return told[1] if told else platform.system()
