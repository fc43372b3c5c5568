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
from test_documentation import SMALL, blocks

import trainkit
from tests.conftest import Trainkit
from trainkit.runner.report.summary import headline

pytest.importorskip("optuna")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "sweeps.md"
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


def test_the_lines_of_the_documentation_sweep_from_python_and_train_the_best_again(
    tmp_path: Path, clean_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {**clean_environment, **SMALL}.items():
        monkeypatch.setenv(name, value)
    (lines,) = blocks(PAGE, "python")
    names: dict[str, Any] = {}
    exec(lines, names)
    found, run = names["found"], names["run"]
    assert isinstance(found, trainkit.SweepResult)
    assert found.complete and len(found.trials) == 4
    measured = [headline(of_run(each.run, "summary.json")) for each in found.trials]
    assert measured == [(found.definition.metric, each.value) for each in found.trials]
    assert found.best is not None
    assert headline(run.summary) == (found.definition.metric, found.best.value)


HF = """\
version: 1
name: classes
program: {kind: hf, script: classes.py, args: {length: 8}}
devices: {type: cpu}
batch: {global: 16, micro: 16}
optimizer: {name: adamw_torch}
schedule: {name: constant}
train: {steps: 4, seed: 3}
eval: {every_steps: 2, best_metric: accuracy}
checkpoint: {every_steps: 2}
logging: {level: error, report_to: []}
"""


def test_the_evaluations_of_a_script_on_trainer_decide(tmp_path: Path, trainkit: Trainkit) -> None:
    pytest.importorskip("transformers")
    script = (Path(__file__).parent / "programs" / "hf_classification.py").read_text()
    # Of two evaluations the last one counts, and it is the higher the smaller the rate.
    made = "compute_metrics=lambda _: {'accuracy': trainer.state.global_step / 4 - training.learning_rate},"
    (tmp_path / "classes.py").write_text(script.replace("args=training,", f"args=training, {made}"))
    (tmp_path / "classes.yaml").write_text(HF)
    done = trainkit("sweep", "classes.yaml", "optimizer.lr=0.25,0.125", "--json", timeout=600)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert (data["metric"], data["lower_is_better"], data["best"]) == ("accuracy", False, 1)
    assert [each["value"] for each in data["trials_made"]] == [0.875, 0.75]
    assert [each["step"] for each in data["trials_made"]] == [4, 4]
    never = trainkit("sweep", "classes.yaml", "optimizer.lr=0.25,0.125", "checkpoint.every_steps=0", timeout=600)
    assert never.returncode == 1
    assert (
        "a run of this recipe evaluates no accuracy, so that no trial can be compared (Trainer writes" in never.stderr
    )
