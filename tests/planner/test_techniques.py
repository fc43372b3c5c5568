"""The table of techniques: what a plan lists of it, and that its words are those of recipes and flags."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml

from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan
from trainkit.planner.techniques import TECHNIQUES
from trainkit.recipe.flags import flags
from trainkit.recipe.resolved import Resolved
from trainkit.recipe.schema.fields import schema

Layered = Callable[..., Resolved]
Machine = Callable[..., Facts]


def listed(layered: Layered, facts: Facts, recipe: dict[str, Any]) -> dict[str, str]:
    return {each.key: each.value for each in build_plan(layered(recipe), facts).plan.techniques}


@pytest.mark.parametrize("row", TECHNIQUES, ids=lambda row: row.choice)
def test_every_row_names_a_setting_and_a_flag_that_exist(row: Any) -> None:
    assert row.key in schema().settings
    if row.flag:
        assert row.flag.split()[0].removeprefix("--") in flags()


def test_a_plain_run_has_its_optimizer_and_its_attention(layered: Layered, machine: Machine) -> None:
    assert listed(layered, machine(), {}) == {"optimizer.name": "adamw_torch", "efficiency.attention": "auto"}


@pytest.mark.parametrize(
    ("recipe", "key", "value"),
    [
        ("batch: {global: 64, micro: 4}", "batch.accumulation", "16"),
        ("precision: auto", "precision.dtype", "bf16"),
        ("precision: fp16", "precision.dtype", "fp16"),
        ("precision: {tf32: true}", "precision.tf32", "true"),
        ("efficiency: {compile: {enabled: true}}", "efficiency.compile.enabled", "true"),
        ("efficiency: {gradient_checkpointing: {every: 2}}", "efficiency.gradient_checkpointing.every", "2"),
        ("efficiency: {attention: eager}", "efficiency.attention", "eager"),
        ("optimizer: {name: 'torch.optim:Adam'}", "optimizer.name", "torch.optim:Adam"),
        ("data: {workers: 3}", "data.workers", "3"),
        ("data: {pin_memory: true}", "data.pin_memory", "true"),
        ("strategy: {kind: fsdp, offload: true}", "strategy.offload", "true"),
        ("strategy: {kind: zero3, offload_param: cpu}", "strategy.offload_param", "cpu"),
    ],
)
def test_a_technique_in_force_is_listed_with_its_value(
    layered: Layered, machine: Machine, recipe: str, key: str, value: str
) -> None:
    asked = yaml.safe_load(recipe)
    if isinstance(asked.get("precision"), str):
        asked["precision"] = {"dtype": asked["precision"]}
    assert listed(layered, machine(1), asked)[key] == value


def test_what_does_nothing_on_a_cpu_is_not_listed_there(layered: Layered, machine: Machine) -> None:
    recipe = {"strategy": {"kind": "fsdp", "offload": True}, "precision": {"tf32": True}, "data": {"pin_memory": True}}
    assert not {"strategy.offload", "precision.tf32", "data.pin_memory"} & listed(layered, machine(), recipe).keys()


def test_of_a_program_of_the_users_own_no_technique_is_claimed(layered: Layered, machine: Machine) -> None:
    recipe = {"program": {"kind": "torch", "script": "t.py", "reads_recipe": True}, "optimizer": {"name": "sgd"}}
    assert listed(layered, machine(), recipe) == {}


@pytest.mark.parametrize(
    ("recipe", "key"),
    [
        ({"precision": {"eval": "bf16"}}, "precision.eval"),
        ({"efficiency": {"compile": {"enabled": True, "scope": "model"}}}, "efficiency.compile.scope"),
        ({"efficiency": {"compile": {"enabled": True, "mode": "reduce-overhead"}}}, "efficiency.compile.mode"),
        ({"data": {"workers": 1, "prefetch_factor": 4}}, "data.prefetch_factor"),
        ({"data": {"kind": "dataset", "path": "rows.jsonl"}}, "data.packing"),
        ({"strategy": {"kind": "fsdp", "sharding": "shard_grad_op"}}, "strategy.sharding"),
    ],
)
def test_a_refinement_is_listed_where_it_acts(
    layered: Layered, machine: Machine, recipe: dict[str, Any], key: str
) -> None:
    assert key in listed(layered, machine(1), recipe)


@pytest.mark.parametrize(
    ("recipe", "key"),
    [
        ({"precision": {"dtype": "bf16", "eval": "fp32"}}, "precision.eval"),
        ({"efficiency": {"compile": {"scope": "blocks", "mode": "max-autotune"}}}, "efficiency.compile"),
        (
            {
                "model": {"kind": "hf", "architecture": "bert", "task": "sequence_classification"},
                "data": {"kind": "dataset", "path": "rows.jsonl", "columns": {"label": "label"}},
            },
            "data.packing",
        ),
    ],
)
def test_a_refinement_of_what_is_off_is_not_listed(
    layered: Layered, machine: Machine, recipe: dict[str, Any], key: str
) -> None:
    assert not [name for name in listed(layered, machine(1), recipe) if name.startswith(key)]
