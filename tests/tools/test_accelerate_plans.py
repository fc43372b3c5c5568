"""Plans for scripts on Accelerator(): what would be dropped is an error where it stands, the rest is the script's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from trainkit.errors import Origin, RecipeError
from trainkit.launch_plan.model import Plan
from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan
from trainkit.recipe.resolved import Attachment, Resolved

Layered = Callable[..., Resolved]
Machine = Callable[..., Facts]

PACKAGES = {"torch": "2.13.0", "accelerate": "1.15.0", "deepspeed": "0.19.8", "transformers": "5.23.0"}
SCRIPT: dict[str, Any] = {"program": {"kind": "accelerate", "script": "train.py"}}
CPU: dict[str, Any] = {"devices": {"type": "cpu"}}
FSDP1: dict[str, Any] = {"kind": "fsdp", "version": 1}


def files(plan: Plan) -> dict[str, str]:
    return {file.path: file.content for file in plan.files}


@pytest.mark.parametrize(
    ("recipe", "key"),
    [
        ({"optimizer": {"lr": 0.1}}, "optimizer.lr"),
        ({"train": {"steps": 3}}, "train.steps"),
        ({"model": {"layers": 2}}, "model.layers"),
        ({"data": {"workers": 2}}, "data.workers"),
        ({"data": {"pin_memory": False}}, "data.pin_memory"),
        ({"batch": {"micro": 4}}, "batch.micro"),
        ({"batch": {"global": 32}}, "batch.global"),
        ({"checkpoint": {"resume": "auto"}}, "checkpoint.resume"),
        ({"precision": {"tf32": True}}, "precision.tf32"),
        ({"train": {"max_grad_norm": 0.5}}, "train.max_grad_norm"),
        ({"strategy": {"kind": "ddp", "bucket_mb": 50.0}}, "strategy.bucket_mb"),
        ({"strategy": {"kind": "ddp", "find_unused_parameters": True}}, "strategy.find_unused_parameters"),
        ({"strategy": {"kind": "fsdp", "backward_prefetch": "no_prefetch"}}, "strategy.backward_prefetch"),
        ({"strategy": {"kind": "fsdp", "limit_all_gathers": False}}, "strategy.limit_all_gathers"),
        ({"strategy": {"kind": "fsdp", "reduce_dtype": "fp32"}}, "strategy.reduce_dtype"),
        (
            {"strategy": {**FSDP1, "cpu_ram_efficient_loading": True, "sync_module_states": False}},
            "strategy.cpu_ram_efficient_loading",
        ),
        (
            {"efficiency": {"gradient_checkpointing": {"every": True}}},
            "efficiency.gradient_checkpointing.every",
        ),
        (
            {"strategy": {"kind": "fsdp"}, "efficiency": {"gradient_checkpointing": {"every": 2}}},
            "efficiency.gradient_checkpointing.every",
        ),
        ({"efficiency": {"compile": {"enabled": True, "backend": "mine"}}}, "efficiency.compile.backend"),
        ({"efficiency": {"compile": {"enabled": True, "dynamic": None}}}, "efficiency.compile.dynamic"),
    ],
)
def test_a_setting_that_accelerator_cannot_be_told_is_an_error_where_it_stands(
    layered: Layered, machine: Machine, recipe: dict[str, Any], key: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        build_plan(layered(SCRIPT, {"strategy": {"kind": "ddp"}}, recipe), machine(2, packages=PACKAGES))
    (found,) = caught.value.diagnostics
    assert (found.key, found.origin and found.origin.source) == (key, "layer2.yaml")
    assert found.why
    assert found.hint


@pytest.mark.parametrize(
    ("recipe", "key", "instead"),
    [
        ({"strategy": {"kind": "fsdp"}}, "strategy.kind", "strategy.kind: ddp"),
        ({"precision": {"dtype": "fp16"}}, "precision.dtype", "bf16 or fp32"),
        ({"strategy": {"kind": "single"}, "launcher": {"kind": "torchrun"}}, "launcher.kind", "accelerate or python"),
    ],
)
def test_what_accelerate_would_turn_into_something_else_is_refused_with_the_nearest_sound_choice(
    layered: Layered, machine: Machine, recipe: dict[str, Any], key: str, instead: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        build_plan(layered(SCRIPT, CPU, recipe), machine(packages=PACKAGES))
    (found,) = caught.value.diagnostics
    assert found.key == key
    assert instead in found.hint


def test_what_the_recipe_leaves_out_stays_the_scripts_own(layered: Layered, machine: Machine) -> None:
    plan = build_plan(layered(SCRIPT, CPU), machine(packages=PACKAGES)).plan
    said = [name for name, _ in plan.environment.set if name.startswith(("ACCELERATE_", "FSDP_"))]
    assert said == ["ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU"]
    assert plan.launcher.kind == "accelerate"


def test_a_files_whole_batch_is_refused_where_accelerate_may_count_one_process(
    layered: Layered, machine: Machine
) -> None:
    resolved = layered(SCRIPT, CPU, {"strategy": {"kind": "zero2", "config": "ds.json"}})
    origin = Origin("file ds.json", 0, "ds.json", 3, 5)
    file = Attachment("ds.json", {"train_batch_size": 8}, {"train_batch_size": origin})
    with pytest.raises(RecipeError) as caught:
        build_plan(_with(resolved, file), machine(packages=PACKAGES))
    (found,) = caught.value.diagnostics
    assert "train_batch_size in the DeepSpeed file is 8" in found.what
    assert found.origin == origin


def _with(resolved: Resolved, file: Attachment) -> Resolved:
    return Resolved(resolved.recipe, resolved.tree, resolved.history, attachments={"strategy.config": file})


def test_deepspeed_needs_transformers_beside_accelerate(layered: Layered, machine: Machine) -> None:
    packages = {name: version for name, version in PACKAGES.items() if name != "transformers"}
    plan = build_plan(layered(SCRIPT, CPU, {"strategy": {"kind": "zero2"}}), machine(packages=packages)).plan
    assert [notice.what for notice in plan.notices if notice.severity == "blocker"] == [
        "strategy of Accelerator() zero2 requires transformers >= 4.50; it is not installed"
    ]
    assert "deepspeed.json" in files(plan)


def test_the_preset_for_cpus_asks_for_nothing_that_is_not_so(layered: Layered, machine: Machine) -> None:
    preset = {"devices": {"type": "cpu", "select": "none"}, "data": {"pin_memory": False}}
    assert build_plan(layered(SCRIPT, preset), machine(packages=PACKAGES)).plan.topology.device == "cpu"


def test_a_variable_that_accelerate_would_overwrite_is_an_error_and_one_that_it_leaves_alone_arrives(
    layered: Layered, machine: Machine
) -> None:
    free = {"env": {"FSDP_IGNORED_MODULES": "embedding"}}
    plan = build_plan(layered(SCRIPT, free), machine(1, packages=PACKAGES)).plan
    assert str(dict(plan.environment.set)["FSDP_IGNORED_MODULES"]) == "embedding"
    for wanted in ({"env": {"ACCELERATE_DYNAMO_BACKEND": "eager"}}, {"env_from": ["FSDP_VERSION"]}):
        with pytest.raises(RecipeError) as caught:
            build_plan(layered(SCRIPT, wanted), machine(1, packages=PACKAGES))
        (found,) = caught.value.diagnostics
        assert "which the plan decides" in found.what
        assert found.origin


MESH = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "2"}


@pytest.mark.parametrize(
    ("version", "shards", "what"),
    [
        (2, "2", ""),
        (2, "4", "the mesh dp_shard 4 x tp 2 is 8 ranks, and the plan has 4"),
        (1, "2", "a mesh of ranks needs FSDP version 2"),
    ],
)
def test_a_mesh_of_ranks_is_carried_where_accelerate_would_build_it(
    layered: Layered, machine: Machine, version: int, shards: str, what: str
) -> None:
    recipe = {
        "program": {"kind": "accelerate", "script": "train.py"},
        "strategy": {"kind": "fsdp", "version": version},
        "env": {**MESH, "PARALLELISM_CONFIG_DP_SHARD_SIZE": shards},
    }
    if not what:
        environment = dict(build_plan(layered(recipe), machine(4, packages=PACKAGES)).plan.environment.set)
        assert {name: str(environment[name]) for name in MESH} == MESH
        return
    with pytest.raises(RecipeError) as caught:
        build_plan(layered(recipe), machine(4, packages=PACKAGES))
    (found,) = caught.value.diagnostics
    assert found.what == what
    assert found.origin


@pytest.mark.parametrize(("env", "told"), [({}, "true"), ({"ACCELERATE_DEEPSPEED_ZERO3_INIT": "false"}, "false")])
def test_whether_a_model_of_stage_3_is_built_in_parts_is_the_users(
    layered: Layered, machine: Machine, env: dict[str, str], told: str
) -> None:
    recipe = SCRIPT | {"strategy": {"kind": "zero3"}, "env": env}
    plan = build_plan(layered(recipe, {"launcher": {"kind": "torchrun"}}), machine(2, packages=PACKAGES)).plan
    assert str(dict(plan.environment.set)["ACCELERATE_DEEPSPEED_ZERO3_INIT"]) == told
    # accelerate launch exports what its file says, and nothing of a key that is not there.
    plan = build_plan(layered(recipe, {"launcher": {"kind": "accelerate"}}), machine(2, packages=PACKAGES)).plan
    in_file = "zero3_init_flag: true" in next(each for path, each in files(plan).items() if path.endswith(".yaml"))
    assert in_file is (told == "true")


@pytest.mark.parametrize("sharding", ["hybrid_shard", "hybrid_shard_zero2", "no_shard"])
def test_shardings_of_version_1_reach_accelerator_and_are_refused_in_version_2(
    layered: Layered, machine: Machine, sharding: str
) -> None:
    recipe = SCRIPT | {"strategy": {**FSDP1, "sharding": sharding}, "launcher": {"kind": "torchrun"}}
    plan = build_plan(layered(recipe), machine(2, packages=PACKAGES)).plan
    assert str(dict(plan.environment.set)["FSDP_SHARDING_STRATEGY"]) == sharding.upper()
    with pytest.raises(RecipeError) as caught:
        build_plan(layered(recipe, {"strategy": {"version": 2}}), machine(2, packages=PACKAGES))
    (found,) = caught.value.diagnostics
    assert (found.key, found.why) == ("strategy.sharding", "version 2 has no such setting")


def test_one_process_that_nobody_asked_for_has_no_rank_environment_as_by_hand(
    layered: Layered, machine: Machine
) -> None:
    recipe = {**SCRIPT, "strategy": {"kind": "ddp"}, "launcher": {"kind": "accelerate"}, "devices": {"select": "all"}}
    names = {name for name, _ in build_plan(layered(recipe), machine(1)).plan.environment.set}
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} & names
    asked = {**recipe, "nodes": {"processes_per_node": 1}}
    assert {"RANK", "WORLD_SIZE"} <= {name for name, _ in build_plan(layered(asked), machine(1)).plan.environment.set}
