"""`trainkit.log`: one rank's lines in the run's metrics, read as the built-in trainer's; nothing outside a run."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import trainkit
from tests.made_up_runs import MakeRun
from trainkit import metrics_file
from trainkit.runner.report.history import History
from trainkit.runner.report.progress import read_progress


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The metrics of a run that this process is rank 0 of."""
    monkeypatch.setattr(metrics_file, "_loops", {})
    monkeypatch.setenv("TRAINKIT_RECIPE", str(tmp_path / "recipe.yaml"))
    monkeypatch.delenv("RANK", raising=False)
    return tmp_path / "metrics.jsonl"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_steps_and_evaluations_are_read_as_those_of_the_built_in_trainer(run: Path) -> None:
    for step in range(1, 5):
        trainkit.log(step, total_steps=10, loss=SimpleNamespace(item=lambda: 0.5), learning_rate=0.1)
    trainkit.log(step=4, eval_loss=0.25, eval_accuracy=1)
    start, first, second, *_, evaluation = lines(run)
    assert (start["event"], start["steps"], start["first_step"]) == ("start", 10, 0)
    assert {"seconds", "elapsed"} & first.keys() == {"elapsed"}
    assert second["seconds"] >= 0
    assert evaluation["eval_accuracy"] == 1
    progress = read_progress(run)
    assert (progress.step, progress.total, progress.evaluation) == (4, 10, {"loss": 0.25, "accuracy": 1})
    assert progress.remaining(0.0) is not None
    history = History(run)
    history.read()
    assert history.curves["loss"].steps == [1, 2, 3, 4]
    assert history.curves["eval_loss"].values == [0.25]


def test_a_loop_that_goes_on_replaces_what_lay_behind_its_checkpoint(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (10, 20, 30):
        trainkit.log(step, loss=1.0)
    monkeypatch.setattr(metrics_file, "_loops", {})  # another process
    trainkit.log(20, loss=3.0)
    history = History(run)
    history.read()
    assert (history.curves["loss"].steps, history.curves["loss"].values) == ([10, 20], [1.0, 3.0])


def test_what_is_no_finite_loss_is_told(run: Path, make_run: MakeRun) -> None:
    trainkit.log(1, loss=math.nan)
    assert lines(run)[1]["loss"] is None


def test_only_rank_0_writes_by_variable_or_by_torch(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never() -> float:
        raise AssertionError("another rank waits for its GPU")

    monkeypatch.setenv("RANK", "1")
    trainkit.log(1, loss=SimpleNamespace(item=never))
    ready = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, get_rank=lambda: 3)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setitem(sys.modules, "torch.distributed", ready)
    trainkit.log(1, loss=2.0)
    assert not run.exists()


def test_outside_a_run_nothing_happens(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRAINKIT_RECIPE")
    monkeypatch.chdir(run.parent)
    trainkit.log(1, loss=2.0)
    assert [*run.parent.iterdir()] == []


@pytest.mark.parametrize("values", [{"loss": "low"}, {"loss": None}, {"loss": [1]}, {"ok": True}], ids=str)
def test_what_is_no_number_is_refused_in_every_rank_and_outside_of_runs(values: dict[str, Any], run: Path) -> None:
    with pytest.raises(TypeError, match="takes numbers"):
        trainkit.log(1, **values)
    with pytest.raises(ValueError, match="writes 'elapsed' itself"):
        trainkit.log(1, elapsed=3)
    assert not run.exists()


def test_metrics_that_cannot_be_written_warn_once_and_do_not_end_the_loop(run: Path) -> None:
    run.symlink_to(run.parent / "precious")
    with pytest.warns(RuntimeWarning, match="cannot be written, the run continues without it") as caught:
        trainkit.log(1, loss=2.0)
        trainkit.log(2, loss=2.0)
    assert len(caught) == 1
    assert not (run.parent / "precious").exists()


def test_the_lines_for_scripts_without_trainkit_do_nothing_there() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "python.md").read_text(encoding="utf-8")
    lines = page.partition("<!-- without trainkit -->\n```python\n")[2].partition("```")[0]
    assert len(lines.splitlines()) == 4
    names: dict[str, Any] = {"__builtins__": {**vars(__import__("builtins")), "__import__": _none}}
    exec(lines, names)
    assert names["log"](1, loss=2.0, total_steps=3) is None


def _none(name: str, *_: object) -> None:
    raise ImportError(name)
