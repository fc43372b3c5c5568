"""A sweep of the built-in trainer on two jobs: killed, gone on from checkpoints, and its winner trained again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import trainkit
from tests.conftest import Trainkit
from trainkit.runner.report.summary import headline

pytest.importorskip("optuna")
WORDS = ("sweep", "tiny.yaml", "optimizer.lr=1e-3,1e-2,3e-2", "--jobs", "2", "--output", "found")
# Long enough to be killed in the middle, with a checkpoint behind it.
LONGER = ("train.steps=60", "eval.every_steps=10", "eval.batches=1", "checkpoint.every_steps=10", "checkpoint.keep=2")


def of_run(path: str | Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(path, name).read_text())
    return found


def test_a_killed_sweep_goes_on_from_checkpoints_and_its_winner_is_trained_again_bit_equal(
    tiny_recipe: Path, trainkit: Trainkit, clean_environment: dict[str, str]
) -> None:
    folder = tiny_recipe.parent
    argv = [sys.executable, "-P", "-m", "trainkit", *WORDS, *LONGER]
    with subprocess.Popen(argv, cwd=folder, env=clean_environment, stderr=subprocess.DEVNULL) as sweep:
        end = time.monotonic() + 600
        while not [*folder.glob("runs/tiny/*/checkpoints/step-*/manifest.json")]:
            assert time.monotonic() < end
            time.sleep(0.02)
        sweep.send_signal(signal.SIGKILL)
    done = trainkit(*WORDS, *LONGER, "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    trials = data["trials_made"]
    assert [each["state"] for each in trials] == ["done"] * 3
    values = [each["value"] for each in trials]
    assert values == sorted(values) and data["metric"] == "perplexity"
    for each in trials:
        assert headline(of_run(each["run"], "summary.json")) == ("perplexity", each["value"])
    resumed = [each for each in trials if of_run(each["run"], "plan.json")["resume"]["path"]]
    assert resumed and len(resumed) == done.stderr.count("goes on from step")
    won = trainkit("run", "found/best.yaml")
    assert won.returncode == 0, won.stderr
    newest = max(folder.glob("runs/tiny/*/summary.json"), key=lambda path: path.stat().st_mtime)
    assert headline(json.loads(newest.read_text())) == ("perplexity", values[0])
    page = (folder / "found/report.html").read_text()
    assert "Sweep of tiny" in page and f"{trials[0]['number']}: lr=" in page


def test_python_sweeps_and_runs_the_best_again(
    tiny_recipe: Path, clean_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_recipe.parent)
    for name, value in clean_environment.items():
        monkeypatch.setenv(name, value)
    space = {"optimizer.lr": "log(1e-4,1e-1)", "train.seed": [0, 1]}
    short = {"eval": {"every_steps": 3, "batches": 1}}
    found = trainkit.sweep(tiny_recipe, space, short, sampler="tpe", trials=2, metric="loss", early_stop=True)
    assert found.complete and found.best is not None
    assert {each.state for each in found.trials} == {"done"}
    assert found.best.value == of_run(found.best.run, "summary.json")["eval_loss"]
    run = trainkit.run(found.best_recipe, quiet=True)
    run.wait()
    assert run.summary["eval_loss"] == found.best.value
