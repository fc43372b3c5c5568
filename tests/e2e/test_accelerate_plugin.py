"""A script on Accelerator() finds in its DeepSpeed plugin what accelerate's own keys would have put there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.unused_port import unused_port
from trainkit.errors import Origin
from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan
from trainkit.recipe.resolved import Entry, Resolved
from trainkit.recipe.schema import Recipe
from trainkit.recipe.validate import with_kinds

PROGRAMS = Path(__file__).parent / "programs"
PACKAGES = {"torch": "2.13.0", "accelerate": "1.15.0", "deepspeed": "0.19.8", "transformers": "5.23.0"}
RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "DS_ACCELERATOR": "cpu"}
# What the plan's file says besides, which accelerate's keys cannot: whose optimizer it is.
BESIDES = {"zero_force_ds_cpu_optimizer", "zero_allow_untested_optimizer"}
# A piece of a recipe, and the same in the keys of accelerate's file.
CASES: Sequence[tuple[Mapping[str, Any], Mapping[str, Any], str]] = (
    (
        {
            "strategy": {"kind": "zero2", "offload_optimizer": "cpu"},
            "batch": {"accumulation": 4},
            "train": {"max_grad_norm": 0.5},
            "precision": {"dtype": "bf16"},
        },
        {
            "zero_stage": 2,
            "offload_optimizer_device": "cpu",
            "gradient_accumulation_steps": 4,
            "gradient_clipping": 0.5,
        },
        "bf16",
    ),
    (
        {"strategy": {"kind": "zero3", "offload_param": "cpu", "gather_16bit": True}},
        {"zero_stage": 3, "offload_param_device": "cpu", "zero3_init_flag": True, "zero3_save_16bit_model": True},
        "no",
    ),
    ({"strategy": {"kind": "zero3"}}, {"zero_stage": 3, "zero3_init_flag": True}, "no"),
)


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        found |= _leaves(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return found


def _planned(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The environment and files of a plan for one rank on a CPU."""
    program = {"kind": "accelerate", "script": "train.py"}
    base = {"devices": {"type": "cpu"}, "nodes": {"processes_per_node": 1}, "launcher": {"kind": "torchrun"}}
    tree = {**base, **recipe, "program": program}
    origin = Origin("file r.yaml", 0, "r.yaml", 1, 1)
    history = {key: (Entry(value, origin),) for key, value in _leaves(tree).items()}
    facts = Facts("linux", "x86_64", "h", "3.11", sys.executable, 2, 2**36, packages=PACKAGES)
    plan = build_plan(Resolved(Recipe.model_validate(with_kinds(tree)), tree, history), facts).plan
    environment = {name: str(value) for name, value in plan.environment.set}
    return {"environment": environment, "files": {file.path: file.content for file in plan.files}, "words": []}


def _by_keys(keys: Mapping[str, Any], precision: str) -> dict[str, Any]:
    """The same as a user of accelerate alone would write it."""
    file = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "mixed_precision": precision,
        "num_machines": 1,
        "num_processes": 1,
        "deepspeed_config": keys,
    }
    words = ["--config_file=<run_dir>/a.yaml", "--main_process_port=0", "--no_python", "program"]
    return {"environment": {}, "files": {"a.yaml": json.dumps(file)}, "words": words}


def _asked(environment: Mapping[str, str]) -> list[dict[str, Any]]:
    asked = [case for recipe, keys, dtype in CASES for case in (_planned(recipe), _by_keys(keys, dtype))]
    for case in asked:
        case["environment"] = {**case["environment"], **environment}
    return asked


def test_the_plugin_holds_the_same_whether_by_the_plans_file_or_by_accelerates_own_keys(
    clean_environment: dict[str, str],
) -> None:
    environ = {**clean_environment, "PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / "accelerate_plugin.py")],
        input=json.dumps(_asked({**RANK, "MASTER_PORT": str(unused_port())})),
        env={**environ, **RANK},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    pairs = zip(answers[::2], answers[1::2], strict=True)
    for (recipe, _, dtype), (planned, by_keys) in zip(CASES, pairs, strict=True):
        ours, theirs = _leaves(planned.pop("config")), _leaves(by_keys.pop("config"))
        assert planned == by_keys, recipe
        assert planned["precision"] == dtype
        said = {key: value for key, value in theirs.items() if key in ours or value not in (None, "none", False)}
        assert {key: ours.get(key, "absent") for key in said} == said, recipe
        assert ours.keys() - theirs.keys() <= BESIDES, recipe
    assert answers[2]["gathered"] == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert "Cannot get 16bit model weights" in answers[4]["gathered"]
