"""A script on DeepSpeed's engine is launched unedited, and its engine has what the recipe says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parent / "programs" / "deepspeed_loop.py"
WORDS = (
    *("run", "program.kind=deepspeed", f"program.script={SCRIPT}", "program.verify=true", "name=ds"),
    *("--with=strategy/zero2", "--with=devices/cpu", "nodes.processes_per_node=2", "env.OMP_NUM_THREADS=1"),
    *("optimizer.name=adamw_torch", "optimizer.lr=1e-2", "batch.global=8", "batch.micro=2", "train.max_grad_norm=0.5"),
    *("schedule.name=cosine", "schedule.warmup_steps=2", "train.steps=4"),
)


def report(trainkit: Any, folder: Path, launcher: str, *words: str) -> dict[str, Any]:
    """What the engine had."""
    file = folder / f"{launcher}.json"
    done = trainkit(*WORDS, f"launcher.kind={launcher}", *words, "--", "--report", str(file), timeout=280)
    assert done.returncode == 0, done.stderr
    assert "as planned, seen in 2 ranks: zero2, cpu, fp32" in done.stderr
    return dict(json.loads(file.read_text()))


def test_the_engine_has_what_the_recipe_says_and_losses_are_equal_under_every_launcher(
    trainkit: Any, tmp_path: Path
) -> None:
    found = {
        "torchrun": report(trainkit, tmp_path, "torchrun", "program.local_rank=true"),
        "accelerate": report(trainkit, tmp_path, "accelerate"),
        "deepspeed": report(trainkit, tmp_path, "deepspeed", "program.local_rank=true"),
    }

    first = found["torchrun"]
    assert (first["stage"], first["batch"], first["clipping"]) == (2, 8, 0.5)
    assert (first["optimizer"], first["scheduler"]) == ("AdamW", "WarmupCosineLR")
    assert first["rates"][3] == pytest.approx(0.005)  # half-way up a warm-up of two updates
    assert first["local_rank"] == ["--local_rank=0"]
    assert found["deepspeed"]["local_rank"] == ["--local_rank=0"]
    assert found["accelerate"]["local_rank"] == []  # not asked for
    assert first["losses"] == found["accelerate"]["losses"] == found["deepspeed"]["losses"]
    assert first["losses"][-1] != first["losses"][0]


def test_a_command_without_zero_runs_by_its_import_as_by_hand(
    trainkit: Any, tmp_path: Path, clean_environment: dict[str, str]
) -> None:
    file = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}},
        "gradient_clipping": 0.5,
    }
    (tmp_path / "ds.json").write_text(json.dumps(file))
    words = ["--num_gpus", "2", str(SCRIPT), "--deepspeed_config", "ds.json", "--report"]
    environment = {**clean_environment, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    runner = [sys.executable, "-m", "deepspeed.launcher.runner", *words, "by-hand.json"]
    subprocess.run(runner, cwd=tmp_path, env=environment, timeout=280, check=True, capture_output=True)

    line = ["DS_ACCELERATOR=cpu", "OMP_NUM_THREADS=1", "deepspeed", *words, "imported.json"]
    made = trainkit("import", "--output", "made.yaml", *line)
    assert made.returncode == 0, made.stderr
    done = trainkit("run", "made.yaml", "program.verify=true", timeout=280)
    assert done.returncode == 0, done.stderr
    assert "as planned, seen in 2 ranks: zero0, cpu" in done.stderr

    by_hand, imported = (json.loads((tmp_path / name).read_text()) for name in ("by-hand.json", "imported.json"))
    assert by_hand == imported
    assert (imported["stage"], imported["local_rank"]) == (0, ["--local_rank=0"])
