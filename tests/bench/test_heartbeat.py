"""scripts/bench/heartbeat: it says what a step costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cli
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench" / "heartbeat"


def test_what_a_heartbeat_costs_is_measured() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--steps", "20"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [line.rpartition(" ")[2] for line in done.stdout.splitlines()] == ["us"] * 3
