"""Ranks that are watched from outside, to be killed at a moment, and what all of their attempts have logged."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from strategy_runs import Rank

# A rate that does not look ahead, so that a run to any step has the same course.
OPEN_END: dict[str, dict[str, Any]] = {
    "train": {"steps": 100_000},
    "schedule": {"name": "constant_with_warmup", "warmup_steps": 4},
}


def wait_for(condition: Callable[[], bool], processes: list[Rank], seconds: float = 60.0) -> None:
    """Poll; ends everything and fails when the condition does not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline or any(process.poll() for process in processes):
            for process in processes:
                process.kill()
                process.wait()
            pytest.fail(f"the run did not get there: exit codes {[process.returncode for process in processes]}")
        time.sleep(0.01)


def lines_in(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def every_line(run_dir: Path) -> tuple[dict[int, set[float]], dict[int, set[float]]]:
    """Losses and norms of each step in all lines: a step that was done twice has two, equal or not."""
    losses: dict[int, set[float]] = {}
    norms: dict[int, set[float]] = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "loss" in record:
            losses.setdefault(record["step"], set()).add(record["loss"])
            norms.setdefault(record["step"], set()).add(record["grad_norm"])
    return losses, norms


def log_of(run_dir: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(run_dir.glob("rank-*.log")))
