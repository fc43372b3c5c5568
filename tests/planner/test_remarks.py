"""What a plan says of settings that do less here than they seem to, and of what it could not find out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.made_up_recipes import MemoryFiles
from trainkit.errors import RecipeError
from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan
from trainkit.recipe.resolve import resolve
from trainkit.recipe.resolved import Request, Resolved

Layered = Callable[..., Resolved]
Machine = Callable[..., Facts]
CPU: dict[str, Any] = {"devices": {"type": "cpu"}}


def test_settings_that_went_with_their_strategy_are_named(machine: Machine) -> None:
    files = {
        "/w/r.yaml": "extends: ./weak.yaml\nstrategy: {kind: ddp}\n",
        "/w/weak.yaml": "train: {steps: 1}\nstrategy: {kind: fsdp, sharding: shard_grad_op, offload: true}\n",
    }
    plan = build_plan(resolve(Request("r.yaml", "/w"), MemoryFiles(files)), machine()).plan
    what = "strategy.sharding, strategy.offload are dropped: strategy.kind changed from fsdp to ddp at r.yaml:2:18"
    assert what in [notice.what for notice in plan.notices if notice.severity == "note"]
    unchanged = build_plan(resolve(Request("weak.yaml", "/w"), MemoryFiles(files)), machine()).plan
    assert not any("dropped" in notice.what for notice in unchanged.notices)


@pytest.mark.parametrize(
    ("recipe", "gpus", "facts", "severity", "words"),
    [
        ({"strategy": {"kind": "fsdp", "offload": True}}, 0, {}, "note", "strategy.offload moves nothing on a CPU"),
        ({"precision": {"dtype": "fp16"}}, 0, {}, "warning", "fp16 on a CPU is slower"),
        ({"precision": {"tf32": True}}, 0, {}, "warning", "precision.tf32 does nothing on cpu"),
        ({"train": {"steps": 9, "epochs": 2}}, 0, {}, "note", "train.epochs 2 does nothing beside train.steps 9"),
        (
            {"program": {"kind": "hf", "script": "t.py"}, "strategy": {"kind": "zero2"}, **CPU},
            0,
            {"packages": {"torch": "2.13.0", "deepspeed": "0.18.0", "transformers": "5.23.0", "accelerate": "1.15.0"}},
            "warning",
            "0.18.0 loses gradients at stage 2",
        ),
        ({}, 0, {"notes": {"gpus": "NVMLError: driver not loaded"}}, "warning", "driver not loaded"),
        (
            {"strategy": {"kind": "ddp"}, "nodes": {"processes_per_node": 3}},
            0,
            {"cores": 1},
            "warning",
            "3 ranks share 1 CPU core",
        ),
        (
            {**CPU, "strategy": {"kind": "ddp"}, "launcher": {"kind": "deepspeed"}},
            2,
            {},
            "warning",
            "shows GPUs to the ranks of a CPU run",
        ),
        (
            {},
            1,
            {"packages": {"torch": "2.13.0+cpu", "numpy": "2.0", "safetensors": "0.8.0"}},
            "blocker",
            "torch 2.13.0+cpu is a build for CPUs",
        ),
        ({"devices": {"type": "mps"}}, 0, {}, "blocker", "no MPS device"),
        ({"program": {"kind": "torch", "script": "t.py", "reads_recipe": True}}, 0, {}, "note", "TRAINKIT_RECIPE"),
    ],
)
def test_a_plan_says_what_a_reader_would_not_expect(
    layered: Layered,
    machine: Machine,
    recipe: dict[str, Any],
    gpus: int,
    facts: dict[str, Any],
    severity: str,
    words: str,
) -> None:
    plan = build_plan(layered(recipe), machine(gpus, **facts)).plan
    assert [notice.severity for notice in plan.notices if words in notice.what] == [severity]


def test_a_plain_recipe_on_a_plain_machine_needs_no_remark(layered: Layered, machine: Machine) -> None:
    for strategy in ("single", "ddp", "fsdp", "zero1", "zero2", "zero3"):
        for gpus in (0, 2):
            notices = build_plan(
                layered({"precision": {"dtype": "auto"}, "strategy": {"kind": strategy}}), machine(gpus)
            ).plan.notices
            small = gpus and strategy not in ("single", "ddp")  # nothing of so small a model has to be divided
            assert ["it fits without strategy.kind" in notice.what for notice in notices] == [True] * bool(small)


def test_mistakes_of_several_decisions_are_reported_at_once(layered: Layered, machine: Machine) -> None:
    recipe = {
        "program": {"args": ["--x"]},
        "env": {"RANK": "1"},
        "launcher": {"kind": "python"},
        "strategy": {"kind": "ddp"},
        "batch": {"global": 7},
    }
    with pytest.raises(RecipeError) as caught:
        build_plan(layered(recipe), machine())
    assert {found.key for found in caught.value.diagnostics} == {
        "program.args",
        "env.RANK",
        "launcher.kind",
        "batch.global",
    }


def test_auto_on_a_card_without_bf16_says_what_fp16_brings_along(layered: Layered, machine: Machine) -> None:
    resolved, facts = layered({"precision": {"dtype": "auto"}}), machine(1)
    old = replace(facts, gpus=tuple(replace(gpu, compute_capability=(7, 0)) for gpu in facts.gpus))
    for tried, expected in ((facts, 0), (old, 1)):
        said = [each.what for each in build_plan(resolved, tried).plan.notices if "precision auto is" in each.what]
        assert len(said) == expected


SAVES: dict[str, Any] = {"checkpoint": {"every_steps": 10, "resume": "auto"}}
SLURM: dict[str, Any] = {"cluster": {"kind": "slurm"}}


@pytest.mark.parametrize(
    ("recipe", "gpus", "told"),
    [
        (SAVES, 1, True),
        ({"checkpoint": {"every_steps": 10}, "launcher": {"kind": "torchrun", "max_restarts": 1}}, 1, True),
        (SLURM, 1, True),
        ({"cluster": {"kind": "ssh", "hosts": ["a"]}, "checkpoint": {"every_steps": 10}}, 1, False),
        (SAVES, 0, False),
        ({**SAVES, "train": {"deterministic": True}}, 1, False),
        ({"checkpoint": {"every_steps": 10}}, 1, False),
        ({"checkpoint": {"resume": "auto"}}, 1, False),
        ({"cluster": {"kind": "slurm", "requeue": {"after": []}}}, 1, False),
        ({**SAVES, "program": {"kind": "hf", "script": "t.py"}}, 1, False),
    ],
)
def test_going_on_is_said_to_round_otherwise_on_cards_unless_it_is_deterministic(
    layered: Layered, machine: Machine, recipe: dict[str, Any], gpus: int, told: bool
) -> None:
    notices = build_plan(layered(recipe), machine(gpus)).plan.notices
    assert ["up to rounding" in each.what for each in notices].count(True) == told
