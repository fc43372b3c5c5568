"""An unedited script on Trainer: the same losses under every launcher, and resumed as if it had never stopped."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Trainkit = Callable[..., subprocess.CompletedProcess[str]]
PROGRAM = Path(__file__).parent / "programs" / "hf_classification.py"
RECIPE = f"""\
version: 1
program: {{kind: hf, script: {PROGRAM}, args: {{length: 8}}}}
devices: {{type: cpu}}
batch: {{global: 16, micro: 4}}
optimizer: {{name: adamw_torch, lr: 1.0e-2}}
schedule: {{name: constant}}
train: {{steps: 4, seed: 3}}
checkpoint: {{every_steps: 0}}
logging: {{every_steps: 1, level: warning, replica_level: error, report_to: []}}
"""
OWN_ARGUMENTS = 'data, training = DataArguments(), TrainingArguments(output_dir="out", use_cpu=True, max_steps=2)'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder with the recipe."""
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


def report(trainkit: Trainkit, folder: Path, *words: str) -> dict[str, Any]:
    """What the script says of one run."""
    path = folder / "report.json"
    path.unlink(missing_ok=True)
    done = trainkit("run", "recipe.yaml", *words, f"program.args.report={path}", timeout=220)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize(("strategy", "wrapped"), [("ddp", "DistributedDataParallel"), ("zero2", "DeepSpeedEngine")])
def test_losses_are_the_same_under_every_launcher(
    trainkit: Trainkit, folder: Path, strategy: str, wrapped: str
) -> None:
    curves = {}
    for launcher in ("torchrun", "accelerate", "deepspeed"):
        said = report(trainkit, folder, f"launcher.kind={launcher}", "--with", f"strategy/{strategy}")
        assert (said["wrapped"], said["world_size"]) == (wrapped, 2), launcher
        assert said["verbosity"] == "warning"  # of rank 0: the libraries' level
        curves[launcher] = said["losses"]
    assert len(curves["torchrun"]) == 4
    assert curves["torchrun"][3] < curves["torchrun"][0]
    assert curves["accelerate"] == curves["torchrun"]
    assert curves["deepspeed"] == curves["torchrun"]


def test_a_single_process_is_one_and_goes_on_from_what_an_earlier_run_left(trainkit: Trainkit, folder: Path) -> None:
    whole = report(trainkit, folder, "name=whole")
    assert (whole["wrapped"], whole["world_size"]) == ("BertForSequenceClassification", 1)
    first = report(trainkit, folder, "name=cut", "train.steps=2", "checkpoint.every_steps=2")
    (left,) = (folder / "runs" / "cut").iterdir()
    assert first["output_dir"] == str(left / "output")
    second = report(trainkit, folder, "name=cut", "checkpoint.resume=auto")
    assert second["words"][second["words"].index("--resume_from_checkpoint") + 1] == str(left / "output/checkpoint-2")
    assert second["losses"] == whole["losses"]  # Trainer keeps the log of what went before


def test_a_script_that_makes_its_arguments_itself_is_not_said_to_run_as_planned(
    trainkit: Trainkit, folder: Path
) -> None:
    source = PROGRAM.read_text().replace("data, training = parser.parse_args_into_dataclasses()", OWN_ARGUMENTS)
    (folder / "own.py").write_text(source)

    done = trainkit("run", "recipe.yaml", "program.script=own.py", timeout=220)

    assert done.returncode == 1
    assert "max_steps 4 was planned, and the script's TrainingArguments hold 2" in done.stderr
    assert "learning_rate 0.01 was planned" in done.stderr
    assert "set program.kind to torch" in done.stderr
