"""scripts/bench/card_sampling: it measures as many cards as it is given."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cli
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench" / "card_sampling"


def test_made_up_cards_are_sampled() -> None:
    words = [sys.executable, str(SCRIPT), "--made-up", "2", "--samples", "5"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 cards, 5 samples: ")
