"""The machine's own name and system, and whether it has Apple's GPU."""

from __future__ import annotations

import platform
import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from trainkit.machine.probes.kernel_files import text
from trainkit.machine.versions import at_least


def probe(root: Path = Path("/")) -> Mapping[str, str]:
    """As the kernel gives it; no name service is asked, and no tool is started."""
    named = re.search(r'^PRETTY_NAME="?([^"\n]+)', text(root / "etc/os-release"), re.MULTILINE)
    system = named[1] if named else platform.system()
    if sys.platform == "darwin":
        system = f"macOS {platform.mac_ver()[0]}"
    return {"hostname": socket.gethostname(), "system": system, "kernel": platform.release()}


def probe_mps() -> Mapping[str, bool]:
    """PyTorch can use the GPU of every Mac with Apple silicon, from macOS 12.3 on."""
    # An interpreter under Rosetta reports x86_64, and cannot use MPS.
    silicon = sys.platform == "darwin" and platform.machine() == "arm64"
    return {"mps": silicon and at_least(platform.mac_ver()[0], "12.3")}
