"""The installed TrainingArguments, and those of transformers 4, make of each plan's words what the recipe means."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from trainkit.errors import Origin
from trainkit.launch_plan.model import Plan
from trainkit.machine.facts import Facts, Gpu
from trainkit.planner.build import build_plan
from trainkit.recipe.resolved import Entry, Resolved
from trainkit.recipe.schema import Recipe
from trainkit.recipe.validate import with_kinds

PROGRAM = Path(__file__).parent / "programs" / "hf_parse.py"
PINNED = Path(__file__).resolve().parents[2] / "scripts" / "transformers-4.txt"
FIVE, FOUR = "5.23.0", "4.57.6"
# Settings of FSDP that TrainingArguments has by other names before 5.23.
OLD_NAMES = {"activation_checkpointing": "gradient_checkpointing"}


@dataclass(frozen=True)
class Case:
    """A piece of a recipe, and what TrainingArguments must hold then.

    fsdp: what Trainer hands to accelerate; deepspeed: keys of the file, dotted. cards: GPUs of the machine.
    only: the version that the case is about.
    """

    recipe: Mapping[str, Any]
    fields: Mapping[str, Any] = field(default_factory=dict)
    fsdp: Mapping[str, Any] | None = None
    deepspeed: Mapping[str, Any] | None = None
    cards: int = 0
    only: str = ""
    kind: str = "TrainingArguments"


OPTIONS: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]] = (
    ({}, {}),
    (
        {"batch": {"global": 32, "micro": 4, "eval_micro": 6}},
        {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 6},
    ),
    ({"batch": {"micro": 2, "accumulation": 3}}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}),
    ({"precision": {"dtype": "bf16"}}, {"bf16": True, "fp16": False}),
    ({"precision": {"dtype": "fp32"}}, {"bf16": False, "fp16": False}),
    ({"optimizer": {"name": "adamw_torch", "lr": 2e-5}}, {"optim": "adamw_torch", "learning_rate": 2e-5}),
    (
        {"optimizer": {"beta1": 0.8, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.01}},
        {"adam_beta1": 0.8, "adam_beta2": 0.99, "adam_epsilon": 1e-6, "weight_decay": 0.01},
    ),
    ({"optimizer": {"name": "adafactor", "lr": 1e-3}}, {"optim": "adafactor", "learning_rate": 1e-3}),
    ({"optimizer": {"name": "adamw_bnb_8bit"}}, {"optim": "adamw_bnb_8bit"}),
    (
        {"schedule": {"name": "cosine", "warmup_steps": 20}},
        {"lr_scheduler_type": "cosine", "warmup_steps": 20, "lr_scheduler_kwargs": None},
    ),
    (
        {"schedule": {"name": "cosine", "min_lr_ratio": 0.2}},
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.2}},
    ),
    (
        {"schedule": {"name": "linear", "min_lr_ratio": 0.5}, "optimizer": {"lr": 0.01}},
        {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 0.005, "power": 1.0}},
    ),
    ({"schedule": {"name": "linear", "min_lr_ratio": 0.0}}, {"lr_scheduler_type": "linear"}),
    ({"schedule": {"name": "constant_with_warmup"}}, {"lr_scheduler_type": "constant_with_warmup"}),
    ({"train": {"steps": 300, "seed": 7}}, {"max_steps": 300, "seed": 7, "num_train_epochs": 3.0}),
    (
        {"train": {"epochs": 2.5, "max_grad_norm": 0.5}},
        {"max_steps": -1, "num_train_epochs": 2.5, "max_grad_norm": 0.5},
    ),
    ({"train": {"deterministic": True}}, {"full_determinism": True}),
    ({"eval": {"every_steps": 50}}, {"eval_strategy": "steps", "eval_steps": 50, "do_eval": True}),
    ({"eval": {"every_steps": 0}}, {"eval_strategy": "no"}),
    (
        {"checkpoint": {"every_steps": 40, "keep": 3}},
        {"save_strategy": "steps", "save_steps": 40, "save_total_limit": 3},
    ),
    ({"checkpoint": {"every_steps": 0}}, {"save_strategy": "no"}),
    (
        {"checkpoint": {"keep_best": True}, "eval": {"every_steps": 5}},
        {"save_strategy": "best", "metric_for_best_model": "loss", "greater_is_better": False, "eval_steps": 5},
    ),
    ({"checkpoint": {"resume": "/old/checkpoint-40"}}, {"resume_from_checkpoint": "/old/checkpoint-40"}),
    (
        {"checkpoint": {"push_to_hub": {"repo": "ada/glue", "strategy": "all", "private": True}}},
        {
            "push_to_hub": True,
            "hub_model_id": "ada/glue",
            "hub_strategy": "all_checkpoints",
            "hub_private_repo": True,
        },
    ),
    (
        {"data": {"workers": 2, "pin_memory": False, "prefetch_factor": 4, "persistent_workers": True}},
        {
            "dataloader_num_workers": 2,
            "dataloader_pin_memory": False,
            "dataloader_prefetch_factor": 4,
            "dataloader_persistent_workers": True,
        },
    ),
    (
        {"logging": {"level": "warning", "replica_level": "error", "each_node": False}},
        {"log_level": "warning", "log_level_replica": "error", "log_on_each_node": False},
    ),
    (
        {"logging": {"every_steps": 5, "report_to": ["tensorboard"]}},
        {"logging_strategy": "steps", "logging_steps": 5, "report_to": ["tensorboard"]},
    ),
    ({"logging": {"report_to": []}}, {"report_to": []}),
    (
        {"efficiency": {"compile": {"enabled": True, "backend": "inductor", "mode": "reduce-overhead"}}},
        {"torch_compile": True, "torch_compile_backend": "inductor", "torch_compile_mode": "reduce-overhead"},
    ),
    ({"efficiency": {"compile": {"enabled": False, "backend": "eager"}}}, {"torch_compile": False}),
    (
        {"program": {"args": {"hub_strategy": "checkpoint", "push_to_hub": True, "label_smoothing_factor": 0.1}}},
        {"hub_strategy": "checkpoint", "push_to_hub": True, "label_smoothing_factor": 0.1},
    ),
    (
        {"program": {"args": ["--learning-rate=0.5", "--bf16"]}, "precision": {"dtype": "bf16"}},
        {"learning_rate": 0.5, "bf16": True},
    ),
)
CPU: Mapping[str, Any] = {"devices": {"type": "cpu"}}
PLACES: Sequence[tuple[Mapping[str, Any], int, Mapping[str, Any]]] = (
    (CPU, 0, {"use_cpu": True}),
    ({"strategy": {"kind": "ddp"}, **CPU}, 0, {"use_cpu": True}),
    ({"strategy": {"kind": "ddp"}}, 2, {"use_cpu": False}),
    ({"strategy": {"kind": "fsdp"}}, 2, {"use_cpu": False}),
    ({"strategy": {"kind": "zero2"}, **CPU}, 0, {"use_cpu": True}),
    ({"strategy": {"kind": "zero3", "offload_optimizer": "cpu"}}, 2, {"use_cpu": False}),
)
WRAPPED = {"auto_wrap_policy": "transformer_auto_wrap_policy"}
SHARDED: Mapping[str, Any] = {"fsdp_version": 2, "reshard_after_forward": True, "cpu_offload": False, **WRAPPED}
V1: Mapping[str, Any] = {"kind": "fsdp", "version": 1}
TPU: Mapping[str, Any] = {"devices": {"type": "xla"}}
SPECIAL: Sequence[Case] = (
    Case({"precision": {"tf32": True}}, {"tf32": True}, cards=1),
    Case({"precision": {"tf32": False}}, {"tf32": False}, cards=1),
    Case({"precision": {"dtype": "fp16"}}, {"bf16": False, "fp16": True}, cards=1),
    Case({"precision": {"dtype": "fp32", "eval": "bf16"}}, {"bf16_full_eval": True, "bf16": False}, cards=1),
    Case(
        {"strategy": {"kind": "ddp", "bucket_mb": 50.0, "find_unused_parameters": True}},
        {"ddp_bucket_cap_mb": 50, "ddp_find_unused_parameters": True},
        cards=2,
    ),
    Case({"efficiency": {"gradient_checkpointing": {"every": True}}}, {"activation_checkpointing": True}, cards=1),
    Case({"efficiency": {"gradient_checkpointing": {"every": False}}}, {"activation_checkpointing": False}, cards=1),
    Case({"optimizer": {"name": "sgd", "beta1": 0.7}}, {"optim": "sgd", "optim_args": "momentum=0.7"}, only=FIVE),
    Case(
        {"optimizer": {"name": "sgd", "args": {"momentum": 0.5, "nesterov": True}}},
        {"optim": "sgd", "optim_args": "momentum=0.5,nesterov=True"},
        only=FIVE,
    ),
    Case({"optimizer": {"name": "adagrad", "eps": 0.1}}, {"optim": "adagrad", "optim_args": "eps=0.1"}, only=FIVE),
    Case({"program": {"args": {"predict_with_generate": True}}}, {"predict_with_generate": True}, kind="Seq2Seq"),
    Case({"strategy": {"kind": "fsdp"}}, fsdp={**SHARDED, "transformer_cls_names_to_wrap": None}, cards=2),
    Case(
        {"strategy": {"kind": "fsdp", "sharding": "shard_grad_op", "wrap_classes": ["BertLayer", "BertPooler"]}},
        fsdp={**SHARDED, "reshard_after_forward": False, "transformer_cls_names_to_wrap": ["BertLayer", "BertPooler"]},
        cards=2,
    ),
    Case(
        {"strategy": {"kind": "fsdp", "auto_wrap": "size", "min_params": 2000, "offload": True}},
        fsdp={
            **SHARDED,
            "auto_wrap_policy": "size_based_auto_wrap_policy",
            "min_num_params": 2000,
            "cpu_offload": True,
        },
        cards=2,
    ),
    Case(
        {"strategy": {"kind": "fsdp", "auto_wrap": "none", "state_dict_type": "sharded"}},
        fsdp={**SHARDED, "auto_wrap_policy": None, "state_dict_type": "SHARDED_STATE_DICT"},
        cards=2,
    ),
    Case(
        {"strategy": {"kind": "fsdp", "state_dict_type": "full"}},
        fsdp={**SHARDED, "state_dict_type": "FULL_STATE_DICT"},
        cards=2,
    ),
    Case(
        {"strategy": {"kind": "fsdp"}, "efficiency": {"gradient_checkpointing": {"every": True}}},
        {"activation_checkpointing": False},
        fsdp={**SHARDED, "activation_checkpointing": True},
        cards=2,
    ),
    Case({"strategy": V1}, fsdp={"fsdp_version": 1, **WRAPPED}, cards=2),
    Case(
        {"strategy": {**V1, "backward_prefetch": "backward_post", "forward_prefetch": True}},
        fsdp={"fsdp_version": 1, "backward_prefetch": "BACKWARD_POST", "forward_prefetch": True},
        cards=2,
    ),
    Case(
        {"strategy": {**V1, "limit_all_gathers": False, "use_orig_params": False, "sync_module_states": False}},
        fsdp={"limit_all_gathers": False, "use_orig_params": False, "sync_module_states": False},
        cards=2,
    ),
    Case({"strategy": {**V1, "cpu_ram_efficient_loading": True}}, fsdp={"cpu_ram_efficient_loading": True}, cards=2),
    Case(
        {
            **TPU,
            "strategy": {"kind": "fsdp", "wrap_classes": ["BertLayer"]},
            "efficiency": {"gradient_checkpointing": {"every": True}},
            "precision": {"dtype": "bf16"},
        },
        {"use_cpu": False, "bf16": True, "activation_checkpointing": False},
        fsdp={
            "xla": True,
            "xla_fsdp_v2": True,
            "xla_fsdp_grad_ckpt": True,
            "min_num_params": 0,
            "transformer_layer_cls_to_wrap": ["BertLayer"],
            "xla_fsdp_settings": {},
        },
    ),
    Case(
        {
            **TPU,
            "strategy": {**V1, "auto_wrap": "size", "min_params": 9, "xla_settings": {"compute_dtype": "bfloat16"}},
        },
        fsdp={
            "xla": True,
            "xla_fsdp_v2": False,
            "xla_fsdp_grad_ckpt": False,
            "min_num_params": 9,
            "xla_fsdp_settings": {"compute_dtype": "torch.bfloat16"},
        },
    ),
    Case({**TPU, "strategy": {"kind": "fsdp", "auto_wrap": "none"}}, fsdp={"transformer_layer_cls_to_wrap": []}),
    Case(
        {"strategy": {"kind": "zero3", "gather_16bit": True}},
        deepspeed={"zero_optimization.stage3_gather_16bit_weights_on_model_save": True},
        cards=2,
    ),
    Case(
        {"strategy": {"kind": "zero3"}, "precision": {"dtype": "bf16"}, "train": {"max_grad_norm": 0.3}},
        deepspeed={"zero_optimization.stage": 3, "bf16.enabled": True, "gradient_clipping": 0.3},
        cards=2,
    ),
    Case(
        {"strategy": {"kind": "zero1"}, "batch": {"global": 32, "micro": 4}},
        deepspeed={
            "zero_optimization.stage": 1,
            "train_batch_size": 32,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 4,
            "gradient_clipping": 1.0,  # the script's own: the recipe says nothing
        },
        cards=2,
    ),
)


def _cases(version: str) -> list[Case]:
    """Each option at each place, and what one place alone has."""
    product = [
        Case({**_merged(place, option)}, {**said, **fields}, cards=cards)
        for option, fields in OPTIONS
        for place, cards, said in PLACES
    ]
    return [case for case in (*product, *SPECIAL) if case.only in ("", version)]


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    both = {**base, **over}
    shared = (key for key in base.keys() & over.keys() if isinstance(base[key], Mapping))
    return {**both, **{key: _merged(base[key], over[key]) for key in shared}}


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        found |= _leaves(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return found


def _plan(case: Case, version: str) -> Plan:
    tree = _merged({"program": {"kind": "hf", "script": "train.py"}}, case.recipe)
    origin = Origin("file r.yaml", 0, "r.yaml", 1, 1)
    history = {key: (Entry(value, origin),) for key, value in _leaves(tree).items()}
    packages = {"torch": "2.13.0", "accelerate": "1.15.0", "deepspeed": "0.19.8", "transformers": version}
    cards = tuple(Gpu(i, f"GPU-{i}", "NVIDIA A100", 80 * 2**30, 79 * 2**30, (8, 0)) for i in range(case.cards))
    facts = Facts("linux", "x86_64", "h", "3.11", sys.executable, 8, 2**36, gpus=cards, packages=packages)
    return build_plan(Resolved(Recipe.model_validate(with_kinds(tree)), tree, history), facts).plan


def _parsed(cases: Sequence[Case], version: str, environ: Mapping[str, str]) -> list[dict[str, Any]]:
    """What that version's own parser makes of the plans' words, in one process for all."""
    asked = []
    for case in cases:
        plan = _plan(case, version)
        words = [str(word) for word in plan.commands[0].program]
        variables = {name: str(value) for name, value in plan.environment.set if name.startswith("FSDP_")}
        asked.append(
            {
                "words": words[words.index("train.py") + 1 :],
                "environment": variables,
                "files": {file.path: file.content for file in plan.files if file.path.endswith(".json")},
                "world_size": plan.topology.world_size,
                "class": "Seq2SeqTrainingArguments" if case.kind == "Seq2Seq" else case.kind,
            }
        )
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        input=json.dumps(asked),
        env={**os.environ, "DS_ACCELERATOR": "cpu", **environ},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["version"] == version
    results: list[dict[str, Any]] = answer["results"]
    return results


def _promised(case: Case, version: str) -> dict[str, Any]:
    """What the proof of a run would look for in TrainingArguments."""
    (content,) = (file.content for file in _plan(case, version).files if file.path == "expected.json")
    promised: dict[str, Any] = json.loads(content)["arguments"]
    return promised


def _differences(case: Case, result: Mapping[str, Any], version: str) -> list[str]:
    if "error" in result:
        return [result["error"]]
    names = OLD_NAMES if version == FOUR else {}
    said = [(f"field {key}", value, result["fields"][names.get(key, key)]) for key, value in case.fields.items()]
    said += [(f"promised {key}", value, result["fields"].get(key)) for key, value in _promised(case, version).items()]
    said += [(f"fsdp {key}", value, (result["fsdp"] or {}).get(key)) for key, value in (case.fsdp or {}).items()]
    if "zero" in str(case.recipe.get("strategy", {}).get("kind")):
        said.append(("deepspeed mismatches", [], result["deepspeed"]["mismatches"]))
        config = _leaves(result["deepspeed"]["config"])
        said += [(f"deepspeed {key}", value, config[key]) for key, value in (case.deepspeed or {}).items()]
    return [f"{what}: {found!r}, not {wanted!r}" for what, wanted, found in said if found != wanted]


def _compare(version: str, environ: Mapping[str, str]) -> None:
    cases = _cases(version)
    results = _parsed(cases, version, environ)
    assert len(results) == len(cases)
    wrong = {
        json.dumps(case.recipe): differences
        for case, result in zip(cases, results, strict=True)
        if (differences := _differences(case, result, version))
    }
    assert not wrong, json.dumps(wrong, indent=1)


def test_the_installed_training_arguments_read_each_plan_as_it_is_meant() -> None:
    _compare(FIVE, {})


@pytest.fixture(scope="module")
def transformers_4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with transformers 4 and the two packages that it needs in other versions, without what they need."""
    folder = tmp_path_factory.mktemp("transformers-4")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-input", "--retries", "1"]
    done = subprocess.run(
        [*command, "--timeout", "20", "--target", str(folder), "--requirement", str(PINNED)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    unreached = ("NewConnectionError", "ConnectTimeout", "Name or service not known", "from versions: none")
    if done.returncode and any(word in done.stderr for word in unreached):
        pytest.skip(f"the package index cannot be reached: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return folder


def test_the_training_arguments_of_transformers_4_read_each_plan_as_it_is_meant(transformers_4: Path) -> None:
    path = os.pathsep.join((str(transformers_4), os.environ.get("PYTHONPATH", "")))
    _compare(FOUR, {"PYTHONPATH": path})
