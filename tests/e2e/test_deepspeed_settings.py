"""The installed DeepSpeed accepts each plan's file, and holds what the recipe means and what the user's file adds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from trainkit.errors import Origin
from trainkit.machine.facts import Facts, Gpu
from trainkit.planner.build import build_plan
from trainkit.recipe.resolved import Attachment, Entry, Resolved
from trainkit.recipe.schema import Recipe
from trainkit.recipe.validate import with_kinds

PROGRAM = Path(__file__).parent / "programs" / "deepspeed_parse.py"
PACKAGES = {"torch": "2.13.0", "accelerate": "1.15.0", "deepspeed": "0.19.8", "transformers": "5.23.0"}
# Blocks that no key of a recipe speaks of, as DeepSpeed's documentation writes them.
UNUSUAL: Mapping[str, Any] = {
    "moe": {"enabled": True, "ep_size": 1, "num_experts": [4]},
    "use_data_before_expert_parallelism": True,
    "expert_parallel": {"enabled": True, "autoep_size": 2, "top_k": "auto"},
    "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True, "number_checkpoints": 4},
    "flops_profiler": {"enabled": True, "profile_step": 3, "module_depth": -1, "top_modules": 2, "detailed": False},
    "autotuning": {"enabled": False, "results_dir": "results", "metric": "throughput", "fast": True},
    "comms_logger": {"enabled": True, "verbose": False, "prof_all": True},
    "data_types": {"keep_in_fp32_modules": "auto"},
    "wall_clock_breakdown": True,
}
BATCH: Mapping[str, Any] = {"batch": {"global": 16, "micro": 2}}
NVME: Mapping[str, Any] = {"offload_optimizer": "nvme", "offload_param": "nvme", "nvme_path": "/fast disk"}
# Kind of program, a piece of a recipe, and what the configuration must hold then, by dotted name.
CASES: Sequence[tuple[str, Mapping[str, Any], Mapping[str, Any]]] = (
    ("builtin", {"strategy": {"kind": "zero1"}}, {"zero_optimization_stage": 1}),
    ("builtin", {"strategy": {"kind": "zero2"}, "precision": {"dtype": "bf16"}}, {"bfloat16_config.enabled": True}),
    ("builtin", {"strategy": {"kind": "zero3"}, "precision": {"dtype": "fp16"}}, {"float16_config.enabled": True}),
    ("builtin", {"strategy": {"kind": "zero2", "bucket_mb": 8.0}}, {"zero_config.reduce_bucket_size": 2**21}),
    (
        "builtin",
        {"strategy": {"kind": "zero3", **NVME}},
        {"zero_config.offload_param.nvme_path": "/fast disk", "aio_config.queue_depth": 32},
    ),
    ("deepspeed", {"strategy": {"kind": "zero1"}, "train": {"max_grad_norm": 0.3}}, {"gradient_clipping": 0.3}),
    (
        "deepspeed",
        {"strategy": {"kind": "zero2", "offload_optimizer": "cpu"}, "precision": {"dtype": "bf16"}},
        {"zero_config.offload_optimizer.device": "cpu", "bfloat16_config.enabled": True},
    ),
    (
        "deepspeed",
        {"strategy": {"kind": "zero3", "offload_param": "cpu"}, "precision": {"dtype": "fp16"}},
        {"zero_config.offload_param.device": "cpu", "float16_config.enabled": True},
    ),
    (
        "deepspeed",
        {"strategy": {"kind": "zero3", "gather_16bit": True}},
        {"zero_config.gather_16bit_weights_on_model_save": True},
    ),
    (
        "deepspeed",
        {"strategy": {"kind": "zero2"}, "optimizer": {"name": "sgd", "lr": 0.5, "beta1": 0.7}},
        {"optimizer_name": "SGD", "optimizer_params.lr": 0.5, "optimizer_params.momentum": 0.7},
    ),
    (
        "deepspeed",
        {"strategy": {"kind": "zero2"}, "schedule": {"name": "cosine", "warmup_steps": 5}, "train": {"steps": 50}},
        {"scheduler_name": "WarmupCosineLR", "scheduler_params.total_num_steps": 50},
    ),
)


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        found |= _leaves(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return found


def _file(kind: str, recipe: Mapping[str, Any], base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The file of a plan for two cards."""
    program = {"kind": kind} if kind == "builtin" else {"kind": kind, "script": "train.py"}
    tree = {**recipe, "program": program}
    origin = Origin("file r.yaml", 0, "r.yaml", 1, 1)
    history = {key: (Entry(value, origin),) for key, value in _leaves(tree).items()}
    files = {} if base is None else {"strategy.config": Attachment("ds.json", base, {"": origin})}
    cards = tuple(Gpu(i, f"GPU-{i}", "NVIDIA A100", 80 * 2**30, 79 * 2**30, (8, 0)) for i in range(2))
    facts = Facts("linux", "x86_64", "h", "3.11", sys.executable, 8, 2**36, gpus=cards, packages=PACKAGES)
    plan = build_plan(Resolved(Recipe.model_validate(with_kinds(tree)), tree, history, files), facts).plan
    return dict(json.loads(next(file.content for file in plan.files if file.path == "deepspeed.json")))


def _read(files: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What DeepSpeed makes of files, in one process for all."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        input=json.dumps([{"file": file, "world_size": 2} for file in files]),
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return list(json.loads(done.stdout.splitlines()[-1]))


def test_deepspeed_holds_what_the_recipe_says_and_what_only_the_users_file_says() -> None:
    files = [_file(kind, {**BATCH, **recipe}) for kind, recipe, _ in CASES]
    own = _file("deepspeed", {**BATCH, "strategy": {"kind": "zero2", "config": "ds.json"}}, UNUSUAL)
    *answers, unusual = _read([*files, own])

    wrong = {}
    for (kind, recipe, wanted), answer in zip(CASES, answers, strict=True):
        said = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, **wanted}
        found = _leaves(answer)
        differs = {name: found.get(name, "absent") for name, value in said.items() if found.get(name) != value}
        if "error" in answer or differs:
            wrong[f"{kind} {json.dumps(recipe)}"] = answer.get("error") or differs
    assert not wrong, json.dumps(wrong, indent=1)

    assert "error" not in unusual, unusual
    held = _leaves(unusual)
    assert held["activation_checkpointing_config.partition_activations"] is True
    assert held["activation_checkpointing_config.number_checkpoints"] == 4
    assert held["expert_parallel_config.autoep_size"] == 2
    assert held["use_data_before_expert_parallel_"] is True
    assert (held["flops_profiler_config.profile_step"], held["autotuning_config.results_dir"]) == (3, "results")
    assert (held["comms_config.comms_logger.prof_all"], held["wall_clock_breakdown"]) == (True, True)


@pytest.mark.parametrize("kind", ["deepspeed", "accelerate", "hf"])
def test_blocks_that_no_setting_speaks_of_go_through_unchanged(kind: str) -> None:
    compression = {"weight_quantization": {"shared_parameters": {"enabled": False}, "different_groups": {}}}
    base = {**UNUSUAL, "compression_training": compression}  # which newer versions have no more, and say so themselves
    written = _file(kind, {**({} if kind == "accelerate" else BATCH), "strategy": {"kind": "zero2"}}, base)
    blocks = base.keys() - {"data_types"}
    assert {name: written[name] for name in blocks} == {name: base[name] for name in blocks}
    assert written["data_types"]["keep_in_fp32_modules"] == "auto"
