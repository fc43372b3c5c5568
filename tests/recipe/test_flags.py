"""Overrides on the command line: dotted keys, and every named flag of the table."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.made_up_plans import PACKAGES
from trainkit.errors import Diagnostic
from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan
from trainkit.recipe.flags import flag_reference, flags, split_overrides
from trainkit.recipe.resolved import Resolved
from trainkit.recipe.schema.fields import schema

Solve = Callable[..., Resolved]
Refuse = Callable[..., list[Diagnostic]]
SHORT = "train: {steps: 3}\n"

# Every flag of the table: words, and what the tree then holds by key.
USES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "adam_beta1": (("--adam_beta1", "0.8"), {"optimizer.beta1": 0.8}),
    "adam_beta2": (("--adam-beta2=0.99",), {"optimizer.beta2": 0.99}),
    "adam_epsilon": (("--adam_epsilon", "1e-6"), {"optimizer.eps": 1e-6}),
    "bf16": (("--bf16",), {"precision.dtype": "bf16"}),
    "dataloader_num_workers": (("--dataloader-num-workers", "2"), {"data.workers": 2}),
    "dataloader_prefetch_factor": (
        ("--dataloader_num_workers=2", "--dataloader_prefetch_factor=4"),
        {"data.prefetch_factor": 4, "data.workers": 2},
    ),
    "dataloader_pin_memory": (("--dataloader_pin_memory=false",), {"data.pin_memory": False}),
    "ddp_find_unused_parameters": (
        ("strategy.kind=ddp", "--ddp_find_unused_parameters", "true"),
        {"strategy.find_unused_parameters": True},
    ),
    "ddp_timeout": (("--ddp_timeout", "180000000"), {"hang.collective_seconds": 180_000_000}),
    "deepspeed": (
        ("--deepspeed", "ds.json"),
        {"strategy.kind": "zero2", "strategy.config": "/w/ds.json", "strategy.offload_optimizer": "cpu"},
    ),
    "do_eval": (("--do_eval",), {"train.steps": 0}),
    "do_train": (("--do_train", "--do_eval"), {"eval.every_steps": 1_000_000_000}),
    "early_stopping_patience": (("--early_stopping_patience", "3", "--eval_steps=5"), {"eval.patience": 3}),
    "eval_steps": (("--eval_steps", "5"), {"eval.every_steps": 5}),
    "greater_is_better": (
        ("--metric_for_best_model", "perplexity", "--greater_is_better", "True"),
        {"eval.best_metric": "perplexity", "eval.greater_is_better": True},
    ),
    "metric_for_best_model": (("--metric_for_best_model", "eval_perplexity"), {"eval.best_metric": "perplexity"}),
    "fp16": (("--fp16", "TRUE"), {"precision.dtype": "fp16"}),
    "fsdp": (
        ("--fsdp", "shard_grad_op offload"),
        {
            "strategy.kind": "fsdp",
            "strategy.sharding": "shard_grad_op",
            "strategy.offload": True,
            "strategy.auto_wrap": "none",
        },
    ),
    "fsdp_config": (
        ("--fsdp_config", "fsdp.json"),
        {"strategy.kind": "fsdp", "strategy.wrap_classes": ["BertLayer"], "strategy.auto_wrap": "transformer"},
    ),
    "gradient_accumulation_steps": (("--gradient_accumulation_steps", "4"), {"batch.accumulation": 4}),
    "gradient_checkpointing": (("--gradient-checkpointing",), {"efficiency.gradient_checkpointing.every": True}),
    "hub_model_id": (("--hub_model_id", "ada/tiny"), {"checkpoint.push_to_hub.repo": "ada/tiny"}),
    "hub_private_repo": (
        ("--hub_private_repo", "--hub_model_id", "ada/tiny"),
        {"checkpoint.push_to_hub.private": True},
    ),
    "hub_strategy": (
        ("--hub_strategy", "every_save", "--hub_model_id", "ada/tiny"),
        {"checkpoint.push_to_hub.strategy": "every_save"},
    ),
    "push_to_hub": (("--push_to_hub", "--hub_model_id", "ada/tiny"), {"checkpoint.push_to_hub.repo": "ada/tiny"}),
    "learning_rate": (("--learning_rate", "3e-5"), {"optimizer.lr": 3e-5}),
    "log_level": (("--log_level", "debug"), {"logging.level": "debug"}),
    "log_level_replica": (("--log_level_replica", "error"), {"logging.replica_level": "error"}),
    "log_on_each_node": (("--log_on_each_node", "false"), {"logging.each_node": False}),
    "logging_steps": (("--logging_steps", "2"), {"logging.every_steps": 2}),
    "lr_scheduler_type": (("--lr_scheduler_type", "warmup_stable_decay"), {"schedule.name": "wsd"}),
    "max_grad_norm": (("--max_grad_norm", "0.5"), {"optimizer.lr": None, "train.max_grad_norm": 0.5}),
    "max_steps": (("--max_steps", "9"), {"train.steps": 9}),
    "nproc_per_node": (("strategy.kind=ddp", "--nproc-per-node", "2"), {"nodes.processes_per_node": 2}),
    "num_gpus": (("strategy.kind=ddp", "--num_gpus", "2"), {"devices.select": 2, "nodes.processes_per_node": 2}),
    "num_processes": (("strategy.kind=ddp", "nodes.count=2", "--num_processes", "8"), {"nodes.processes_per_node": 4}),
    "num_train_epochs": (("--num_train_epochs", "2"), {"train.epochs": 2, "train.steps": None}),
    "optim": (("--optim", "adamw_torch_fused"), {"optimizer.name": "adamw_torch_fused"}),
    "optim_args": (
        ("--optim", "sgd", "--optim_args", "nesterov=true, dampening=0.0"),
        {"optimizer.name": "sgd", "optimizer.args": {"nesterov": True, "dampening": 0.0}},
    ),
    "output_dir": (("--output_dir", "out"), {"output.root": "out"}),
    "per_device_eval_batch_size": (("--per_device_eval_batch_size", "16"), {"batch.eval_micro": 16}),
    "per_device_train_batch_size": (("--per-device-train-batch-size", "8"), {"batch.micro": 8}),
    "do_predict": (("--do_predict",), {"train.steps": 0, "predict.split": "validation"}),
    "dataloader_persistent_workers": (("--dataloader_persistent_workers",), {"data.persistent_workers": True}),
    "profile": (("--profile",), {"profile.steps": 3}),
    "report_to": (("--report_to", "none"), {"logging.report_to": []}),
    "resume_from_checkpoint": (("--resume_from_checkpoint", "true"), {"checkpoint.resume": "auto"}),
    "save_steps": (("--save_steps", "7"), {"checkpoint.every_steps": 7}),
    "save_total_limit": (("--save_total_limit", "1"), {"checkpoint.keep": 1}),
    "seed": (("--seed=3",), {"train.seed": 3}),
    "full_determinism": (("--full_determinism",), {"train.deterministic": True}),
    "tf32": (("--tf32",), {"precision.tf32": True}),
    "torch_compile": (("--torch_compile",), {"efficiency.compile.enabled": True}),
    "torch_compile_backend": (
        ("--torch_compile_backend", "eager"),
        {"efficiency.compile.backend": "eager", "efficiency.compile.enabled": True},
    ),
    "torch_compile_mode": (
        ("--torch_compile_mode", "max-autotune"),
        {"efficiency.compile.mode": "max-autotune", "efficiency.compile.enabled": True},
    ),
    "warmup_steps": (("--warmup_steps", "2"), {"schedule.warmup_steps": 2}),
    "weight_decay": (("--weight_decay", "0"), {"optimizer.weight_decay": 0}),
    "eval_strategy": (("--eval_strategy", "steps"), {"eval.every_steps": 500}),
    "evaluation_strategy": (("--evaluation_strategy", "steps", "--eval_steps", "7"), {"eval.every_steps": 7}),
    "save_strategy": (("--save_strategy", "no"), {"checkpoint.every_steps": 0}),
    "logging_strategy": (("--logging_strategy", "steps"), {"logging.every_steps": 500}),
    "use_cpu": (("--use_cpu",), {"devices.type": "cpu"}),
    "no_cuda": (("--no_cuda", "1"), {"devices.type": "cpu"}),
    "warmup_ratio": (("--warmup_ratio", "0.15", "--max_steps", "10"), {"schedule.warmup_steps": 2}),
    "overwrite_output_dir": (("--overwrite_output_dir", "--bf16"), {"precision.dtype": "bf16"}),
    "use_fsdp": (("--use_fsdp",), {"strategy.kind": "fsdp"}),
    "mixed_precision": (("--mixed_precision", "no"), {"precision.dtype": "fp32"}),
    "fsdp_sharding_strategy": (("--use_fsdp", "--fsdp_sharding_strategy=2"), {"strategy.sharding": "shard_grad_op"}),
    "fsdp_auto_wrap_policy": (
        ("--use_fsdp", "--fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP"),
        {"strategy.auto_wrap": "transformer"},
    ),
    "fsdp_transformer_layer_cls_to_wrap": (
        ("--use_fsdp", "--fsdp_transformer_layer_cls_to_wrap=B", "--fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP"),
        {"strategy.wrap_classes": ["B"], "strategy.auto_wrap": "transformer"},
    ),
    "fsdp_min_num_params": (
        ("--use_fsdp", "--fsdp_min_num_params=1000", "--fsdp_auto_wrap_policy=SIZE_BASED_WRAP"),
        {"strategy.min_params": 1000, "strategy.auto_wrap": "size"},
    ),
    "fsdp_state_dict_type": (
        ("--use_fsdp", "--fsdp_state_dict_type=SHARDED_STATE_DICT"),
        {"strategy.state_dict_type": "sharded"},
    ),
    "fsdp_version": (("--use_fsdp", "--fsdp_version=2"), {"strategy.version": 2}),
    "fsdp_backward_prefetch": (
        ("--use_fsdp", "--fsdp_version=1", "--fsdp_backward_prefetch=BACKWARD_PRE"),
        {"strategy.backward_prefetch": "backward_pre"},
    ),
    "fsdp_forward_prefetch": (
        ("--use_fsdp", "--fsdp_version=1", "--fsdp_forward_prefetch=true"),
        {"strategy.forward_prefetch": True},
    ),
    "fsdp_use_orig_params": (
        ("--use_fsdp", "--fsdp_version=1", "--fsdp_use_orig_params=true"),
        {"strategy.use_orig_params": True},
    ),
    "fsdp_offload_params": (("--use_fsdp", "--fsdp_offload_params=true"), {"strategy.offload": True}),
    "fsdp_sync_module_states": (
        ("--use_fsdp", "--fsdp_version=1", "--fsdp_sync_module_states=true"),
        {"strategy.sync_module_states": True},
    ),
    "fsdp_cpu_ram_efficient_loading": (
        ("--use_fsdp", "--fsdp_cpu_ram_efficient_loading=true"),
        {"strategy.cpu_ram_efficient_loading": True},
    ),
    "fsdp_activation_checkpointing": (
        ("--use_fsdp", "--fsdp_activation_checkpointing=true"),
        {"efficiency.gradient_checkpointing.every": True},
    ),
    "fsdp_reshard_after_forward": (
        ("--use_fsdp", "--fsdp_version=2", "--fsdp_reshard_after_forward=false"),
        {"strategy.sharding": "shard_grad_op"},
    ),
}
FILES = {
    "r.yaml": SHORT,
    "ds.json": json.dumps({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}),
    "fsdp.json": json.dumps({"version": 2, "transformer_layer_cls_to_wrap": "BertLayer", "limit_all_gathers": True}),
}


def at(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


@pytest.mark.parametrize("name", sorted(USES))
def test_a_flag_sets_its_recipe_keys(solve: Solve, name: str) -> None:
    words, expected = USES[name]
    resolved = solve(FILES, overrides=words)
    assert {key: at(resolved.tree, key) for key in expected} == expected


DEFAULT_ARGS = "--output_dir tmp --{} steps --num_train_epochs 1 --log_level error --report_to none"
OLD, NEW = DEFAULT_ARGS.format("evaluation_strategy"), DEFAULT_ARGS.format("eval_strategy")
# Every TrainingArguments(...) of the guides, **default_args included, and what they name beside one, as flags.
GUIDES = (
    f"--per_device_train_batch_size 4 {OLD}",
    f"--per_device_train_batch_size 4 {NEW}",
    f"--per_device_train_batch_size 1 --gradient_accumulation_steps 4 {NEW}",
    f"--per_device_train_batch_size 4 --gradient_accumulation_steps 16 {NEW}",
    f"--per_device_train_batch_size 1 --gradient_accumulation_steps 4 --gradient_checkpointing True {NEW}",
    f"--per_device_train_batch_size 4 --fp16 True {NEW}",
    f"--bf16 True {NEW}",
    f"--tf32 True {NEW}",
    f"--per_device_train_batch_size 4 --optim adafactor {NEW}",
    f"--per_device_train_batch_size 4 --optim adamw_bnb_8bit {NEW}",
    f"--optim adamw_torch_fused --adam_beta1 0.9 --adam_beta2 0.999 --adam_epsilon 1e-8 --weight_decay 0 {NEW}",
    f"--dataloader_pin_memory True --dataloader_num_workers 4 {NEW}",
    f"--per_device_train_batch_size 1 --gradient_accumulation_steps 4 --gradient_checkpointing True --fp16 True {NEW}",
    f"--torch_compile True {NEW}",
    f"--torch_compile True --torch_compile_backend inductor --torch_compile_mode default {NEW}",
    "--log_level warning --log_level_replica error --log_on_each_node 0",
    "--log_level error --log_level_replica error --log_on_each_node 0",
    "--per_device_train_batch_size 32 --learning_rate 2e-5 --output_dir out --overwrite_output_dir",
    "--do_train --do_eval --per_device_train_batch_size 16 --learning_rate 5e-5 --num_train_epochs 3",
    "--evaluation_strategy steps --save_strategy steps --logging_strategy steps --max_steps 20 --warmup_ratio 0.1",
    "--no_cuda",
    "--use_cpu True",
    *(f"--fsdp {words.replace(' ', ',')}" for words in ("full_shard", "shard_grad_op", "full_shard offload auto_wrap")),
)
LAUNCHED = (
    "--num_processes=2 --use_fsdp --mixed_precision=bf16 --fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP "
    "--fsdp_transformer_layer_cls_to_wrap=BertLayer --fsdp_sharding_strategy=1 --fsdp_state_dict_type=FULL_STATE_DICT"
)
TRAINER = {"r.yaml": "program: {kind: hf, script: train.py}\n", "train.py": ""}


@pytest.mark.parametrize("line", GUIDES)
def test_what_the_guides_write_works_as_flags(line: str, solve: Solve, machine: Callable[..., Facts]) -> None:
    packages = {**PACKAGES, "bitsandbytes": "0.50.0"}
    plan = build_plan(solve("train: {steps: 30}\n", overrides=line.split()), machine(2, packages=packages)).plan
    assert not [each for each in plan.notices if each.severity == "blocker"]


def test_a_share_of_steps_that_are_not_known_stays_a_share(solve: Solve) -> None:
    found = solve("train: {epochs: 2}\n", overrides=("--warmup_ratio", "0.1"))
    assert found.recipe.schedule.warmup_steps == 0.1


def test_the_flags_of_accelerate_launch_in_the_guide_reach_a_script(solve: Solve) -> None:
    strategy = solve(TRAINER, overrides=LAUNCHED.split()).tree["strategy"]
    assert strategy["wrap_classes"] == ["BertLayer"] and strategy["state_dict_type"] == "full"


@pytest.mark.parametrize(
    ("words", "key", "expected"),
    [
        ("--fsdp_version 1", "strategy.version", 1),
        ("--fsdp_auto_wrap_policy NO_WRAP", "strategy.auto_wrap", "none"),
        ("--fsdp_sharding_strategy 1", "strategy.sharding", "full_shard"),
        ("--fsdp_offload_params False", "strategy.offload", False),
        ("--fsdp_auto_wrap_policy SIZE_BASED_WRAP --fsdp_min_num_params 9", "strategy.min_params", 9),
        ("--fsdp_auto_wrap_policy NO_WRAP --fsdp_min_num_params 9", "strategy.min_params", None),
        ("--eval_strategy no --eval_steps 5", "eval.every_steps", 0),
        ("--eval_steps 5 --eval_strategy no", "eval.every_steps", 0),
        ("--save_strategy no --save_steps 5", "checkpoint.every_steps", 0),
        ("--eval_strategy epoch", "program.args.eval_strategy", "epoch"),
        ("--num_train_epochs 3 --warmup_ratio 0.1", "program.args.warmup_ratio", "0.1"),
        ("--warmup_ratio 0.1 train.steps=41", "schedule.warmup_steps", 5),
        ("--use_cpu False", "devices.type", "auto"),
        ("strategy.kind=single --fsdp_version=1 --use_fsdp", "strategy.version", 1),
        ("strategy.kind=single --fsdp_min_num_params 9 --fsdp full_shard,auto_wrap", "strategy.auto_wrap", "size"),
        ("--fsdp full_shard,auto_wrap --fsdp_transformer_layer_cls_to_wrap B", "strategy.wrap_classes", ["B"]),
        ("nodes.count=2 --num_processes 4", "nodes.processes_per_node", 2),
        ("--eval_strategy steps logging.every_steps=5", "eval.every_steps", 5),
        ("precision.dtype=bf16 --bf16=0", "precision.dtype", "fp32"),
        ("checkpoint.keep_best=true --save_strategy no", "checkpoint.keep_best", False),
        ("train.steps=9 --num_train_epochs 2", "train.steps", 9),
    ],
)
def test_a_flag_counts_whatever_the_recipe_says_and_wherever_it_stands(
    words: str, key: str, expected: object, solve: Solve
) -> None:
    strategy = "strategy: {kind: fsdp, sharding: shard_grad_op, offload: true}\n"
    text = f"{strategy}train: {{steps: 30}}\ndevices: {{type: cpu}}\n"
    assert at(solve({**TRAINER, "r.yaml": TRAINER["r.yaml"] + text}, overrides=words.split()).tree, key) == expected


def test_what_a_recipe_has_no_word_for_is_said_with_the_next_step(refuse: Refuse) -> None:
    for words, hint in {
        "--save_strategy epoch": "write --save_steps N",
        "--logging_strategy no": "write --logging_steps N",
        "--max_steps 5 --warmup_ratio 3": "from 0 to 1",
        "--max_steps 5 --warmup_ratio 0.1 --warmup_steps 0": "keep one of the two",
        "--mixed_precision no --bf16": "keep one of the two",
        "--use_fsdp --fsdp_sharding_strategy x": "full_shard",
        **dict.fromkeys(
            ("--fp8", "--mixed_precision fp8", "precision=fp8", "precision.eval=fp8"), "write bf16; a script"
        ),
        "--use_fsdp=false": "strategy.kind=",
    }.items():
        (found,) = refuse({"r.yaml": "train: {epochs: 1}\n"}, overrides=words.split())
        assert hint in found.hint


def test_profile_takes_a_number_of_steps_and_leaves_a_file_its_own(solve: Solve) -> None:
    assert solve(FILES, overrides=("--profile", "5")).recipe.profile.steps == 5
    assert solve({"r.yaml": SHORT + "profile: 7\n"}, overrides=("--profile",)).recipe.profile.steps == 7


def test_every_flag_of_the_table_is_tested_above() -> None:
    assert set(USES) >= set(flags())


def test_every_flag_says_which_existing_keys_it_sets() -> None:
    known = set(schema().keys)
    for each in flags().values():
        assert each.help
        assert set(each.keys) <= known
        assert each.usage in flag_reference()


@pytest.mark.parametrize(
    ("words", "key", "expected"),
    [
        (("batch.micro=8",), "batch.micro", 8),
        (("--batch.micro=8",), "batch.micro", 8),
        (("data.path=[a, b]",), "data.path", ["a", "b"]),
        (("data.path=a=b",), "data.path", "a=b"),
        (("sample.prompt=Hello: [world",), "sample.prompt", "Hello: [world"),
        (("sample.prompt=",), "sample.prompt", ""),
        (('sample.prompt="a\\tb"',), "sample.prompt", "a\tb"),
        (("name=007",), "name", "007"),
        (("program.kind=torch", "program.script=x", "program.script=null", "program.module=m"), "program.script", None),
        (("env.A=1.10",), "env.A", "1.10"),
        (("env.A=a: b",), "env.A", "a: b"),
        (("env.A=[1",), "env.A", "[1"),
        (("program.args.a.b=1.0",), "program.args", {"a.b": "1.0"}),
        (("program.args=[--a, 1.0, on]",), "program.args", ["--a", "1.0", "on"]),
        (("env_from=[A]", "env_from+=B"), "env_from", ["A", "B"]),
        (("env={A: x}", "env!={B: y}"), "env", {"B": "y"}),
        (("env={A: x}", "env={B: y}"), "env", {"A": "x", "B": "y"}),
        (("precision=bf16", "precision={tf32: true}"), "precision", {"dtype": "bf16", "tf32": True}),
        (("train.seed=1", "--seed", "2"), "train.seed", 2),
        (("--seed", "2", "train.seed=1"), "train.seed", 1),
        (("--bf16", "batch.micro=2"), "batch.micro", 2),
        (("--bf16", "--tf32=False"), "precision.tf32", False),
        (("--no_log_on_each_node",), "logging.each_node", False),
        (("--fsdp",), "strategy", {"kind": "fsdp"}),
        (("--fsdp", "batch.micro=2"), "strategy", {"kind": "fsdp"}),
        (("--fsdp", "--bf16"), "precision.dtype", "bf16"),
        (("--report_to", "all"), "logging.report_to", ["tensorboard", "wandb"]),
        (("--report_to=tensorboard",), "logging.report_to", ["tensorboard"]),
        (
            ("--resume_from_checkpoint", "runs/x/checkpoints/step-00000004"),
            "checkpoint.resume",
            "runs/x/checkpoints/step-00000004",
        ),
        (("--resume_from_checkpoint=false",), "checkpoint.resume", "never"),
        (("--max_steps", "-1", "--num_train_epochs", "1"), "train.epochs", 1),
        (("--max_steps", "5", "--num_train_epochs", "1"), "train.steps", 5),
        (("--num_train_epochs", "1", "--max_steps", "5"), "train.steps", 5),
        (("--nproc_per_node", "cpu"), "devices.type", "cpu"),
        (("--nproc_per_node", "gpu"), "devices.type", "cuda"),
    ],
)
def test_overrides_are_read_as_documented(solve: Solve, words: tuple[str, ...], key: str, expected: Any) -> None:
    value = at(solve(SHORT, overrides=words).tree, key)
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("dtype", "words", "expected"),
    [
        ("bf16", ("--bf16=false",), "fp32"),
        ("fp16", ("--bf16=false",), "fp16"),
        ("fp16", ("--bf16=false", "--fp16"), "fp16"),
        ("bf16", ("--no_bf16",), "fp32"),
    ],
)
def test_a_precision_is_taken_back_only_where_it_is_set(
    solve: Solve, dtype: str, words: tuple[str, ...], expected: str
) -> None:
    assert solve(f"{SHORT}precision: {dtype}\n", overrides=words).recipe.precision.dtype == expected


def test_processes_of_all_machines_are_divided_by_the_machines(solve: Solve, refuse: Refuse) -> None:
    text = f"{SHORT}strategy: {{kind: ddp}}\nnodes: {{count: 4, rendezvous: 'h:1'}}\n"
    assert solve(text, overrides=("--num_processes", "8")).recipe.nodes.processes_per_node == 2
    (error,) = refuse(text, overrides=("--num_processes", "6"))
    assert "is not a multiple of nodes.count 4" in error.what


@pytest.mark.parametrize(
    ("words", "what", "hint"),
    [
        (("--sede", "3"), "unknown flag --sede", "--seed?"),
        (("--lr=3",), "unknown flag --lr", "optimizer.lr=…?"),
        (("--set", "train.steps=3"), "unknown flag --set", "without dashes: train.steps=100"),
        (("--frobnicate",), "unknown flag --frobnicate", "run --help"),
        (("--seed",), "--seed requires a value", "--seed SEED"),
        (("--seed", "--bf16"), "--seed requires a value", "--seed SEED"),
        (("--bf16=2",), "--bf16 takes true or false", "--bf16=false"),
        (("--bf16", "--fp16"), "contradict", "keep one"),
        (("--fsdp", "hybrid_shard no_shard"), "both hybrid_shard and no_shard", "keep one"),
        (("--fsdp", "full shard"), "does not know 'full'", "did you mean full_shard?"),
        (("--fsdp", "shard grad op auto_wrap"), "does not know 'shard'", "did you mean shard_grad_op?"),
        (("--fsdp", "full_shard shard_grad_op"), "both full_shard and shard_grad_op", "keep one"),
        (("--fsdp", "full_shrad"), "does not know 'full_shrad'", "full_shard"),
        (("word",), "neither a flag nor key=value", "key=value"),
        (("extends=strategy/fsdp",), "cannot change `extends`", "--with"),
        (("batch..micro=1",), "is not a key", "section.setting"),
        (("batch.mirco=1",), "batch has no setting 'mirco'", "batch.micro?"),
        (("batch.micro=[1",), "cannot be read", ""),
        (("batch.micro=x",), "batch.micro must be", ""),
        (("--optim_args", "nesterov"), "'nesterov' is not an argument", "name=value"),
        (("--optim_args", "a=1,a=2"), "--optim_args gives a twice", "keep one"),
        (("--optim", "adamw_hf"), "optimizer.name must be", "adamw_torch"),
        (("--deepspeed", "gone.json"), "--deepspeed: there is no file gone.json", "current folder"),
        (("--resume_from_checkpoint",), "requires a value", "true|false|PATH"),
    ],
)
def test_a_wrong_override_is_one_error_that_shows_the_words(
    refuse: Refuse, words: tuple[str, ...], what: str, hint: str
) -> None:
    (error,) = refuse(FILES, overrides=words)
    assert what in error.what
    assert hint in error.hint
    assert error.origin is not None
    assert (error.origin.layer, error.origin.line) == ("flag", 0)
    assert error.origin.place.split()[0] in " ".join(words)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"fsdp_transformer_layer_cls_to_wrap": "A,B"}, {"wrap_classes": ["A", "B"], "auto_wrap": "transformer"}),
        ({"min_num_params": 2000}, {"min_params": 2000, "auto_wrap": "size"}),
        ({"fsdp_min_num_params": 0}, {}),
        ({"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 5}, {"min_params": 5, "auto_wrap": "size"}),
        (
            {"auto_wrap_policy": "NO_WRAP", "transformer_layer_cls_to_wrap": []},
            {"wrap_classes": [], "auto_wrap": "none"},
        ),
        ({"fsdp_reshard_after_forward": False}, {"sharding": "shard_grad_op"}),
        ({"reshard_after_forward": "FULL_SHARD"}, {"sharding": "full_shard"}),
        ({"fsdp_sharding_strategy": 2}, {"sharding": "shard_grad_op"}),
        ({"cpu_offload": True}, {"offload": True}),
        ({"fsdp_offload_params": False}, {"offload": False}),
        ({"fsdp_version": 2, "use_orig_params": True, "xla": False}, {"version": 2, "use_orig_params": True}),
        ({"version": 1, "backward_prefetch": "BACKWARD_POST"}, {"version": 1, "backward_prefetch": "backward_post"}),
        (
            {"forward_prefetch": "True", "limit_all_gathers": "false"},
            {"version": 1, "forward_prefetch": True, "limit_all_gathers": False},
        ),
        ({"fsdp_backward_prefetch": "backward_pre"}, {"backward_prefetch": "backward_pre"}),
        ({"fsdp_backward_prefetch": "backward_pos"}, {"version": 1, "backward_prefetch": "backward_post"}),
        ({"use_orig_params": "False", "version": 1}, {"version": 1, "use_orig_params": False}),
        ({"fsdp_state_dict_type": "FULL_STATE_DICT"}, {"state_dict_type": "full"}),
        (
            {"sync_module_states": True, "cpu_ram_efficient_loading": False},
            {"sync_module_states": True, "cpu_ram_efficient_loading": False},
        ),
    ],
)
def test_the_fsdp_file_is_brought_over_key_by_key(
    solve: Solve, config: dict[str, Any], expected: dict[str, Any]
) -> None:
    resolved = solve({"r.yaml": SHORT, "f.json": json.dumps(config)}, overrides=("--fsdp_config", "f.json"))
    assert resolved.tree["strategy"] == {"kind": "fsdp", **expected}


@pytest.mark.parametrize(
    ("words", "sharding"),
    [("hybrid_shard auto_wrap", "hybrid_shard"), ("no_shard offload", "no_shard"), ("full_shard", "full_shard")],
)
def test_a_sharding_that_only_version_1_has_sets_it(solve: Solve, words: str, sharding: str) -> None:
    found = solve(FILES, overrides=("--fsdp", words)).tree["strategy"]
    assert found["sharding"] == sharding
    assert found.get("version") == (None if sharding == "full_shard" else 1)
    text = json.dumps({"reshard_after_forward": sharding})
    found = solve({"r.yaml": SHORT, "f.json": text}, overrides=("--fsdp_config", "f.json")).tree["strategy"]
    assert found == {"kind": "fsdp", "sharding": sharding, **({} if sharding == "full_shard" else {"version": 1})}


@pytest.mark.parametrize("words", ["no_shard", "no_shard auto_wrap"])
def test_fsdp_without_shards_is_plain_data_parallelism(solve: Solve, words: str) -> None:
    assert solve(FILES, overrides=("--fsdp", words)).tree["strategy"] == {"kind": "ddp"}
    for line in (("--fsdp", words, "--fsdp_config", "fsdp.json"), ("--fsdp_config", "fsdp.json", "--fsdp", words)):
        resolved = solve(FILES, overrides=line)
        assert resolved.tree["strategy"] == {"kind": "ddp"}
        assert "says nothing of plain data parallelism" in " ".join(each.what for each in resolved.warnings)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"xla": True}, {"version": 1, "auto_wrap": "transformer"}),
        ({"xla": True, "min_num_params": 5, "version": 2}, {"version": 1, "min_params": 5, "auto_wrap": "size"}),
        (
            {"xla_fsdp_v2": True, "xla": True, "transformer_layer_cls_to_wrap": "B"},
            {"version": 2, "wrap_classes": ["B"], "auto_wrap": "transformer"},
        ),
        (
            {"fsdp_xla": True, "xla_fsdp_settings": {"buffer_dtype": "float32"}, "auto_wrap_policy": "NO_WRAP"},
            {"version": 1, "xla_settings": {"buffer_dtype": "float32"}, "auto_wrap": "none"},
        ),
    ],
)
def test_the_keys_of_xla_in_the_fsdp_file_choose_the_device_too(
    solve: Solve, config: dict[str, Any], expected: dict[str, Any]
) -> None:
    resolved = solve(
        {"r.yaml": SHORT, "f.json": json.dumps(config | {"xla_fsdp_grad_ckpt": True})},
        overrides=("--fsdp_config", "f.json"),
    )
    assert resolved.tree["strategy"] == {"kind": "fsdp", **expected}
    assert resolved.recipe.devices.type == "xla"
    assert resolved.recipe.efficiency.gradient_checkpointing.every is True


def test_activation_checkpointing_in_the_fsdp_file_is_the_recipes_own(solve: Solve) -> None:
    resolved = solve(
        {"r.yaml": SHORT, "f.yaml": "activation_checkpointing: true\n"}, overrides=("--fsdp_config=f.yaml",)
    )
    assert resolved.recipe.efficiency.gradient_checkpointing.every is True
    origin = resolved.origin("efficiency.gradient_checkpointing.every")
    assert origin is not None
    assert (origin.layer, origin.place) == ("flag --fsdp_config", "f.yaml:1:27")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("xla", '"no"', "true or false"),
        ("xla_fsdp_v2", "true", "beside xla: true alone"),
        ("xla_fsdp_settings", '{"compute_dtype": "bfloat16"}', "beside xla: true alone"),
        ("xla_fsdp_grad_ckpt", "true", "beside xla: true alone, and a wrap policy"),
        ("cpu_offload", '"yes"', "true or false"),
        ("min_num_params", '"5"', "number of parameters"),
        ("use_orig_params", '"maybe"', "true or false"),
        ("state_dict_type", '["FULL_STATE_DICT"]', "strategy.state_dict_type has no such value"),
    ],
)
def test_what_the_fsdp_file_cannot_bring_over_is_an_error_at_its_line(
    refuse: Refuse, key: str, value: str, words: str
) -> None:
    text = f'{{\n\n  "fsdp_{key}": {value}\n}}'
    (error,) = refuse({"r.yaml": SHORT, "f.json": text}, overrides=("--fsdp_config", "f.json"))
    assert words in error.why
    assert error.origin is not None
    assert (error.origin.source, error.origin.line, error.origin.column) == ("f.json", 3, len(key) + 12)


def test_unknown_keys_and_bad_syntax_of_the_fsdp_file_are_errors_there(refuse: Refuse) -> None:
    (error,) = refuse({"r.yaml": SHORT, "f.json": '{"cpu_ofload": true}'}, overrides=("--fsdp_config", "f.json"))
    assert error.hint == "did you mean cpu_offload?"
    (error,) = refuse({"r.yaml": SHORT, "f.json": '{"a": '}, overrides=("--fsdp_config", "f.json"))
    assert error.origin is not None
    assert error.origin.source == "f.json"


def test_the_fsdp_file_refines_the_fsdp_words_wherever_it_stands(solve: Solve) -> None:
    files = {"r.yaml": SHORT, "f.json": '{"min_num_params": 10}'}
    words = ("--fsdp_config", "f.json", "--fsdp", "full_shard auto_wrap")
    assert (
        solve(files, overrides=words).recipe.strategy == solve(files, overrides=words[2:] + words[:2]).recipe.strategy
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"zero_optimization": {"stage": 4}}', "stage is 4"),
        ('{"zero_optimization": {"stage": "2"}}', "stage is '2'"),
        ("[]", "holds no mapping"),
    ],
)
def test_a_deepspeed_file_without_a_usable_stage_is_refused(refuse: Refuse, text: str, words: str) -> None:
    errors = refuse({"r.yaml": SHORT, "d.json": text}, overrides=("--deepspeed", "d.json"))
    assert words in errors[0].what


@pytest.mark.parametrize("text", ['{"zero_optimization": {"stage": 0}}', '{"zero_optimization": {}}', '{"a": 1}'])
def test_a_deepspeed_file_without_partitioning_is_a_strategy_of_its_own(solve: Solve, text: str) -> None:
    found = solve({"r.yaml": SHORT, "d.json": text}, overrides=("--deepspeed", "d.json")).recipe.strategy
    assert found.kind == "zero0"


def test_a_deepspeed_file_says_where_it_swaps_to_and_how_it_sums(solve: Solve) -> None:
    swapped = {"device": "nvme", "nvme_path": "/fast"}
    zero = {"stage": 3, "offload_param": swapped, "overlap_comm": True}
    files = {"r.yaml": SHORT, "d.json": json.dumps({"zero_optimization": zero})}
    strategy = solve(files, overrides=("--deepspeed", "d.json")).recipe.strategy.model_dump()
    assert (strategy["offload_param"], strategy["nvme_path"]) == ("nvme", "/fast")
    assert strategy["overlap_comm"] is True


@pytest.mark.parametrize(
    ("words", "plain"),
    [
        (["batch.micro=8"], []),
        (["recipe.yaml"], ["recipe.yaml"]),
        (["--seed=3"], []),
        (["--seed", "3"], []),
        (["--max_steps", "-1"], []),
        (["--seed=3", "4"], ["4"]),
        (["--bf16", "recipe.yaml"], ["recipe.yaml"]),
        (["--no-bf16", "quickstart"], ["quickstart"]),
        (["--bf16", "false"], []),
        (["--fsdp", "full_shard auto_wrap"], []),
        (["--fsdp", "batch.micro=2"], []),
        (["--unknown", "3"], []),
        (["--unknown=3", "4"], ["4"]),
        (["--unknown", "recipe.yaml"], ["recipe.yaml"]),
    ],
)
def test_words_are_told_apart_as_the_command_line_needs_it(words: list[str], plain: list[str]) -> None:
    assert split_overrides(words) == (plain, [each for each in words if each not in plain])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--bf16", "--fp16"], "--bf16 and --fp16"),
        (["--fsdp", "--deepspeed", "ds.json"], "--fsdp and --deepspeed"),
        (["--deepspeed=ds.json", "--fsdp_config", "fsdp.json"], "--deepspeed and --fsdp_config"),
        (["--fsdp", "--nproc_per_node", "2", "--num_gpus", "2"], "--nproc_per_node and --num_gpus"),
        (["--fsdp", "--num_processes", "2", "--seed", "1", "--num_gpus=2"], "--num_processes and --num_gpus"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_flags_that_decide_the_same_contradict_each_other(refuse: Refuse, words: list[str], said: str) -> None:
    files = {"r.yaml": "train: {steps: 3}\n", "ds.json": '{"zero_optimization": {"stage": 2}}', "fsdp.json": "{}"}
    (error,) = refuse(files, overrides=words)
    assert error.what == f"{said} contradict each other"


def test_metrics_go_nowhere_that_trainkit_does_not_know(refuse: Refuse) -> None:
    (error,) = refuse("train: {steps: 3}\n", overrides=["--report_to", "comet_ml"])
    assert "does not know 'comet_ml'" in error.what
