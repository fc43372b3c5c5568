"""What a plan promises of a user's program stands in the plan, and the words that have it shown do too."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from trainkit.launch_plan.model import Plan
from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan
from trainkit.recipe.resolved import Resolved

Layered = Callable[..., Resolved]
Machine = Callable[..., Facts]

PACKAGES = {"torch": "2.13.0", "accelerate": "1.15.0", "deepspeed": "0.19.8", "transformers": "5.23.0"}


def promised(plan: Plan) -> dict[str, Any] | None:
    content = next((file.content for file in plan.files if file.path == "expected.json"), None)
    return None if content is None else json.loads(content)


@pytest.mark.parametrize(
    ("program", "shown"),
    [
        ({"kind": "hf"}, True),
        ({"kind": "hf", "verify": False}, False),
        ({"kind": "torch"}, True),
        ({"kind": "torch", "verify": True}, True),
        ({"kind": "torch", "verify": False}, False),
        ({"kind": "torch", "script": "train.sh"}, False),
        ({"kind": "torch", "script": "train.sh", "verify": True}, True),
    ],
)
def test_the_wrapper_is_told_to_look_where_the_recipe_or_the_kind_asks_for_it(
    layered: Layered, machine: Machine, program: dict[str, Any], shown: bool
) -> None:
    recipe = {"program": {"script": "train.py", **program}, "devices": {"type": "cpu"}, "strategy": {"kind": "ddp"}}

    plan = build_plan(layered(recipe), machine(packages=PACKAGES)).plan

    words = [str(word) for word in plan.commands[0].wrapper]
    assert ("--expect" in words) == (promised(plan) is not None) == shown
    assert ("--prove" in words) == (program.get("verify") is True)
    if shown:
        assert words[words.index("--expect") + 1] == "<run_dir>/expected.json"
        seen_in_all = {"strategy": "ddp", "world_size": 2, "device": "cpu", "dtype": None}
        if program["kind"] == "torch" and "verify" not in program:
            seen_in_all["on_difference"] = "warn"  # its strategy is its own affair
        assert promised(plan) == seen_in_all | ({"arguments": {}} if program["kind"] == "hf" else {})


def test_the_numbers_that_the_script_is_told_are_promised_and_those_of_its_own_words_are_not(
    layered: Layered, machine: Machine
) -> None:
    recipe = {
        "program": {"kind": "hf", "script": "train.py", "args": {"seed": 7}},
        "devices": {"type": "cpu"},
        "batch": {"micro": 4},
        "train": {"steps": 3},
        "optimizer": {"lr": 0.01},
        "precision": {"tf32": False},
    }

    plan = build_plan(layered(recipe), machine(packages=PACKAGES)).plan

    numbers = {
        "per_device_train_batch_size": 4,
        "max_steps": 3,
        "learning_rate": 0.01,
        "tf32": False,
    }
    assert (promised(plan) or {})["arguments"] == numbers


def test_a_number_format_is_promised_where_the_recipe_gives_one_and_the_program_is_told(
    layered: Layered, machine: Machine
) -> None:
    program = {"script": "train.py", "reads_recipe": True}
    recipe = {"program": program, "devices": {"type": "cpu"}, "precision": {"dtype": "bf16"}}
    formats = []
    for kind in ("hf", "torch"):
        plan = build_plan(layered(recipe, {"program": {"kind": kind, "verify": True}}), machine(packages=PACKAGES)).plan
        formats.append((promised(plan) or {})["dtype"])

    assert formats == ["bf16", None]
