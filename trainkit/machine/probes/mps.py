"""Apple's GPU: every Mac with Apple silicon has one that PyTorch can use (macOS 12.3 and later)."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping

from trainkit.machine.versions import at_least


def probe() -> Mapping[str, bool]:
    """False everywhere but on Apple silicon; an interpreter under Rosetta reports x86_64 and cannot use MPS."""
    silicon = sys.platform == "darwin" and platform.machine() == "arm64"
    return {"mps": silicon and at_least(platform.mac_ver()[0], "12.3")}
