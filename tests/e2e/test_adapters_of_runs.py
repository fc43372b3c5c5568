"""Adapters go from run to run: by the command line, and out of one strategy into another."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from strategy_runs import CASES, write_corpus

from tests.warm_ranks import run_case
from trainkit.trainer.checkpoint.export import export_adapters
from trainkit.trainer.checkpoint.safe_loading import StateReader, only_data
from trainkit.trainer.parallel.zero import import_deepspeed

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


@pytest.mark.parametrize("name", [pytest.param("fsdp", marks=pytest.mark.needs("torch>=2.7")), "zero1", "zero3"])
def test_checkpoints_hold_adapters_alone_and_go_on_bit_equal(name: str, corpus: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "peft": LORA,
        "train": {"steps": 4},
        "optimizer": {"lr": 1e-2},
        "checkpoint": {"every_steps": 2, "keep": 0},
    }
    case = CASES[name].changed(**changes)
    whole, saved = run_case(tmp_path / "whole", case, corpus), tmp_path / "whole/checkpoints/step-00000002"
    names = [each for each in saved_names(saved) if not each.startswith("optimizer.")]
    assert names
    assert all("lora_" in each for each in names)
    resumed = run_case(tmp_path / "resumed", case, corpus, resume=saved)
    assert resumed.losses == {step: loss for step, loss in whole.losses.items() if step > 2}


def saved_names(checkpoint: Path) -> list[str]:
    """The parameters that a checkpoint has, by the names of torch or of DeepSpeed."""
    if (checkpoint / "state").exists():
        return [each for each in StateReader(checkpoint / "state").read_metadata().state_dict_metadata if "." in each]
    import_deepspeed(torch.device("cpu"), "warning")
    with only_data():
        (states, *_) = (torch.load(each) for each in sorted((checkpoint / "zero").glob("*model_states.pt")))
    return [*states["module"], *(states["frozen_param_fragments"] or ())]


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
    gone = trainkit("run", str(tiny_recipe), *lora, "peft.path=./gone")
    assert gone.returncode == 4
    assert "peft.path ./gone does not exist on this machine" in gone.stderr
