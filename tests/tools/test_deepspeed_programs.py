"""Programs on DeepSpeed's engine: what the recipe gives stands in their file, and the rest stays DeepSpeed's."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from trainkit.errors import Origin, RecipeError
from trainkit.launch_plan.model import Plan
from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan
from trainkit.recipe.resolved import Attachment, Resolved

Layered = Callable[..., Resolved]
Machine = Callable[..., Facts]

PROGRAM: dict[str, Any] = {
    "program": {"kind": "deepspeed", "script": "train.py"},
    "devices": {"type": "cpu"},
    "strategy": {"kind": "zero2"},
    "batch": {"global": 8, "micro": 2},
}
BATCH = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}


def planned(layered: Layered, machine: Machine, *layers: Mapping[str, Any], base: Any = None) -> Plan:
    resolved = layered(PROGRAM, *layers)
    return build_plan(resolved if base is None else with_file(resolved, base), machine(gpus=0)).plan


def with_file(resolved: Resolved, base: Any) -> Resolved:
    """The recipe with a DeepSpeed file of the user's, each of whose keys stands on a line of its own."""
    names = ("", *base) if isinstance(base, dict) else ("",)
    origins = {name: Origin("file layer0.yaml", 0, "ds.json", line, 1) for line, name in enumerate(names, 1)}
    attached = {"strategy.config": Attachment("ds.json", base, origins)}
    return Resolved(resolved.recipe, resolved.tree, resolved.history, attached)


def file_of(plan: Plan) -> dict[str, Any]:
    (content,) = [file.content for file in plan.files if file.path == "deepspeed.json"]
    return dict(json.loads(content))


def complaints(layered: Layered, machine: Machine, recipe: Mapping[str, Any]) -> dict[str, str]:
    with pytest.raises(RecipeError) as caught:
        planned(layered, machine, recipe)
    return {found.key: found.what for found in caught.value.diagnostics}


def test_a_bare_recipe_says_stage_and_batch_and_nothing_that_it_does_not_give(
    layered: Layered, machine: Machine
) -> None:
    plan = planned(layered, machine)

    assert file_of(plan) == {**BATCH, "zero_optimization": {"stage": 2}}
    assert [str(word) for word in plan.commands[0].program][1:] == [
        "train.py",
        "--deepspeed_config",
        "<run_dir>/deepspeed.json",
    ]


def test_what_the_recipe_gives_is_made_by_deepspeed(layered: Layered, machine: Machine) -> None:
    recipe = {
        "precision": {"dtype": "bf16"},
        "optimizer": {"name": "adamw_torch", "lr": 1e-3, "beta1": 0.8},
        "schedule": {"name": "cosine", "warmup_steps": 5, "min_lr_ratio": 0.2},
        "train": {"steps": 50, "max_grad_norm": 0.5},
        "logging": {"every_steps": 7},
    }

    content = file_of(planned(layered, machine, recipe))

    assert content["optimizer"] == {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.8, 0.95], "torch_adam": True}}
    assert content["scheduler"] == {
        "type": "WarmupCosineLR",
        "params": {
            "warmup_type": "linear",
            "warmup_num_steps": 5,
            "total_num_steps": 50,
            "warmup_min_ratio": 0.0,
            "cos_min_ratio": 0.2,
        },
    }
    assert content["bf16"] == {"enabled": True}
    assert (content["gradient_clipping"], content["steps_per_print"]) == (0.5, 7)


def test_a_file_of_the_users_own_stays_as_it_is_where_the_recipe_is_silent(layered: Layered, machine: Machine) -> None:
    base = {
        **BATCH,
        "bf16": {"enabled": True},
        "gradient_clipping": 3.0,
        "optimizer": {"type": "Lamb", "params": {"lr": 0.1}},
        "activation_checkpointing": {"partition_activations": True},
        "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 12},
    }

    assert file_of(planned(layered, machine, base=base)) == base


def test_a_disagreement_between_file_and_recipe_names_both(layered: Layered, machine: Machine) -> None:
    with pytest.raises(RecipeError) as caught:
        planned(
            layered, machine, {"optimizer": {"lr": 0.2}}, base={"optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
        )
    (found,) = caught.value.diagnostics
    assert found.what == "optimizer.params.lr is 0.1 in the DeepSpeed file, but the recipe makes it 0.2"
    assert "layer1.yaml" in found.why


@pytest.mark.parametrize(
    ("recipe", "key", "says"),
    [
        ({"model": {"layers": 2}}, "model.layers", "cannot reach a program of kind deepspeed"),
        ({"optimizer": {"name": "adafactor"}}, "optimizer.name", "cannot be made by DeepSpeed"),
        ({"optimizer": {"args": {"foreach": True}}}, "optimizer.args.foreach", "cannot reach"),
        ({"train": {"steps": 5}}, "train.steps", "cannot reach"),
        ({"train": {"seed": 5}}, "train.seed", "cannot reach"),
        ({"schedule": {"name": "cosine", "warmup_steps": 2}}, "schedule.name", "needs its length"),
        ({"schedule": {"name": "constant_with_warmup"}}, "schedule.warmup_steps", "warm up"),
        ({"schedule": {"name": "wsd", "warmup_steps": 2}}, "schedule.name", "cannot be made by DeepSpeed"),
        (
            {"schedule": {"name": "linear", "warmup_steps": 2}, "train": {"steps": 9}},
            "schedule.min_lr_ratio",
            "ends at 0",
        ),
        ({"strategy": {"kind": "fsdp"}}, "strategy.kind", "unsupported combination"),
        ({"strategy": {"kind": "ddp"}}, "batch.micro", "cannot reach the program"),
        ({"strategy": {"kind": "ddp"}, "optimizer": {"lr": 1e-3}}, "optimizer.lr", "cannot reach the program"),
        ({"program": {"args": ["--deepspeed_config=x.json"]}}, "program.args", "the plan's to pass"),
    ],
)
def test_what_cannot_reach_the_program_is_refused(
    layered: Layered, machine: Machine, recipe: dict[str, Any], key: str, says: str
) -> None:
    found = complaints(layered, machine, recipe)

    assert says in found[key], found


@pytest.mark.parametrize(("flag", "asked"), [("--local_rank", True), ("--local-rank", "--local-rank")])
@pytest.mark.parametrize(
    ("launcher", "processes", "word"),
    [("python", 1, "0"), ("torchrun", 2, "${local_rank}"), ("accelerate", 2, "${local_rank}"), ("accelerate", 1, "0")],
)
def test_the_local_rank_is_written_as_the_launcher_fills_it_in(
    layered: Layered, machine: Machine, launcher: str, processes: int, word: str, flag: str, asked: bool | str
) -> None:
    recipe = {
        "program": {"local_rank": asked, "args": ["--cost", "${local_rank}"]},
        "launcher": {"kind": launcher},
        "nodes": {"processes_per_node": processes},
    }

    words = [str(each) for each in planned(layered, machine, recipe).commands[0].program]

    assert words[2] == f"{flag}={word}"
    assert words[4] == ("$${local_rank}" if processes > 1 else "${local_rank}")  # the user's own dollar stays a dollar


@pytest.mark.cli
def test_the_deepspeed_launcher_passes_the_local_rank_through_a_shell(
    layered: Layered, machine: Machine, tmp_path: Path
) -> None:
    script = tmp_path / "a script.py"
    script.write_text("import sys; print(sys.argv[1:])")
    program = {"local_rank": "--local-rank", "args": ["--x", "$HOME a"]}
    recipe = {"program": program, "launcher": {"kind": "deepspeed"}}
    shell, flag, line, name, python, _, *rest = map(str, planned(layered, machine, recipe).commands[0].program)

    done = subprocess.run(
        [shell, flag, line, name, sys.executable, str(script), *rest],
        env={"LOCAL_RANK": "3"},
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    assert python == "/opt/python"
    assert done.stdout.strip() == str(["--local-rank=3", "--x", "$HOME a", *rest[-2:]])


def test_a_script_that_configures_the_engine_in_its_code_gets_no_file(layered: Layered, machine: Machine) -> None:
    program = {"program": {"kind": "deepspeed", "script": "train.py"}, "devices": {"type": "cpu"}}
    plan = build_plan(layered({**program, "strategy": {"kind": "ddp"}}), machine(gpus=0)).plan

    assert [str(word) for word in plan.commands[0].program][1:] == ["train.py"]
    assert [file.path for file in plan.files] == ["expected.json"]
    assert json.loads(plan.files[0].content)["strategy"] is None
    assert "in its own code" in plan.strategy.reason
    assert str(dict(plan.environment.set)["DS_ACCELERATOR"]) == "cpu"


@pytest.mark.parametrize("kind", ["hf", "accelerate", "deepspeed"])
@pytest.mark.parametrize("said", [{"zero_optimization": {"stage": 0}}, {}])
def test_the_engine_without_partitioning_keeps_the_file(
    layered: Layered, machine: Machine, kind: str, said: dict[str, Any]
) -> None:
    base = {**said, "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}}}
    recipe = {**WITHOUT_BATCH, "program": {"kind": kind, "script": "train.py"}, "strategy": {"kind": "zero0"}}
    resolved = with_file(layered(recipe), base)
    if kind != "deepspeed" and not said:
        with pytest.raises(RecipeError, match="zero_optimization is missing"):
            build_plan(resolved, machine(gpus=0))
    else:
        assert file_of(build_plan(resolved, machine(gpus=0)).plan) == base


@pytest.mark.parametrize(("version", "blocked"), [("0.19.6", False), ("0.19.8", True)])
def test_what_the_installed_deepspeed_no_longer_has_is_said_before_the_run(
    layered: Layered, machine: Machine, version: str, blocked: bool
) -> None:
    base = {**BATCH, "optimizer": {"type": "OneBitAdam"}, "elasticity": {"enabled": False}}
    resolved = with_file(layered(WITHOUT_BATCH, {"strategy": {"kind": "zero0"}}), base)
    plan = build_plan(resolved, machine(gpus=0, packages={"torch": "2.13.0", "deepspeed": version})).plan

    said = " ".join(each.what for each in plan.notices)
    assert ("no longer has the optimizer OneBitAdam" in said) is blocked
    assert ("no longer has elasticity" in said) is blocked


def test_the_built_in_trainer_has_replicas_of_its_own(layered: Layered, machine: Machine) -> None:
    with pytest.raises(RecipeError, match="zero0") as caught:
        build_plan(layered({"strategy": {"kind": "zero0"}}), machine(gpus=0))
    assert "strategy.kind: ddp" in caught.value.diagnostics[0].hint


def test_what_trainer_takes_from_the_file_in_place_of_its_flags_is_said(layered: Layered, machine: Machine) -> None:
    base = {
        "train_micro_batch_size_per_gpu": "auto",
        "optimizer": {"type": "Lion", "params": {"lr": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"}},
        "zero_optimization": {"stage": 2},
    }
    recipe = {
        **WITHOUT_BATCH,
        "program": {"kind": "hf", "script": "train.py"},
        "optimizer": {"name": "adamw_torch"},
        "schedule": {"name": "cosine"},
        "train": {"max_grad_norm": 0.5},
    }
    plan = build_plan(with_file(layered(recipe), base), machine(gpus=0)).plan

    said = " ".join(each.what for each in plan.notices)
    assert "Trainer takes the scheduler WarmupDecayLR of the DeepSpeed file" in said
    assert "Trainer takes the optimizer Lion of the DeepSpeed file" in said
    assert "max_grad_norm 0.5 does not reach DeepSpeed" in said
    assert file_of(plan) == base


WITHOUT_BATCH = {key: value for key, value in PROGRAM.items() if key != "batch"}


@pytest.mark.parametrize(
    ("said", "batch"),
    [
        ({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}, (12, 3, 2)),
        ({"train_batch_size": 64}, (64, 32, 1)),  # DeepSpeed accumulates only where the file says so
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": "auto"}, (64, 32, 1)),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, (64, 4, 8)),
    ],
)
def test_a_batch_that_only_the_users_file_says_is_the_plans(
    layered: Layered, machine: Machine, said: dict[str, Any], batch: tuple[int, int, int]
) -> None:
    plan = build_plan(with_file(layered(WITHOUT_BATCH), said), machine(gpus=0)).plan

    assert (plan.batch.global_, plan.batch.micro, plan.batch.accumulation) == batch
    filled = {name: size for name, size in zip(BATCH, batch, strict=True) if said.get(name) == "auto"}
    assert file_of(plan) == {**said, **filled, "zero_optimization": {"stage": 2}}


def test_a_batch_of_the_recipe_that_the_users_file_denies_is_still_an_error(layered: Layered, machine: Machine) -> None:
    said = {"train_micro_batch_size_per_gpu": 3}
    with pytest.raises(RecipeError, match="train_micro_batch_size_per_gpu is 3 in the DeepSpeed file"):
        build_plan(with_file(layered(WITHOUT_BATCH, {"batch": {"micro": 2}}), said), machine(gpus=0))


@pytest.mark.parametrize("sequence", [1, 2])
def test_sizes_of_the_file_alone_that_do_not_fit_the_ranks_are_said_for_the_script_may_split_its_model(
    layered: Layered, machine: Machine, sequence: int
) -> None:
    said = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}
    said |= {"sequence_parallel_size": sequence} if sequence > 1 else {}
    plan = build_plan(with_file(layered(WITHOUT_BATCH), said), machine(gpus=0)).plan
    assert ("do not fit 2 ranks" in plan.batch.note) is (sequence == 1)
    assert (plan.batch.global_, plan.batch.micro, plan.batch.accumulation) == (4, 4, 1)
    assert file_of(plan) == {**said, "zero_optimization": {"stage": 2}}


def test_three_batch_sizes_that_do_not_fit_the_ranks_are_named_by_their_places(
    layered: Layered, machine: Machine
) -> None:
    said = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}
    recipe = {**WITHOUT_BATCH, "program": {"kind": "accelerate", "script": "train.py"}, "devices": {"type": "cuda"}}
    with pytest.raises(RecipeError) as caught:
        build_plan(with_file(layered(recipe), said), machine(gpus=2))
    (found,) = caught.value.diagnostics
    assert "batch.global 64 (ds.json:2:1)" in found.what
    assert found.origin is not None
    assert found.origin.source == "ds.json"


def test_a_number_format_that_only_the_users_file_says_is_the_plans(layered: Layered, machine: Machine) -> None:
    recipe = {**WITHOUT_BATCH, "program": {"kind": "hf", "script": "train.py"}}
    facts = machine(gpus=0, packages={"torch": "2.13.0", "transformers": "5.23.0", "deepspeed": "0.19.8"})

    plan = build_plan(with_file(layered(recipe), {"bf16": {"enabled": True}}), facts).plan

    words = [str(word) for word in plan.commands[0].program]
    assert words[words.index("--bf16") + 1] == "True"
    assert file_of(plan)["bf16"] == {"enabled": True}
