"""What a whole run of the built-in trainer says at its end of how it went."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainkit.runner.report.summary import NOT_FINITE, render_summary

Trainkit = Callable[..., subprocess.CompletedProcess[str]]


def summary_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """summary.json of the run that was just done."""
    assert done.returncode == 0, done.stderr
    words = next(line for line in done.stderr.splitlines() if line.startswith("run directory: "))
    content: dict[str, Any] = json.loads(Path(words.partition(": ")[2], "summary.json").read_text())
    return content


@pytest.mark.e2e
def test_a_searched_micro_batch_is_in_the_summary_and_a_run_that_has_nothing_left_to_train_says_so(
    trainkit: Trainkit, tiny_recipe: Path
) -> None:
    words = ("run", str(tiny_recipe), "batch.micro=auto", "checkpoint.every_steps=3", "checkpoint.resume=auto")
    done = trainkit(*words)
    first = summary_of(done)
    assert first["micro_search"]["source"] == "searched"
    assert [trial["micro"] for trial in first["micro_search"]["tried"]] == [1, 2, 4]
    assert (first["micro_batch"], first["accumulation"]) == (4, 1)
    assert "4, accumulation 1: the largest that fits of 1, 2, 4; remembered in " in done.stderr
    again = trainkit(*words)
    second = summary_of(again)
    assert second["micro_search"]["source"] == "remembered"
    assert "nothing is left to train: the run has 3 steps, and the checkpoint is of step 3" in again.stderr
    assert "3 of 4 samples on 1 rank (single, python); no steps were left" in again.stderr
    assert second["final_loss"] is None


@pytest.mark.e2e
def test_a_run_that_only_evaluates_tells_of_no_training(trainkit: Trainkit, tiny_recipe: Path) -> None:
    done = trainkit("run", str(tiny_recipe), "--do_eval")
    told = dict(line.split("  ", 1) for line in done.stderr.splitlines() if "  " in line)
    assert summary_of(done)["eval_loss"] is not None
    assert "none, on 1 rank (single, python): only evaluated" in told["Steps"]
    assert "of training" not in told["Time"]
    assert not {"Samples/second", "Tokens/second", "Waiting for data"} & told.keys()


def test_the_utilisation_of_a_card_with_a_known_peak_is_in_the_summary() -> None:
    known = {"wall_seconds": 3.0, "world_size": 1, "strategy": "single", "launcher": "python", "global_batch": 4}
    told = render_summary({**known, "mfu": 0.4131, "peak_flops_per_second": 312e12}, Path("/runs/r"))
    assert "MFU            41.3% of 312 TFLOP/s a GPU" in told
    assert "MFU" not in render_summary({**known, "mfu": None}, Path("/runs/r"))


def test_time_that_is_not_that_of_steps_is_said_beside_it() -> None:
    known = {"wall_seconds": 13.0, "world_size": 1, "strategy": "single", "launcher": "python", "global_batch": 4}
    told = render_summary({**known, "train_seconds": 9.0, "compile_seconds": 2.5, "aside_seconds": 1.25}, Path("/r"))
    assert "9.00 s of training (2.50 s of it compiling, 1.25 s of it evaluating and saving), 13 s in total" in told
    assert "9.00 s of training, 13 s in total" in render_summary({**known, "train_seconds": 9.0}, Path("/r"))


@pytest.mark.e2e
def test_run_says_what_the_plan_warns_of(trainkit: Trainkit, tiny_recipe: Path) -> None:
    words = (str(tiny_recipe), "optimizer.name=adafactor", "optimizer.lr=1e-2")
    done = trainkit("run", *words)

    assert done.returncode == 0, done.stderr
    warning = done.stderr.index("warning: adafactor can converge slower")
    assert warning < done.stderr.index("run directory:")


@pytest.mark.e2e
def test_an_evaluation_that_gave_no_number_is_in_the_summary(
    trainkit: Trainkit, tiny_recipe: Path, tmp_path: Path
) -> None:
    (tmp_path / "blind.py").write_text(
        "import torch\n"
        "from torch import nn\n\n"
        "class Blind(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.rows = nn.Embedding(256, 256)\n\n"
        "    def forward(self, tokens, targets):\n"
        "        rows = self.rows(tokens).flatten(0, 1)\n"
        "        loss = nn.functional.cross_entropy(rows, targets.flatten())\n"
        "        return loss if self.training else loss * float('nan')\n"
    )
    tiny_recipe.write_text(tiny_recipe.read_text().replace("model: {", "model: {kind: gpt, "))
    done = trainkit("run", str(tiny_recipe), "model={kind: target, target: 'blind:Blind'}", "--do_eval")
    found = summary_of(done)
    assert (found["eval_loss"], found["reasons"]["eval_loss"]) == (None, NOT_FINITE)
    told = dict(line.split("  ", 1) for line in done.stderr.splitlines() if "  " in line)
    assert told["Evaluation loss"].strip() == NOT_FINITE
