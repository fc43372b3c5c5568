"""Runs of trackers: in which one a run goes on, what a tracker costs that fails, and a real run of trackio."""

from __future__ import annotations

import dataclasses
import json
import logging
import sqlite3
import sys
import threading
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.training import MakeSettings, parts_of, trained
from trainkit.errors import TrainingError
from trainkit.trainer.checkpoint.manifest import Identity, read_manifest
from trainkit.trainer.checkpoint.resuming import going_on, resume
from trainkit.trainer.metrics import trackers
from trainkit.trainer.metrics.writers import Metrics

IDENTITY = Identity("single", 1, "this training")


def checkpoint(runs: Path, run: str, step: int, digest: str = "this training", **reporters: str) -> Path:
    """A checkpoint as far as its manifest."""
    folder = runs / run / f"checkpoints/step-{step:08d}"
    folder.mkdir(parents=True)
    content = {"step": step, "training_digest": digest, "world_size": 1, "strategy": "single", "files": {}}
    (folder / "manifest.json").write_text(json.dumps({**content, "reporters": reporters}))
    return folder


def known(folder: Path) -> Mapping[str, str]:
    return going_on(folder, read_manifest(folder), IDENTITY)


def test_a_run_goes_on_in_the_runs_that_its_checkpoint_names(tmp_path: Path) -> None:
    checkpoint(tmp_path, "one", 2, wandb="a", trackio="a")
    newest = checkpoint(tmp_path, "one", 4, wandb="a", trackio="a")
    checkpoint(tmp_path, "other", 9, wandb="b")
    (tmp_path / "torn/checkpoints/step-00000009").mkdir(parents=True)
    (tmp_path / "torn/checkpoints/step-00000009/manifest.json").write_text("{")
    assert known(newest) == {"wandb": "a", "trackio": "a"}
    assert known(checkpoint(tmp_path, "silent", 3)) == {}


def test_a_branch_is_a_run_of_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = checkpoint(tmp_path, "one", 2, wandb="a", trackio="a")
    assert known(checkpoint(tmp_path, "otherwise", 2, "another training", wandb="a")) == {}
    checkpoint(tmp_path, "resumed", 3, wandb="a", trackio="another")
    with caplog.at_level(logging.INFO, "trainkit.trainer"):
        assert known(first) == {"trackio": "a"}
    assert caplog.messages == ["metrics: wandb: a run of its own, for run a has gone on from step-00000002"]
    moved = tmp_path / "elsewhere/step-00000002"
    moved.parent.mkdir()
    first.rename(moved)
    assert known(moved) == {"wandb": "a", "trackio": "a"}, "beside it nobody has gone on"


def test_a_manifest_whose_runs_are_none_is_refused(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "one", 2)
    content = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**content, "reporters": {"wandb": 3}}))
    with pytest.raises(TrainingError, match=r"its manifest\.json lacks reporters"):
        read_manifest(folder)


class Broken:
    """A run of a tracker that takes one line. waits: until the test is over, when it ends."""

    def __init__(self) -> None:
        self.lines: list[Any] = []
        self.over = threading.Event()

    def log(self, values: Any, step: int) -> None:
        if self.lines:
            raise OSError("the line is dead\nand more")
        self.lines.append((step, values))

    def finish(self) -> None:
        self.over.wait(30)


def test_a_tracker_that_fails_costs_a_warning_and_not_the_training(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker, run = trackers._Tracker(), Broken()
    tracker.name, tracker._run = "wandb", run
    for step in (1, 2, 3):
        tracker.write({"step": step, "loss": 1.5, "note": "no number"})
    assert run.lines == [(1, {"loss": 1.5})]
    monkeypatch.setattr(trackers, "_SENT", 0.1)
    tracker._end(run.finish)
    run.over.set()
    tracker._end(lambda: 1 / 0)
    assert caplog.messages == [
        "warning: wandb takes no more metrics: the line is dead",
        "warning: wandb has not taken all metrics within 0 s",
        "warning: wandb did not end well: ZeroDivisionError: division by zero",
    ]


def test_trackio_gets_every_number_of_every_step_and_a_resumed_run_goes_on_in_its_run(
    make_settings: MakeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "kept"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)  # it reads its folder's name when it is imported
    pytest.importorskip("trackio")
    asked: dict[str, Any] = {"logging": {"report_to": ["trackio"]}, "eval": {"every_steps": 2}}
    settings = make_settings(**asked, train={"steps": 2}, checkpoint={"every_steps": 2})
    found = trained(settings)
    again = dataclasses.replace(
        make_settings(**asked, train={"steps": 4}), resume=settings.run_dir / "checkpoints/step-00000002"
    )
    parts = parts_of(again)
    first = resume(parts, restarted=False)
    assert parts.checkpoints.reporters == {"trackio": settings.run_dir.name}
    with closing(Metrics(again.run_dir, ["trackio"], main=True, known=parts.checkpoints.reporters)) as metrics:
        for step in (first + 1, first + 2):
            metrics.write({"step": step, "loss": 0.5})
    project = again.recipe.name
    assert metrics.runs == {"trackio": {"id": settings.run_dir.name, "address": f"trackio show --project {project}"}}
    assert "rackio" not in capsys.readouterr().out
    (file,) = (tmp_path / "kept").glob("*.db")
    with closing(sqlite3.connect(file)) as kept:
        rows = kept.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step, id").fetchall()
    assert {row[0] for row in rows} == {settings.run_dir.name}
    sent = [(step, json.loads(values)) for _, step, values in rows]
    for name in ("loss", "eval_loss", "grad_norm"):
        wanted = [(line["step"], line[name]) for line in found.lines if name in line]
        assert [(step, each[name]) for step, each in sent if name in each and step <= 2] == wanted
    assert [step for step, each in sent if step > 2] == [3, 4]
