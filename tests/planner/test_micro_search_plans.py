"""What a plan says of a micro batch that the trainer is to find, and where it is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from trainkit.errors import RecipeError
from trainkit.launch_plan.model import Plan, plan_from_json, plan_to_json
from trainkit.launch_plan.render import table
from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan
from trainkit.planner.fingerprint import memory_digest
from trainkit.recipe.resolved import Resolved
from trainkit.recipe.schema import Recipe

Layered = Callable[..., Resolved]
Machine = Callable[..., Facts]
OPEN: dict[str, Any] = {"batch": {"global": 32, "micro": "auto"}, "train": {"steps": 3}}


def test_the_plan_says_that_it_is_searched_for_among_which_sizes_and_within_what(
    layered: Layered, machine: Machine
) -> None:
    plan = build_plan(layered(OPEN), machine()).plan
    page = " ".join(table.render(plan).split())
    assert "Batch: 32 = micro \N{MULTIPLICATION SIGN} accumulation \N{MULTIPLICATION SIGN} 1" in page
    assert "the largest of 1, 2, 4, 8, 16, 32 that fits; accumulation follows" in page
    assert "takes more memory than what it has and nine tenths of what is free" in page
    assert "batch.micro auto: the largest products that fit" in page
    bounded = build_plan(layered(OPEN, {"batch": {"memory_mib": 700}}), machine()).plan
    assert any("700 MiB (batch.memory_mib)" in notice.what for notice in bounded.notices)


def test_the_trainer_is_told_what_to_choose_from_and_the_plan_survives_json(layered: Layered, machine: Machine) -> None:
    plan: Plan = build_plan(layered(OPEN), machine()).plan
    (settings,) = (json.loads(file.content) for file in plan.files if file.path == "trainer.json")
    assert settings["batch"]["search"] == [1, 2, 4, 8, 16, 32]
    assert plan_from_json(json.loads(json.dumps(plan_to_json(plan)))) == plan


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ({"strategy": {"kind": "zero2"}}, "DeepSpeed reads the micro batch from its file"),
        ({"strategy": {"kind": "fsdp"}}, "would leave the others waiting"),
        ({"efficiency": {"compile": {"enabled": True}}}, "would be compiled again"),
        ({"program": {"kind": "torch", "script": "train.py", "reads_recipe": True}}, "only the built-in trainer"),
    ],
)
def test_what_cannot_search_refuses_with_the_reason(
    layered: Layered, machine: Machine, recipe: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        build_plan(layered(OPEN, recipe), machine())
    (found,) = caught.value.diagnostics
    assert reason in str(found.why)
    assert "batch.micro: a number" in found.hint


def test_a_bound_without_a_search_is_refused() -> None:
    with pytest.raises(ValidationError, match="memory_mib limits the search of micro: auto"):
        Recipe.model_validate({"batch": {"memory_mib": 100}})


def test_what_is_remembered_depends_on_what_takes_memory_and_on_nothing_else(layered: Layered) -> None:
    def digest(**changes: Any) -> str:
        resolved = layered(OPEN, changes)
        batch = build_plan(resolved, Facts(**FACTS)).plan.batch
        return memory_digest(resolved.recipe, batch, "fp32")

    usual = digest()
    for changes in (
        {"optimizer": {"lr": 1.0}},
        {"train": {"steps": 9}},
        {"checkpoint": {"resume": "auto"}},
        {"data": {"workers": 2}},
    ):
        assert digest(**changes) == usual
    for changes in (
        {"optimizer": {"name": "sgd"}},
        {"optimizer": {"beta1": 0.0}},  # sgd keeps no momentum then
        {"train": {"loss": "own:loss"}},
        {"model": {"layers": 9}},
        {"data": {"sequence_length": 64}},
        {"batch": {"global": 64}},
        {"batch": {"memory_mib": 100}},
    ):
        assert digest(**changes) != usual


FACTS: dict[str, Any] = {
    "platform": "linux",
    "machine": "x86_64",
    "hostname": "somewhere",
    "python": "3.11.7",
    "executable": "/opt/python",
    "cpu_cores": 4,
    "memory_total": 2**34,
}
