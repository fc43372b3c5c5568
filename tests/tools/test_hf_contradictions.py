"""A plan for transformers' Trainer never says two things: what contradicts it is refused, with both places."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from trainkit.errors import Diagnostic, Origin, RecipeError
from trainkit.launch_plan.model import Notice, Plan
from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan
from trainkit.recipe.resolved import Attachment, Resolved

Layered = Callable[..., Resolved]
Machine = Callable[..., Facts]
Spelled = Callable[..., list[str]]

PACKAGES = {"torch": "2.13.0", "accelerate": "1.15.0", "deepspeed": "0.19.8", "transformers": "5.23.0"}
HF: dict[str, Any] = {"program": {"kind": "hf", "script": "train.py"}}
CPU: dict[str, Any] = {"devices": {"type": "cpu"}}
FSDP: dict[str, Any] = {"strategy": {"kind": "fsdp"}}
INSTALL = "/opt/python -m pip install 'transformers>=4.50,<5.24'"


def words(args: Any) -> dict[str, Any]:
    return {"program": {"args": args}}


@pytest.fixture
def plan(layered: Layered, machine: Machine) -> Callable[..., Plan]:
    """The plan for layers of a recipe on a machine with `cards` cards."""

    def build(*layers: dict[str, Any], cards: int = 0, names: tuple[str, ...] = (), **packages: str | None) -> Plan:
        installed = {name: version for name, version in {**PACKAGES, **packages}.items() if version}
        return build_plan(layered(HF, *layers), machine(cards, *names, packages=installed)).plan

    return build


@pytest.fixture
def refused(plan: Callable[..., Plan]) -> Callable[..., Diagnostic]:
    """The one error of layers that cannot be planned."""

    def errors(*layers: dict[str, Any], **machine: Any) -> Diagnostic:
        with pytest.raises(RecipeError) as caught:
            plan(*layers, **machine)
        (found,) = caught.value.diagnostics
        return found

    return errors


def passed(plan: Plan, flag: str) -> list[str]:
    """What follows each use of a flag among the program's words."""
    program = [str(word) for word in plan.commands[0].program]
    return [program[place + 1] for place, word in enumerate(program) if word == flag]


@pytest.mark.parametrize(
    ("args", "recipe", "key"),
    [
        ({"learning_rate": 0.1}, {"optimizer": {"lr": 0.2}}, "optimizer.lr"),
        ({"per_device_train_batch_size": 16}, {"batch": {"micro": 4}}, "batch.micro"),
        (["--per_gpu_train_batch_size", "16"], {"batch": {"micro": 4}}, "batch.micro"),
        ({"gradient_accumulation_steps": 3}, {"batch": {"global": 16, "micro": 4}}, "batch.accumulation"),
        (["--bf16", "true"], {"precision": {"dtype": "fp32"}}, "precision.dtype"),
        ({"no_cuda": True}, {"devices": {"type": "cuda"}}, "devices.type"),
        ({"eval_strategy": "epoch"}, {"eval": {"every_steps": 5}}, "eval.every_steps"),
        (["--no_dataloader_pin_memory"], {"data": {"pin_memory": True}}, "data.pin_memory"),
        (["--fsdp", "full_shard"], {}, "strategy.kind"),
        (
            {"gradient_checkpointing": True},
            FSDP | {"efficiency": {"gradient_checkpointing": {"every": True}}},
            "efficiency.gradient_checkpointing.every",
        ),
        (
            {"activation_checkpointing": True},
            {"efficiency": {"gradient_checkpointing": {"every": False}}},
            "efficiency.gradient_checkpointing.every",
        ),
        ({"tf32": True}, {"precision": {"tf32": False}}, "precision.tf32"),
        ({"resume_from_checkpoint": "x"}, {}, "checkpoint.resume"),
    ],
)
def test_an_argument_that_disagrees_with_the_plan_is_an_error_that_names_both(
    refused: Callable[..., Diagnostic], args: Any, recipe: dict[str, Any], key: str
) -> None:
    error = refused(words(args), recipe, cards=2)
    assert f"the recipe's {key} makes it" in error.what
    assert error.origin
    assert error.origin.source == "layer1.yaml"
    assert ("layer2.yaml" in error.why) is any(key.startswith(each) for each in _given(recipe))


def _given(recipe: dict[str, Any]) -> set[str]:
    return {f"{section}.{name}" for section, settings in recipe.items() for name in settings}


@pytest.mark.parametrize(
    ("args", "recipe", "flag", "said"),
    [
        ({"learning_rate": 0.2}, {"optimizer": {"lr": 0.2}}, "--learning_rate", "0.2"),
        (["--learning_rate", "2e-1"], {"optimizer": {"lr": 0.2}}, "--learning_rate", "2e-1"),
        (["--use-cpu", "yes"], CPU, "--use-cpu", "yes"),
        ({"weight_decay": 0.3}, {"optimizer": {"lr": 0.2}}, "--weight_decay", "0.3"),
        # what no layer says is the program's own
        ({"per_device_train_batch_size": 16}, {}, "--per_device_train_batch_size", "16"),
        ({"bf16": "True"}, {}, "--bf16", "True"),
        ({"gradient_checkpointing": "True"}, {}, "--gradient_checkpointing", "True"),
    ],
)
def test_an_argument_that_says_the_same_is_said_once(
    plan: Callable[..., Plan], args: Any, recipe: dict[str, Any], flag: str, said: str
) -> None:
    assert passed(plan(CPU, words(args), recipe), flag) == [said]


def test_a_script_under_fsdp_recomputes_as_its_own_argument_says(plan: Callable[..., Plan]) -> None:
    found = plan(FSDP, words({"gradient_checkpointing": "True"}), cards=2)
    assert passed(found, "--gradient_checkpointing") == ["True"]
    assert "activation_checkpointing" not in found.files[0].content  # FSDP's own switch stays off


@pytest.mark.parametrize(
    ("layers", "what"),
    [
        ((FSDP, words({"predict_with_generate": True})), "fsdp and predict_with_generate"),
        ((FSDP, words({"deepspeed": "ds.json"})), "the plan writes this file itself"),
        ((words({"dataloader_prefetch_factor": 2}),), "there are none"),
        ((words(["settings.json"]),), "is one file"),
        (({"train": {"steps": 0}},), "train.steps 0"),
        (({"optimizer": {"name": "adamw_torch_foreach"}},), "optimizer.name adamw_torch_foreach"),
        (({"optimizer": {"name": "torch.optim:Rprop"}},), "optimizer.name torch.optim:Rprop"),
        (({"optimizer": {"name": "adafactor", "beta1": 0.5}},), "optimizer.beta1 0.5"),
        (({"efficiency": {"gradient_checkpointing": {"every": 2}}},), "gradient_checkpointing.every 2"),
        (({"strategy": {"kind": "ddp", "bucket_mb": 2.5}},), "strategy.bucket_mb 2.5"),
        (({"strategy": {"kind": "fsdp", "forward_prefetch": True}},), "of FSDP's version 1"),
        (({**CPU, "precision": {"tf32": True}},), "is for CUDA GPUs"),
        ((CPU, words({"tf32": True})), "is for CUDA GPUs"),
        (
            ({"checkpoint": {"keep_best": True, "every_steps": 5}, "eval": {"every_steps": 5}},),
            "checkpoint.every_steps 5",
        ),
    ],
)
def test_what_trainer_refuses_or_ignores_is_refused(
    refused: Callable[..., Diagnostic], layers: tuple[dict[str, Any], ...], what: str
) -> None:
    error = refused(*layers, cards=2)
    assert what in error.what
    assert error.hint


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        ({"strategy": {"kind": "fsdp"}}, "trains with DDP"),
        ({"precision": {"dtype": "fp16"}}, "computes in fp32"),
        ({"launcher": {"kind": "torchrun"}}, "sets LOCAL_RANK"),
        ({"strategy": {"kind": "zero2"}, "precision": {"dtype": "fp32", "eval": "bf16"}}, "one format"),
    ],
)
def test_what_would_fall_back_in_silence_on_a_cpu_is_refused(
    refused: Callable[..., Diagnostic], recipe: dict[str, Any], why: str
) -> None:
    assert why in refused(CPU, recipe).why


def test_a_single_process_sees_one_card_and_no_group(plan: Callable[..., Plan]) -> None:
    environment = dict(plan(cards=4).environment.set)
    assert str(environment["CUDA_VISIBLE_DEVICES"]).count(",") == 0
    assert not environment.keys() & {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"}
    assert "LOCAL_RANK" in dict(plan({"strategy": {"kind": "ddp"}}, cards=1).environment.set)


def test_a_single_process_on_several_cards_is_said_to_multiply_the_batch(plan: Callable[..., Plan]) -> None:
    made = plan({"devices": {"select": [1, 0]}}, cards=2)
    assert (made.topology.world_size, len(made.topology.groups[0].devices)) == (1, 2)
    assert any("nn.DataParallel over all of them and multiplies" in each.what for each in blockers(made, "note"))
    with pytest.raises(RecipeError) as caught:
        plan({"devices": {"select": [1, 0]}, "batch": {"global": 16}}, cards=2)
    assert caught.value.diagnostics[0].key == "batch.global"


def blockers(plan: Plan, severity: str = "blocker") -> list[Notice]:
    return [notice for notice in plan.notices if notice.severity == severity]


@pytest.mark.parametrize(
    ("version", "what", "remedy"),
    [
        (None, "transformers >= 4.50; it is not installed", INSTALL),
        ("4.40.0", "4.40.0 is installed", INSTALL),
        ("6.0.0", "newer than trainkit knows", INSTALL),
    ],
)
def test_a_version_that_the_tables_do_not_know_blocks_the_run(
    plan: Callable[..., Plan], version: str | None, what: str, remedy: str
) -> None:
    (blocker,) = blockers(plan(CPU, transformers=version))
    assert what in blocker.what
    assert remedy in blocker.hint


@pytest.mark.parametrize(("setting", "said"), [({"dtype": "bf16"}, "bf16"), ({"tf32": True}, "tf32")])
def test_formats_that_the_card_lacks_block_the_run(
    plan: Callable[..., Plan], setting: dict[str, Any], said: str
) -> None:
    (blocker,) = blockers(plan({"precision": setting}, cards=1, names=("NVIDIA V100",)))
    assert blocker.what.startswith(f"{said} requires compute capability 8.0")


def test_a_hub_strategy_that_cannot_be_resumed_from_and_names_that_are_gone_are_warnings(
    plan: Callable[..., Plan],
) -> None:
    def warned(args: Any, **packages: str) -> list[str]:
        return [notice.what for notice in blockers(plan(CPU, words(args), **packages), "warning")]

    assert "no optimizer state" in warned({"push_to_hub": True})[0]
    assert warned({"push_to_hub": True, "hub_strategy": "checkpoint"}) == []
    (said,) = blockers(plan(CPU, {"checkpoint": {"push_to_hub": {"repo": "ada/glue"}}}), "warning")
    assert "hub_strategy every_save pushes no optimizer state" in said.what
    assert said.hint.startswith("set checkpoint.push_to_hub.strategy to checkpoint ")
    assert "no longer have" in warned(["--logging_dir", "logs"])[0]
    assert warned(["--logging_dir", "logs"], transformers="4.57.6") == []


@pytest.mark.parametrize(
    ("words_given", "older", "newest"),
    [
        (["--overwrite_output_dir"], None, []),
        (["--no_cuda", "True"], None, ["--use_cpu", "True"]),
        (["--evaluation_strategy", "epoch"], ["--eval_strategy", "epoch"], ["--eval_strategy", "epoch"]),
        (["--per_gpu_eval_batch_size=4"], None, ["--per_device_eval_batch_size", "4"]),
        (["--warmup_ratio", "0.03"], None, ["--warmup_steps", "0.03"]),
        (["--warmup_steps", "5", "--warmup_ratio", "0.03"], None, ["--warmup_steps", "5"]),
        (["--group_by_length", "yes"], None, ["--train_sampling_strategy", "group_by_length"]),
        (["--group_by_length", "False"], None, []),
        (["--fp16_backend", "auto", "--half_precision_backend", "apex"], None, ["--half_precision_backend", "apex"]),
        (["--push_to_hub", "--hub_strategy", "checkpoint"], None, None),
        (["--", "--no_cuda"], None, None),
    ],
)
def test_the_programs_own_words_are_those_of_the_installed_version(
    plan: Callable[..., Plan], words_given: list[str], older: list[str] | None, newest: list[str] | None
) -> None:
    def own(version: str) -> list[str]:
        program = [str(word) for word in plan(CPU, words(words_given), transformers=version).commands[0].program]
        added = ("--use_cpu", "True") if "--no_cuda" not in words_given[0] else ()
        end = program.index("--") if "--" in program else len(program)
        return [each for each in program[2 : program.index("--output_dir")] if each not in added] + program[end:]

    assert own("4.57.6") == (older or words_given)
    assert own("5.23.0") == (words_given if newest is None else newest)


def test_what_is_left_out_or_said_otherwise_is_a_remark(plan: Callable[..., Plan]) -> None:
    made = plan(CPU, words(["--overwrite_output_dir", "--warmup_ratio", "0.1"]))
    said = [each.what for each in blockers(made, "note")]
    assert "has no --overwrite_output_dir: it is left out" in said[0]
    assert "--warmup_ratio 0.1 reaches it as --warmup_steps 0.1" in said[1]


def test_a_flag_that_the_script_declares_itself_stays(layered: Layered, machine: Machine) -> None:
    def last(source: str) -> str:
        resolved = replace(layered(HF, CPU, words(["--warmup_ratio", "0.1"])), script=source)
        return str(build_plan(resolved, machine(packages=PACKAGES)).plan.commands[0].program[2])

    assert last("class A:\n    warmup_ratio: float = 0.1\n") == "--warmup_ratio"
    assert last("parser.add_argument('--warmup_ratio')") == "--warmup_ratio"
    assert last("training_args.warmup_ratio") == "--warmup_steps"


def test_a_short_form_of_a_flag_that_the_plan_gives_is_a_warning(plan: Callable[..., Plan]) -> None:
    recipe = {"optimizer": {"lr": 0.1}}
    (warning,) = blockers(plan(CPU, recipe, words(["--learning", "0.2"])), "warning")
    assert "short for --learning_rate" in warning.what
    assert blockers(plan(CPU, recipe, words(["--learn_fast", "--label_smoothing_factor", "0.1"])), "warning") == []


def test_a_plan_that_resumes_says_what_the_script_has_to_do(plan: Callable[..., Plan]) -> None:
    resuming = plan(CPU, {"checkpoint": {"resume": "/old/checkpoint-40"}})
    assert passed(resuming, "--resume_from_checkpoint") == ["/old/checkpoint-40"]
    assert (resuming.resume.path, resuming.resume.step) == ("/old/checkpoint-40", 40)
    assert "hand it to train()" in blockers(resuming, "note")[0].what


def test_scripts_of_trl_need_the_package_and_a_release_that_goes_on_from_a_checkpoint(
    layered: Layered, machine: Machine
) -> None:
    def said(version: str, resume: str) -> list[tuple[str, str, str]]:
        trl = {"trl": version} if version else {}
        program = {"program": {"kind": "hf", "module": "trl.scripts.dpo"}, "checkpoint": {"resume": resume}}
        made = build_plan(layered(CPU, program), machine(packages={**PACKAGES, **trl})).plan
        return [(each.severity, each.what, each.hint) for each in made.notices if "trl" in each.what]

    (missing,) = said("", "never")
    assert missing[:2] == ("blocker", "program.module trl.scripts.dpo requires trl >= 0.12; it is not installed")
    assert "install 'trl>=1.15,<1.17'" in missing[2]
    assert said("1.14.2", "never") == said("1.15.0", "/old/checkpoint-40") == []
    (anew,) = said("1.14.2", "/old/checkpoint-40")
    assert anew[:2] == ("blocker", "the scripts of trl 1.14.2 begin anew, whatever --resume_from_checkpoint says")


def test_the_users_deepspeed_file_and_trainer_say_the_same(layered: Layered, machine: Machine) -> None:
    tree = {
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.8, 0.9], "weight_decay": "auto"}},
        "zero_optimization": {"stage3_prefetch_bucket_size": "auto"},
    }
    recipe = {"strategy": {"kind": "zero3", "config": "ds.json"}, **CPU, "batch": {"global": 16}}

    def build(*layers: dict[str, Any]) -> Plan:
        resolved = layered(HF, recipe, *layers)
        attachment = Attachment("/w/ds.json", tree, {"gradient_clipping": Origin("file ds.json", 0, "ds.json", 2, 3)})
        return build_plan(
            replace(resolved, attachments={"strategy.config": attachment}), machine(packages=PACKAGES)
        ).plan

    plan = build()
    (content,) = (json.loads(file.content) for file in plan.files if file.path == "deepspeed.json")
    assert content["optimizer"] == tree["optimizer"]
    assert content["zero_optimization"]["stage3_prefetch_bucket_size"] == "auto"  # Trainer knows the model's width
    for flag, said in (
        ("max_grad_norm", "0.5"),
        ("learning_rate", "0.01"),
        ("adam_beta1", "0.8"),
        ("adam_beta2", "0.9"),
    ):
        assert passed(plan, f"--{flag}") == [said]
    assert passed(plan, "--weight_decay") == []
    assert "fused_adam" in str([str(word) for word in plan.preparations[0].argv])
    with pytest.raises(RecipeError) as caught:
        build({"train": {"max_grad_norm": 0.4}})
    assert "gradient_clipping is 0.5 in the DeepSpeed file" in caught.value.diagnostics[0].what
    with pytest.raises(RecipeError) as caught:
        build(words({"max_grad_norm": 0.4}))
    assert "the DeepSpeed file says 0.5" in caught.value.diagnostics[0].what


def test_the_plan_says_which_fsdp_it_is(plan: Callable[..., Plan]) -> None:
    said = [plan({"strategy": {"kind": "fsdp", "version": version}}, cards=2).strategy.reason for version in (1, 2)]
    assert ["FSDP1" in said[0], "FSDP2" in said[1]] == [True, True]


@pytest.mark.parametrize(
    ("kind", "strategy", "says"),
    [
        ("hf", "fsdp", "done by Trainer, which is told"),
        ("accelerate", "zero3", "done by Accelerator(), which is told"),
        ("deepspeed", "zero2", "done by DeepSpeed, which is told in its file"),
        ("torch", "ddp", "your program's own part"),
    ],
)
def test_the_plan_says_who_sees_to_the_strategy(plan: Callable[..., Plan], kind: str, strategy: str, says: str) -> None:
    batch = {"batch": {"global": 8, "micro": 2}} if kind == "deepspeed" else {}
    reason = plan({"program": {"kind": kind}, "strategy": {"kind": strategy}}, batch, cards=2).strategy.reason
    assert reason.startswith(f"{says}: ")


def test_clipping_is_left_to_the_script_where_the_recipe_says_nothing(plan: Callable[..., Plan]) -> None:
    files = plan(CPU, {"strategy": {"kind": "zero2"}}).files
    (content,) = (json.loads(file.content) for file in files if file.path == "deepspeed.json")
    assert content["gradient_clipping"] == "auto"


def test_words_after_a_bare_double_dash_stay_the_last(plan: Callable[..., Plan], spelled: Spelled) -> None:
    program = spelled(plan(CPU, words(["--flag", "--", "file"])).commands[0].program)
    assert program[2] == "--flag"
    assert program[-2:] == ["--", "file"]
