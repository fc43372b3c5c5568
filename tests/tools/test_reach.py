"""What the recipe sets reaches the program, or the plan says that it cannot; what it leaves out stays the program's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from trainkit.errors import RecipeError
from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan
from trainkit.recipe.resolved import Resolved
from trainkit.recipe.schema import Recipe
from trainkit.recipe.yaml_writer import resolved_yaml

Layered = Callable[..., Resolved]
Machine = Callable[..., Facts]

PACKAGES = {"torch": "2.13.0", "accelerate": "1.15.0", "deepspeed": "0.19.8", "transformers": "5.23.0"}
HF: dict[str, Any] = {"program": {"kind": "hf", "script": "train.py"}, "devices": {"type": "cpu"}}


@pytest.mark.parametrize(
    ("recipe", "key"),
    [
        ({"model": {"layers": 2}}, "model.layers"),
        ({"data": {"path": "x"}}, "data.path"),
        ({"eval": {"batches": 3}}, "eval.batches"),
        ({"peft": {"kind": "lora"}}, "peft.kind"),
        ({"precision": {"dtype": "bf16", "weights": "bf16"}}, "precision.weights"),
        ({"efficiency": {"attention": "sdpa"}}, "efficiency.attention"),
        ({"checkpoint": {"asynchronous": True}}, "checkpoint.asynchronous"),
    ],
)
def test_a_setting_that_cannot_reach_the_program_is_an_error_where_it_stands(
    layered: Layered, machine: Machine, recipe: dict[str, Any], key: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        build_plan(layered(HF, recipe), machine(packages=PACKAGES))
    (found,) = caught.value.diagnostics
    assert found.key == key
    assert f"{key} cannot reach a program of kind hf" in found.what
    assert found.origin
    assert found.origin.source == "layer1.yaml"
    assert found.hint


@pytest.mark.parametrize(
    ("setting", "sound"),
    [
        ({"version": 1}, {"version": 2}),
        ({"backward_prefetch": "no_prefetch"}, {"backward_prefetch": "backward_pre"}),
        ({"use_orig_params": False}, {"use_orig_params": True}),
        ({"state_dict_type": "full"}, {"state_dict_type": "sharded"}),
        ({"sharding": "no_shard"}, {"sharding": "hybrid_shard"}),
    ],
)
def test_the_trainer_refuses_what_only_other_programs_do_and_takes_what_it_does_anyway(
    layered: Layered, machine: Machine, setting: dict[str, Any], sound: dict[str, Any]
) -> None:
    fsdp = {"strategy": {"kind": "fsdp"}, "train": {"steps": 1}}
    with pytest.raises(RecipeError) as caught:
        build_plan(layered(fsdp, {"strategy": setting}), machine(packages=PACKAGES))
    assert [found.key for found in caught.value.diagnostics] == [f"strategy.{next(iter(setting))}"]
    assert build_plan(layered(fsdp, {"strategy": sound}), machine(packages=PACKAGES)).plan.strategy.kind == "fsdp"


def test_settings_of_a_version_that_cannot_be_had_are_one_error(layered: Layered, machine: Machine) -> None:
    first = {"kind": "fsdp", "version": 1, "forward_prefetch": True, "use_orig_params": False}
    with pytest.raises(RecipeError) as caught:
        build_plan(layered({"strategy": first, "train": {"steps": 1}}), machine(packages=PACKAGES))
    (found,) = caught.value.diagnostics
    assert found.key == "strategy.version"
    assert found.hint == "write 2, and leave strategy.forward_prefetch and strategy.use_orig_params out"


def test_a_version_that_another_setting_implies_is_not_blamed_for_nobody_wrote_it(
    solve: Callable[..., Resolved], machine: Machine
) -> None:
    files = {"r.yaml": "train: {steps: 1}\n", "fsdp.json": '{"forward_prefetch": true}'}
    resolved = solve(files, overrides=("--fsdp", "full_shard", "--fsdp_config", "fsdp.json"))
    with pytest.raises(RecipeError) as caught:
        build_plan(resolved, machine(packages=PACKAGES))
    assert [(found.key, found.hint) for found in caught.value.diagnostics] == [
        ("strategy.forward_prefetch", "leave it out")
    ]


@pytest.mark.parametrize(("said", "count"), [({}, 1), ({"program": {"args": {"use_cpu": True}}}, 0)])
def test_the_flag_without_which_ranks_on_a_cpu_train_copies_is_named(
    layered: Layered, machine: Machine, said: dict[str, Any], count: int
) -> None:
    plan = build_plan(layered(HF, said, {"strategy": {"kind": "ddp"}}), machine(packages=PACKAGES)).plan
    assert sum("Trainer trains a copy in each process" in notice.what for notice in plan.notices) == count


def test_a_value_that_the_program_follows_anyway_is_no_error(layered: Layered, machine: Machine) -> None:
    recipe = {"checkpoint": {"asynchronous": False}, "efficiency": {"compile": {"scope": "model"}}}
    plan = build_plan(layered(HF, recipe), machine(packages=PACKAGES)).plan
    assert plan.program.kind == "hf"


def test_what_the_recipe_leaves_out_is_not_said_to_the_program(
    layered: Layered, machine: Machine, spelled: Callable[..., list[str]]
) -> None:
    plan = build_plan(layered(HF), machine(packages=PACKAGES)).plan
    flags = [word for word in spelled(plan.commands[0].program) if word.startswith("--")]
    decided = ["--use_cpu", "--output_dir"]
    assert flags == decided


def test_a_run_that_is_run_again_says_no_more_than_it_did(layered: Layered) -> None:
    text = resolved_yaml(layered(HF, {"optimizer": {"lr": 0.1}}))
    assert "lr: 0.1" in text
    assert "weight_decay" not in text
    assert "sample" not in text


def test_a_setting_that_is_left_out_and_one_that_is_said_are_different_trainings(
    layered: Layered, machine: Machine
) -> None:
    def digest(*layers: dict[str, Any]) -> str:
        return build_plan(layered(HF, *layers), machine(packages=PACKAGES)).plan.training_digest

    assert digest() == digest({"logging": {"every_steps": 3}})
    assert digest() != digest({"optimizer": {"lr": 3e-4}})  # the recipe's default, and hardly the script's


def test_a_plain_program_is_refused_what_nothing_hands_on_unless_it_reads_the_recipe(
    layered: Layered, machine: Machine
) -> None:
    wish = {"precision": {"dtype": "bf16"}, "optimizer": {"name": "adamw_torch"}, "batch": {"micro": 8}}
    program = {"kind": "torch", "script": "t.py"}
    with pytest.raises(RecipeError) as caught:
        build_plan(layered({"program": program}, wish), machine(packages=PACKAGES))
    assert {each.key for each in caught.value.diagnostics} == {"precision.dtype", "optimizer.name", "batch.micro"}
    assert all("program.reads_recipe" in each.hint for each in caught.value.diagnostics)
    plan = build_plan(layered({"program": {**program, "reads_recipe": True}}, wish), machine(packages=PACKAGES)).plan
    assert any("TRAINKIT_RECIPE" in notice.what for notice in plan.notices)


def test_a_recipe_that_an_older_run_wrote_out_whole_still_plans(layered: Layered, machine: Machine) -> None:
    whole = Recipe.model_validate({"program": {"kind": "torch", "script": "t.py"}}).model_dump(by_alias=True)
    assert build_plan(layered(whole), machine(packages=PACKAGES)).plan.program.kind == "torch"
    with pytest.raises(RecipeError) as caught:
        build_plan(layered(whole, {"optimizer": {"lr": 0.5}}), machine(packages=PACKAGES))
    assert [each.key for each in caught.value.diagnostics] == ["optimizer.lr"]


COLLECTIVES = "hang.collective_seconds"


def of_kind(layered: Layered, kind: str, seconds: int | None, strategy: str = "ddp") -> Resolved:
    program = {"program": {"kind": kind, "script": "train.py"}, "strategy": {"kind": strategy}}
    asked = {} if seconds is None else {"hang": {"collective_seconds": seconds}}
    return layered({**program, "devices": {"type": "cpu"}, "nodes": {"processes_per_node": 2}}, asked)


def test_the_time_limit_of_collectives_reaches_trainer_and_deepspeed(layered: Layered, machine: Machine) -> None:
    facts = machine(packages=PACKAGES)
    for seconds, words in ((None, 0), (900, 1)):
        plan = build_plan(of_kind(layered, "hf", seconds), facts).plan
        argv = [str(word) for command in plan.commands for word in command.argv]
        assert argv.count("--ddp_timeout=900") + argv.count("--ddp_timeout") == words
        plan = build_plan(of_kind(layered, "deepspeed", seconds, "zero2"), facts).plan
        minutes = dict(plan.environment.set).get("DEEPSPEED_TIMEOUT")
        assert (minutes and minutes.parts) == (("15",) if seconds else None)


@pytest.mark.parametrize(
    ("kind", "strategy", "why"),
    [
        ("accelerate", "ddp", "InitProcessGroupKwargs"),
        ("torch", "ddp", "makes its own process group"),
        ("deepspeed", "zero2", "whole minutes"),
    ],
)
def test_a_time_limit_of_collectives_that_cannot_reach_the_program_is_an_error(
    layered: Layered, machine: Machine, kind: str, strategy: str, why: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        build_plan(of_kind(layered, kind, 90, strategy), machine(packages=PACKAGES))
    (found,) = caught.value.diagnostics
    assert found.key == COLLECTIVES
    assert why in (found.why or "")
    assert found.hint
