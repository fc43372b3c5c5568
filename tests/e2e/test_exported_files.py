"""What is exported works as it is: the other tool, given the files alone, trains on two ranks as the recipe says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

Trainkit = Callable[..., subprocess.CompletedProcess[str]]
Launch = Callable[[str], dict[str, Any]]
PROGRAMS = Path(__file__).parent / "programs"
CPU = "version: 1\nname: exported\nextends: [devices/cpu, strategy/{strategy}]\n"
LOOP = CPU + f"program: {{{{kind: accelerate, script: '{PROGRAMS}/accelerate_loop.py'}}}}\n"
ENGINE = CPU + f"program: {{{{kind: deepspeed, script: '{PROGRAMS}/deepspeed_loop.py'}}}}\n"
ARGS = "{{length: 8, report: report.json}}"
CLASSIFICATION = (
    CPU
    + f"program: {{{{kind: hf, script: '{PROGRAMS}/hf_classification.py', args: {ARGS}}}}}\n"
    + """\
batch: {{micro: 4, accumulation: 2}}
optimizer: {{name: adamw_torch, lr: 1.0e-2}}
schedule: {{name: constant}}
train: {{steps: 3, seed: 3}}
checkpoint: {{every_steps: 0}}
logging: {{every_steps: 1, report_to: []}}
output: {{root: kept}}
env: {{NOTE: two words}}
"""
)


@pytest.fixture
def launch(tmp_path: Path, clean_environment: Mapping[str, str]) -> Launch:
    """Run a line of shell as somebody without trainkit would, and read what the script reports."""
    environ = {**clean_environment, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}

    def run(line: str) -> dict[str, Any]:
        done = subprocess.run(
            ["sh", "-c", line], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found: dict[str, Any] = json.loads((tmp_path / "report.json").read_text())
        return found

    return run


def exported(trainkit: Trainkit, folder: Path, recipe: str, tool: str) -> str:
    """The first line of the first file, behind its mark; and what is said on standard error."""
    (folder / "recipe.yaml").write_text(recipe)
    done = trainkit("plan", "recipe.yaml", "--export", tool, "--output", "out files")
    assert done.returncode == 0, done.stderr
    return done.stderr


def shown(path: Path) -> str:
    """The command that accelerate's file shows in its first line."""
    return path.read_text().splitlines()[0].partition(" for: ")[2].removesuffix("SCRIPT WORDS...")


def test_accelerate_forms_a_group_on_the_cpu_with_the_file_and_the_command_in_it(
    trainkit: Trainkit, tmp_path: Path, launch: Launch
) -> None:
    said = exported(trainkit, tmp_path, LOOP.format(strategy="ddp") + "precision: bf16\n", "accelerate")
    assert "left out: devices.type" in said
    assert "ACCELERATE_USE_CPU=true" in said
    report = launch(
        f"{shown(tmp_path / 'out files/accelerate.yaml')} {PROGRAMS}/accelerate_loop.py --report report.json"
    )
    assert (report["type"], report["processes"], report["precision"]) == ("MULTI_CPU", 2, "bf16")
    assert report["updates"] == 8  # 32 samples by 4 over two ranks, twice
    assert report["losses"][-1] < report["losses"][0]


def test_accelerate_runs_deepspeed_by_the_two_files(trainkit: Trainkit, tmp_path: Path, launch: Launch) -> None:
    recipe = LOOP.format(strategy="zero2") + "batch: {accumulation: 2}\ntrain: {max_grad_norm: 0.5}\n"
    exported(trainkit, tmp_path, recipe, "accelerate")
    words = "accelerate_loop.py --backend gloo --report report.json"
    report = launch(f"{shown(tmp_path / 'out files/accelerate.yaml')} {PROGRAMS}/{words}")
    assert (report["type"], report["processes"], report["accumulation"]) == ("DEEPSPEED", 2, 2)
    assert report["updates"] == len(report["losses"]) // 2


def test_deepspeeds_engine_takes_the_file(trainkit: Trainkit, tmp_path: Path, launch: Launch) -> None:
    recipe = (
        ENGINE.format(strategy="zero1")
        + """\
batch: {micro: 2, accumulation: 2}
optimizer: {name: sgd, lr: 0.1, beta1: 0.5}
schedule: {name: linear, warmup_steps: 2, min_lr_ratio: 0}
train: {steps: 4, max_grad_norm: 0.7}
"""
    )
    exported(trainkit, tmp_path, recipe, "deepspeed")
    words = "deepspeed_loop.py --deepspeed_config 'out files/deepspeed.json' --report report.json"
    report = launch(f"DS_ACCELERATOR=cpu torchrun --standalone --nproc_per_node 2 {PROGRAMS}/{words}")
    assert (report["stage"], report["optimizer"], report["scheduler"]) == (1, "SGD", "WarmupDecayLR")
    assert (report["clipping"], report["batch"]) == (0.7, 8)
    assert max(report["rates"]) == 0.1
    assert report["losses"][-1] < report["losses"][0]


@pytest.mark.parametrize(
    ("strategy", "launcher", "wrapped"),
    [("ddp", "torchrun", "DistributedDataParallel"), ("zero2", "accelerate", "DeepSpeedEngine")],
)
def test_the_command_for_a_script_on_trainer_trains_as_the_recipe_says(
    trainkit: Trainkit, tmp_path: Path, launch: Launch, strategy: str, launcher: str, wrapped: str
) -> None:
    recipe = CLASSIFICATION.format(strategy=strategy) + f"launcher: {{kind: {launcher}}}\n"
    said = exported(trainkit, tmp_path, recipe, "hf")
    assert said == ""
    report = launch("sh 'out files/command.sh'")
    assert (report["wrapped"], report["world_size"], report["device"]) == (wrapped, 2, "cpu:0")
    assert (report["steps"], len(report["losses"]), report["output_dir"]) == (3, 3, "kept")
    assert report["losses"][-1] < report["losses"][0]
