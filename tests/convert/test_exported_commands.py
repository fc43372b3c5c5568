"""An exported command chooses what the plan chooses: cards, device, variables; what it cannot choose is refused."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path

import pytest

from tests.convert.test_round_trip import CPU, GLUE, Trainkit, facts
from trainkit.cli.disk import Disk
from trainkit.convert.exporting import export
from trainkit.errors import RecipeError
from trainkit.launch_plan.context import Context
from trainkit.planner.build import decide
from trainkit.recipe.flags import resolve
from trainkit.recipe.resolved import Request

DDP = "strategy: {kind: ddp}\n"


def context(folder: Path, recipe: str, machine: str = "2x3090", transformers: str = "5.23.0") -> Context:
    """All decisions for a recipe on a described machine."""
    (folder / "run_glue.py").write_text("")
    (folder / "recipe.yaml").write_text(f"version: 1\n{recipe}")
    there = facts(machine)
    there = dataclasses.replace(there, packages={**there.packages, "transformers": transformers})
    return decide(resolve(Request(recipe=str(folder / "recipe.yaml"), cwd=str(folder)), Disk()), there, ())[0]


@pytest.mark.parametrize(
    ("recipe", "machine", "begins"),
    [
        # one process that sees two cards would wrap itself in nn.DataParallel
        ("", "2x3090", "CUDA_VISIBLE_DEVICES=0 CUDA_DEVICE_ORDER=PCI_BUS_ID python run_glue.py"),
        ("", "1x4090", "python run_glue.py"),
        (DDP, "2x3090", "torchrun --nproc_per_node=2 --standalone run_glue.py"),
        ("devices: {select: [1]}\n", "2x3090", "CUDA_VISIBLE_DEVICES=1 CUDA_DEVICE_ORDER=PCI_BUS_ID python"),
        (DDP, "8xmi300x", "torchrun --nproc_per_node=8"),
        (DDP + "devices: {select: 2}\n", "8xmi300x", "HIP_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node=2"),
        (CPU, "2x3090", "CUDA_VISIBLE_DEVICES= python run_glue.py"),
        ("strategy: {kind: zero1}\nlauncher: {kind: deepspeed}\n", "2x3090",
         "deepspeed --no_local_rank --include=localhost:0,1 run_glue.py"),
        ("env: {A: $HOME 'x'}\n", "1x4090", """A='$HOME '"'"'x'"'"'' python run_glue.py"""),
        (DDP + "nodes: {count: 2, rendezvous: 'n1:29400'}\n", "2x3090",
         'torchrun --nproc_per_node=2 --nnodes=2 --node_rank="${NODE_RANK:?number of this machine, from 0}"'),
    ],
)  # fmt: skip
def test_a_command_begins_with_what_its_launcher_has_to_know(
    tmp_path: Path, recipe: str, machine: str, begins: str
) -> None:
    lines = export(context(tmp_path, GLUE + recipe, machine), "hf", "out").files["command.sh"].splitlines()
    assert lines[0] == "#!/bin/sh"
    command = " ".join(" ".join(lines[2:]).replace("\\", " ").split())
    assert command.startswith(begins)
    assert shlex.split(command)[-2:] == ["--output_dir", "runs"] or "fsdp_config" in command or "--deepspeed" in command


def test_an_older_transformers_gets_its_variables(tmp_path: Path) -> None:
    fsdp = "strategy: {kind: fsdp, state_dict_type: sharded}\n"
    made = export(context(tmp_path, GLUE + fsdp, transformers="4.57.6"), "hf", "out").files["command.sh"]
    assert "FSDP_VERSION=2" in made
    assert "FSDP_STATE_DICT_TYPE=SHARDED_STATE_DICT" in made


@pytest.mark.parametrize(
    ("recipe", "tool", "why"),
    [
        (GLUE + DDP + "nodes: {count: 2}\n", "hf", "nodes.rendezvous is auto"),
        (CPU + "strategy: {kind: fsdp}\ntrain: {steps: 1}\n", "accelerate", "copies that never talk to one another"),
    ],
)
def test_a_file_that_would_do_something_else_is_not_written(tmp_path: Path, recipe: str, tool: str, why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        export(context(tmp_path, recipe), tool, "out")


def test_what_accelerates_file_cannot_say_is_named(tmp_path: Path) -> None:
    recipe = CPU + DDP + "train: {steps: 1}\nlauncher: {max_restarts: 2}\nefficiency: {gradient_checkpointing: true}\n"
    made = export(context(tmp_path, recipe), "accelerate", "out")
    assert {"devices.type", "launcher.max_restarts", "efficiency.gradient_checkpointing.every"} <= set(made.left)
    assert "ACCELERATE_USE_CPU=true" in made.notes[0]
    first = made.files["accelerate.yaml"].splitlines()[0]
    assert "ACCELERATE_USE_CPU=true accelerate launch --max_restarts 2 --main_process_port 0 --config_file" in first


def test_a_torch_program_that_gets_no_file_in_a_run_can_have_one_written(tmp_path: Path) -> None:
    (tmp_path / "loop.py").touch()
    recipe = (
        "program: {kind: torch, script: loop.py, reads_recipe: true}\nstrategy: {kind: zero3}\noptimizer: {lr: 0.5}\n"
    )
    made = export(context(tmp_path, recipe, "2x3090"), "deepspeed", "out")
    content = json.loads(made.files["deepspeed.json"])
    assert (content["zero_optimization"]["stage"], content["optimizer"]["params"]["lr"]) == (3, 0.5)
    assert "optimizer.lr" not in made.left


@pytest.mark.torch
def test_a_name_that_the_shell_would_take_apart_is_quoted(trainkit: Trainkit, tmp_path: Path) -> None:
    done = trainkit("plan", "ddp", "--export", "accelerate", "--output", "two words")
    assert done.returncode == 0, done.stderr
    first = (tmp_path / "two words/accelerate.yaml").read_text().splitlines()[0]
    assert "--config_file 'two words/accelerate.yaml'" in first
