"""The curves of a run's metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainkit.runner.report.history import Curve, History


def written(path: Path, *records: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.writelines(f"{json.dumps(record)}\n" for record in records)


def test_each_number_is_a_curve_that_grows_with_the_file(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    history = History(metrics)
    assert not history.read()
    written(metrics, {"event": "start", "steps": 9, "first_step": 0}, {"step": 1, "loss": 3.0, "elapsed": 1.0})
    assert history.read()
    written(metrics, {"step": 3, "loss": None, "phases": {"forward": 0.4}, "expert_shares": [[1.0]]})
    written(metrics, {"step": 3, "eval_loss": 2.5, "eval_seconds": 1.0})
    assert history.read()
    assert not history.read()
    assert history.curves == {
        "loss": Curve([1, 3], [3.0, None]),
        "phases.forward": Curve([3], [0.2]),
        "eval_loss": Curve([3], [2.5]),
        "eval_seconds": Curve([3], [1.0]),
    }
    assert history.progress.total == 9


def test_a_restart_replaces_what_lay_behind_its_checkpoint(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    written(metrics, {"event": "start", "steps": 9, "first_step": 0})
    written(metrics, *({"step": step, "loss": 9.0} for step in range(1, 7)))
    written(metrics, {"event": "start", "steps": 9, "first_step": 4}, {"step": 5, "loss": 1.0})
    history = History(metrics)
    history.read()
    assert history.first_step == 0
    assert history.curves["loss"] == Curve([1, 2, 3, 4, 5], [9.0, 9.0, 9.0, 9.0, 1.0])
    assert history.progress.step == 5


def test_a_run_that_goes_on_from_a_checkpoint_of_another_begins_there(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    written(metrics, {"event": "start", "steps": 9, "first_step": 4}, {"step": 6, "loss": 9.0})
    written(metrics, {"event": "start", "steps": 9, "first_step": 6}, {"step": 7, "loss": 1.0})
    history = History(metrics)
    history.read()
    assert history.first_step == 4
