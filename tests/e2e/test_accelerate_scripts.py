"""An unedited loop on Accelerator(): the same losses under every launcher, and the strategy in force is the plan's."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Trainkit = Callable[..., subprocess.CompletedProcess[str]]
PROGRAM = Path(__file__).parent / "programs" / "accelerate_loop.py"
RECIPE = f"""\
version: 1
program: {{kind: accelerate, script: {PROGRAM}}}
extends: devices/cpu
batch: {{accumulation: 2}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder with the recipe."""
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


def report(trainkit: Trainkit, folder: Path, name: str, *words: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the script says of one run, and the run's summary."""
    path = folder / f"{name}.json"
    done = trainkit("run", "recipe.yaml", f"name={name}", *words, f"program.args.report={path}", timeout=220)
    assert done.returncode == 0, done.stderr
    (summary,) = (folder / "runs" / name).glob("*/summary.json")
    return json.loads(path.read_text()), json.loads(summary.read_text())


@pytest.mark.parametrize(
    ("strategy", "words", "kind"), [("ddp", (), "MULTI_CPU"), ("zero2", ("program.args.backend=gloo",), "DEEPSPEED")]
)
def test_losses_are_the_same_under_every_launcher(
    trainkit: Trainkit, folder: Path, strategy: str, words: tuple[str, ...], kind: str
) -> None:
    curves = {}
    for launcher in ("auto", "torchrun", "deepspeed"):
        asked = (f"launcher.kind={launcher}", "--with", f"strategy/{strategy}", *words)
        said, summary = report(trainkit, folder, launcher, *asked)
        assert summary["launcher"] == {"auto": "accelerate"}.get(launcher, launcher)
        assert (said["type"], said["processes"], said["accumulation"]) == (kind, 2, 2), launcher
        assert said["updates"] == len(said["losses"]) // 2  # what the script itself says would be one each
        assert [seen["strategy"] for seen in summary["in_force"].values()] == [strategy, strategy]
        curves[launcher] = said["losses"]
    assert len(curves["auto"]) == 8
    assert curves["auto"][6] < curves["auto"][0]
    assert curves["torchrun"] == curves["auto"]
    assert curves["deepspeed"] == curves["auto"]


@pytest.mark.parametrize("launcher", ["accelerate", "python"])
def test_one_process_computes_in_the_format_of_the_recipe(trainkit: Trainkit, folder: Path, launcher: str) -> None:
    said, summary = report(trainkit, folder, launcher, f"launcher.kind={launcher}", "precision.dtype=bf16")
    assert (said["type"], said["processes"], said["precision"]) == ("NO", 1, "bf16")
    seen = summary["in_force"]["0"]
    assert (seen["strategy"], seen["world_size"], seen["dtype"]) == ("single", 1, "bf16")


@pytest.mark.parametrize(
    ("told", "says"),
    [("", "no wrapper synchronises this rank's model"), ("true", "fsdp was planned, and ddp is in force")],
)
def test_the_silent_fall_backs_of_accelerate_from_fsdp_are_caught(
    trainkit: Trainkit, folder: Path, told: str, says: str
) -> None:
    kind = ("program.kind=torch", "program.reads_recipe=true", "program.verify=true", "--with", "strategy/fsdp")
    forced = ("env.ACCELERATE_USE_FSDP=true", f"env.ACCELERATE_USE_CPU={told or 'false'}")
    done = trainkit("run", "recipe.yaml", *kind, *forced, timeout=220)
    assert done.returncode == 1
    assert says in done.stderr
