"""Adapters go from run to run: by the command line, and out of one strategy into another."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from strategy_runs import CASES, write_corpus

from tests.warm_ranks import run_case
from trainkit.trainer.checkpoint.export import export_adapters

Trainkit = Callable[..., subprocess.CompletedProcess[str]]
LORA: dict[str, Any] = {"kind": "lora", "rank": 4}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text") / "corpus"
    write_corpus(folder)
    return folder


@pytest.mark.parametrize(
    ("leaving", "entering"),
    [pytest.param("fsdp", "zero2", marks=pytest.mark.needs("torch>=2.7")), ("zero3", "ddp"), ("zero1", "ddp")],
)
def test_adapters_of_one_strategy_start_a_run_under_another_with_the_loss_they_had(
    leaving: str, entering: str, corpus: Path, tmp_path: Path
) -> None:
    learning: dict[str, Any] = {"train": {"steps": 2}, "optimizer": {"lr": 1e-2}, "schedule": {"warmup_steps": 0}}
    case = CASES[leaving].changed(peft=LORA, **learning, eval={"every_steps": 1}, checkpoint={"every_steps": 2})
    first = run_case(tmp_path / "first", case, corpus).eval_losses
    export_adapters(tmp_path / "first/checkpoints/step-00000002", tmp_path / "adapters")
    asked = {**LORA, "path": str(tmp_path / "adapters")}
    still: dict[str, Any] = {"train": {"steps": 1}, "optimizer": {"lr": 0.0}, "eval": {"every_steps": 1}}
    second = run_case(tmp_path / "second", CASES[entering].changed(peft=asked, **still), corpus).eval_losses
    assert abs(first[1] - first[2]) > 1e-4 * first[2]
    assert second[1] == pytest.approx(first[2], rel=1e-6)


def test_adapters_are_exported_and_started_from_on_the_command_line(
    tmp_path: Path, trainkit: Trainkit, tiny_recipe: Path
) -> None:
    lora = ("peft.kind=lora", "peft.rank=2", "schedule.warmup_steps=0")
    run = trainkit("run", str(tiny_recipe), *lora, "checkpoint.every_steps=3", "eval.every_steps=3")
    assert run.returncode == 0, run.stderr
    assert "Parameters training" in run.stderr
    (folder,) = (tmp_path / "runs/tiny").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    trained, total = summary["parameters"], summary["parameters"] + summary["frozen_parameters"]
    assert f"{trained:,} of {total:,} ({trained / total:.2%})" in run.stderr
    done = trainkit("export", "tiny", "--adapter")
    adapters = folder / "exports/step-00000003-adapter"
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{adapters}\n", "")
    again = trainkit("run", str(tiny_recipe), *lora, f"peft.path={adapters}", "eval.every_steps=1", "optimizer.lr=0")
    assert again.returncode == 0, again.stderr
    onward = max((tmp_path / "runs/tiny").iterdir())
    assert json.loads((onward / "summary.json").read_text())["eval_loss"] == summary["eval_loss"]
    gone = trainkit("run", str(tiny_recipe), *lora, "peft.path=gone")
    assert gone.returncode == 4
    assert "peft.path gone does not exist on this machine" in gone.stderr
