"""The words that each launcher is started with: as golden files, and as the launchers' own parsers read them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trainkit.launch_plan.model import Plan, Variable
from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan
from trainkit.recipe.resolved import Resolved
from trainkit.tools.registry import LAUNCHERS

Layered = Callable[..., Resolved]
Machine = Callable[..., Facts]
GOLDEN = Path(__file__).parents[1] / "golden" / "commands"
RENEW = "TRAINKIT_RENEW_GOLDEN=1 python -m pytest tests/tools"
NODES = {"count": 3, "rendezvous": "node0:29400"}
SCRIPT = {"kind": "torch", "script": "train.py", "args": ["--nnodes", "7", "--n", "cost: $5", "$$", "${local_rank}"]}


def recipes(launcher: str) -> Iterator[tuple[str, dict[str, Any], int]]:
    """(title, recipe, number of cards) of every strategy, and of what changes a launcher's words."""
    alone = launcher == "python"
    for strategy in ("single", "ddp", "fsdp", "zero1", "zero2", "zero3"):
        ranks = 1 if alone or strategy == "single" else 2
        recipe = {"strategy": {"kind": strategy}, "nodes": {"processes_per_node": ranks}}
        yield f"{strategy}, {ranks} on cpu", recipe, 0
        yield f"{strategy}, {ranks} of 8 cards", recipe, 8
    yield "own script", {"program": SCRIPT, **({} if alone else {"strategy": {"kind": "ddp"}})}, 0
    if launcher in {"torchrun", "accelerate"}:
        yield "ddp, 3 nodes with 8 cards each", {"strategy": {"kind": "ddp"}, "nodes": NODES}, 8
        yield (
            "ddp, restarts and half a second of grace",
            {"strategy": {"kind": "ddp"}, "launcher": {"max_restarts": 3, "grace_seconds": 0.5}},
            0,
        )


def plans(launcher: str, layered: Layered, machine: Machine, **facts: Any) -> dict[str, Plan]:
    chosen = {"launcher": {"kind": launcher}}
    return {
        title: build_plan(layered(chosen, recipe), machine(cards, **facts)).plan
        for title, recipe, cards in recipes(launcher)
    }


def page(found: dict[str, Plan]) -> str:
    """One block a command, the launcher's words one a line; equal commands share a block."""
    blocks: dict[str, list[str]] = {}
    for title, plan in found.items():
        command = plan.commands[0]
        lines = [f"    {word}" for word in command.launcher]
        lines += [
            f"  {part}: {json.dumps([str(word) for word in getattr(command, part)])}" for part in ("wrapper", "program")
        ]
        lines += ["  environment:", *(f"    {name}={value}" for name, value in plan.environment.set)]
        blocks.setdefault("\n".join(lines), []).append(title)
    return "\n\n".join("\n".join([*titles, block]) for block, titles in blocks.items()) + "\n"


def held(path: Path, text: str) -> None:
    """Compare with the golden file, or write it."""
    if os.environ.get("TRAINKIT_RENEW_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert path.exists(), f"{path} is missing; make it with: {RENEW}"
    assert path.read_text() == text, f"{path.name} differs; if the change is meant, renew it with: {RENEW}"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_whole_command_of_every_strategy_is_as_written_down(
    layered: Layered, machine: Machine, launcher: str
) -> None:
    held(GOLDEN / f"{launcher}.txt", page(plans(launcher, layered, machine)))


def test_the_accelerate_file_is_as_written_down(layered: Layered, machine: Machine) -> None:
    found = plans("accelerate", layered, machine)
    for title, name in (("ddp, 2 on cpu", "cpu"), ("ddp, 3 nodes with 8 cards each", "nodes")):
        content = next(file.content for file in found[title].files if file.path == "accelerate.yaml")
        held(GOLDEN / f"accelerate-{name}.yaml", content)


VALUES = {
    Variable.RUN_ID: "r1",
    Variable.RUN_DIR: "/runs/r1",
    Variable.ATTEMPT_DIR: "/runs/r1/attempts/1",
    Variable.PORT: "29400",
    Variable.NODE_RANK: "1",
    Variable.MASTER_ADDR: "node0",
    Variable.LOCAL_ADDR: "node1",
    Variable.IS_HOST: "false",
}

PARSERS = """
import json, sys
commands = json.load(sys.stdin)
from torch.distributed.run import config_from_args, get_args_parser
for words, program in commands["torchrun"]:
    found = get_args_parser().parse_args(words)
    assert [found.training_script, *found.training_script_args] == program, (words, found)
    assert found.no_python
    config, entry, args = config_from_args(found)
    assert [entry, *args] == program
from accelerate.commands.launch import launch_command_parser
for words, program in commands["accelerate"]:
    found = launch_command_parser().parse_args(words)
    assert [found.training_script, *found.training_script_args] == program, (words, found)
    assert found.no_python
from deepspeed.launcher import launch, runner
for words, program in commands["deepspeed"]:
    found = runner.parse_args(words)
    sys.argv = ["launch", "--no_python", "--no_local_rank", found.user_script, *found.user_args]
    inner = launch.parse_args()
    assert [inner.training_script, *inner.training_script_args] == program, (words, inner)
    assert found.no_python and found.no_local_rank
print("accepted", sum(map(len, commands.values())))
"""


@pytest.mark.e2e
def test_the_launchers_own_parsers_accept_every_command_and_leave_the_program_alone(
    layered: Layered, machine: Machine
) -> None:
    commands: dict[str, list[tuple[list[str], list[str]]]] = {}
    for launcher in ("torchrun", "accelerate", "deepspeed"):
        for plan in plans(launcher, layered, machine).values():
            command = plan.commands[0]
            for program in (command.wrapper + command.program, command.program):
                words = [word.bind(VALUES) for word in (*command.launcher[4:], *program)]
                commands.setdefault(launcher, []).append((words, [word.bind(VALUES) for word in program]))
    done = subprocess.run(
        [sys.executable, "-c", PARSERS],
        input=json.dumps(commands),
        env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"accepted {sum(map(len, commands.values()))}" in done.stdout


LOADER = """
import sys
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
for path in sys.argv[1:]:
    config = load_config_from_file(path)
    args = launch_command_parser().parse_args([f"--config_file={path}", "--machine_rank=0", "program"])
    found, _, _ = _validate_launch_command(args)
    sizes = (found.num_processes, found.num_machines, found.gpu_ids, found.mixed_precision)
    print(path, config.distributed_type.value, *sizes, "multi" if found.multi_gpu else "simple")
"""


@pytest.mark.e2e
def test_accelerates_own_loader_reads_the_file_as_it_is_meant(
    layered: Layered, machine: Machine, tmp_path: Path
) -> None:
    expected = {
        "single, 1 on cpu": "NO 1 1 all no simple",
        "ddp, 2 on cpu": "MULTI_GPU 2 1 all no multi",
        "fsdp, 2 of 8 cards": "MULTI_GPU 2 1 all no multi",
        "ddp, 3 nodes with 8 cards each": "MULTI_GPU 24 3 all no multi",
    }
    found = plans("accelerate", layered, machine)
    lines = []
    for number, (title, meant) in enumerate(expected.items()):
        path = tmp_path / f"{number}.yaml"
        path.write_text(next(file.content for file in found[title].files if file.path == "accelerate.yaml"))
        lines.append(f"{path} {meant}")
    done = subprocess.run(
        [sys.executable, "-c", LOADER, *(line.split()[0] for line in lines)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == lines


@pytest.mark.parametrize(("torch", "has"), [("2.13.0+cpu", True), ("2.14.1", True), ("2.6.0", False), ("", False)])
def test_a_flag_is_used_only_with_versions_that_have_it(
    layered: Layered, machine: Machine, torch: str, has: bool
) -> None:
    recipe = {"strategy": {"kind": "ddp"}, "launcher": {"grace_seconds": 2.5}}
    plan = build_plan(layered(recipe), machine(packages={"torch": torch})).plan
    words = [str(word) for word in plan.commands[0].launcher]
    assert ("--shutdown-timeout=8" in words) is has
    assert any(word.startswith("--shutdown-timeout") for word in words) is has


@pytest.mark.parametrize(("version", "has"), [("0.18.9", False), ("0.19.2", False), ("0.19.3", True)])
def test_what_importing_deepspeed_sets_is_shown_for_the_versions_that_set_it(
    layered: Layered, machine: Machine, version: str, has: bool
) -> None:
    recipe = layered({"strategy": {"kind": "zero2"}, "launcher": {"kind": "deepspeed"}})
    plan = build_plan(
        recipe, machine(packages={"torch": "2.13.0", "numpy": "2.0", "safetensors": "0.8.0", "deepspeed": version})
    ).plan
    assert ("PYTORCH_NVML_BASED_CUDA_CHECK" in dict(plan.environment.added)) is has
