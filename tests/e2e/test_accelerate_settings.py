"""The installed accelerate accepts each plan's file and words, and its workers read what the recipe means."""

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

from trainkit.convert.exporting import export
from trainkit.errors import Origin
from trainkit.launch_plan.model import Plan
from trainkit.machine.facts import Facts, Gpu
from trainkit.planner.build import build_plan, decide
from trainkit.recipe.resolved import Entry, Resolved
from trainkit.recipe.schema import Recipe
from trainkit.recipe.validate import with_kinds

PROGRAM = Path(__file__).parent / "programs" / "accelerate_parse.py"
# What the test gives the variables that are known only when a run starts: the second of two nodes.
BOUND = {"<node_rank>": "1", "<master_addr>": "10.0.0.1", "<port>": "29511", "<attempt_dir>": "/tmp/attempt"}
SIMPLE, TORCHRUN, DEEPSPEED = "simple_launcher", "multi_gpu_launcher", "deepspeed_launcher"


@dataclass(frozen=True)
class Case:
    """A piece of a recipe, how accelerate has to start it, and what Accelerator() has to read then.

    variables: of a worker. reads: dotted, below `dynamo`, `fsdp` and `deepspeed`. cards: GPUs; none is a CPU.
    """

    recipe: Mapping[str, Any]
    launcher: str
    variables: Mapping[str, str] = field(default_factory=dict)
    reads: Mapping[str, Any] = field(default_factory=dict)
    flags: Mapping[str, Any] = field(default_factory=dict)
    cards: int = 2


DDP: Mapping[str, Any] = {"strategy": {"kind": "ddp"}}
NODES: Mapping[str, Any] = {"nodes": {"count": 2, "rendezvous": "10.0.0.1:29511"}}
CPU: Mapping[str, Any] = {"devices": {"type": "cpu"}}
MPS: Mapping[str, Any] = {"devices": {"type": "mps"}}
ACCUMULATE: Mapping[str, Any] = {"batch": {"accumulation": 4}}
STEPS = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}
ELSEWHERE = {"num_processes": 4, "num_machines": 2, "machine_rank": 1, "nproc_per_node": "2"}
MEETING = {"rdzv_backend": "static", "rdzv_endpoint": "10.0.0.1:29511", "same_network": False, **ELSEWHERE}


def _fsdp(wanted: Mapping[str, Any], reads: Mapping[str, Any], **more: Any) -> Case:
    recipe = {"strategy": {"kind": "fsdp", **wanted}, **more}
    return Case(recipe, TORCHRUN, reads={f"fsdp.{name}": value for name, value in reads.items()})


def _zero(kind: str, wanted: Mapping[str, Any], reads: Mapping[str, Any], **more: Any) -> Case:
    found = {f"deepspeed.{name}": value for name, value in reads.items()}
    return Case({"strategy": {"kind": kind, **wanted}, **more}, DEEPSPEED, reads=found)


def _compiled(wanted: Mapping[str, Any], reads: Mapping[str, Any], kind: str, launcher: str) -> Case:
    recipe = {"strategy": {"kind": kind}, "efficiency": {"compile": {"enabled": True, **wanted}}}
    return Case(recipe, launcher, reads={f"dynamo.{name}": value for name, value in reads.items()})


V1 = {"version": 1}
CASES: Sequence[Case] = (
    Case({}, SIMPLE, {"ACCELERATE_MIXED_PRECISION": "no"}, {"dynamo.backend": "NO"}, cards=1),
    Case(CPU, SIMPLE, {"ACCELERATE_USE_CPU": "True"}, cards=0),
    Case({**MPS, "precision": {"dtype": "bf16"}}, SIMPLE, {"ACCELERATE_MIXED_PRECISION": "bf16"}, cards=0),
    Case({**DDP, **CPU}, TORCHRUN, {"ACCELERATE_USE_CPU": "True"}, flags={"num_processes": 2}, cards=0),
    Case({**DDP, "nodes": {"processes_per_node": 1}}, SIMPLE, {"LOCAL_RANK": "0", "WORLD_SIZE": "1"}, cards=1),
    Case({**DDP, **NODES, **ACCUMULATE}, TORCHRUN, STEPS, flags=MEETING),
    Case({**DDP, "precision": {"dtype": "fp16"}}, TORCHRUN, {"ACCELERATE_MIXED_PRECISION": "fp16"}),
    Case({"strategy": {"kind": "fsdp"}, **NODES}, TORCHRUN, flags=MEETING),
    Case({"strategy": {"kind": "zero3"}, **NODES, **ACCUMULATE}, DEEPSPEED, STEPS, flags=MEETING),
    Case({"strategy": {"kind": "fsdp"}, **ACCUMULATE}, TORCHRUN, {**STEPS, "FSDP_VERSION": "2"}),
    Case({"strategy": {"kind": "fsdp"}, "devices": {"select": 1}}, TORCHRUN, flags={"num_processes": 1}),
    _fsdp({}, {"fsdp_version": 2, "reshard_after_forward": True, "cpu_offload": False}),
    _fsdp({}, {"auto_wrap_policy": "transformer_auto_wrap_policy", "transformer_cls_names_to_wrap": None}),
    _fsdp({"sharding": "shard_grad_op", "offload": True}, {"reshard_after_forward": False, "cpu_offload": True}),
    _fsdp(
        {"wrap_classes": ["BertLayer", "BertPooler"]}, {"transformer_cls_names_to_wrap": ["BertLayer", "BertPooler"]}
    ),
    _fsdp(
        {"auto_wrap": "size", "min_params": 2000},
        {"auto_wrap_policy": "size_based_auto_wrap_policy", "min_num_params": 2000},
    ),
    _fsdp({"auto_wrap": "none"}, {"auto_wrap_policy": None}),
    _fsdp({"state_dict_type": "full"}, {"state_dict_type": "FULL_STATE_DICT"}),
    _fsdp({"state_dict_type": "sharded"}, {"state_dict_type": "SHARDED_STATE_DICT"}),
    _fsdp({"cpu_ram_efficient_loading": False}, {"cpu_ram_efficient_loading": False}),
    _fsdp({}, {"activation_checkpointing": True}, efficiency={"gradient_checkpointing": {"every": True}}),
    _fsdp({}, {"activation_checkpointing": False}, precision={"dtype": "bf16"}),
    _fsdp(V1, {"fsdp_version": 1, "sharding_strategy": "FULL_SHARD", "sync_module_states": True}),
    _fsdp(V1, {"use_orig_params": True, "forward_prefetch": False, "backward_prefetch": None}),
    _fsdp({**V1, "sharding": "shard_grad_op"}, {"sharding_strategy": "SHARD_GRAD_OP"}),
    _fsdp(
        {**V1, "backward_prefetch": "backward_post", "forward_prefetch": True, "use_orig_params": False},
        {"backward_prefetch": "BACKWARD_POST", "forward_prefetch": True, "use_orig_params": False},
    ),
    _fsdp({**V1, "backward_prefetch": "no_prefetch"}, {"backward_prefetch": None}),
    _fsdp({**V1, "sync_module_states": False}, {"sync_module_states": False, "cpu_ram_efficient_loading": False}),
    _zero("zero1", {}, {"zero_optimization.stage": 1, "gradient_clipping": "auto", "init": False}),
    _zero("zero2", {"offload_optimizer": "cpu"}, {"zero_optimization.offload_optimizer.device": "cpu"}),
    _zero("zero2", {}, {"bf16.enabled": True, "fp16.enabled": False}, precision={"dtype": "bf16"}),
    _zero("zero2", {}, {"fp16.enabled": True, "bf16.enabled": False}, precision={"dtype": "fp16"}),
    _zero("zero2", {}, {"gradient_clipping": 0.5}, train={"max_grad_norm": 0.5}),
    _zero("zero2", {}, {"gradient_accumulation_steps": 4, "train_batch_size": "auto"}, batch={"accumulation": 4}),
    _zero("zero2", {}, {"gradient_accumulation_steps": "auto", "train_micro_batch_size_per_gpu": "auto"}),
    _zero(
        "zero3",
        {"gather_16bit": True},
        {"zero_optimization.stage3_gather_16bit_weights_on_model_save": True},
    ),
    _zero(
        "zero3",
        {"offload_optimizer": "nvme", "offload_param": "nvme", "nvme_path": "/fast disk"},
        {
            "init": True,
            "zero_optimization.offload_optimizer.nvme_path": "/fast disk",
            "zero_optimization.offload_param.nvme_path": "/fast disk",
        },
    ),
    _compiled({}, {"backend": "INDUCTOR", "mode": "default", "dynamic": False, "regional": True}, "ddp", TORCHRUN),
    _compiled({"scope": "model"}, {"backend": "INDUCTOR", "regional": False}, "ddp", TORCHRUN),
    _compiled({"mode": "max-autotune", "dynamic": True}, {"mode": "max-autotune", "dynamic": True}, "ddp", TORCHRUN),
    _compiled({"backend": "aot_eager", "scope": "blocks"}, {"backend": "AOT_EAGER", "regional": True}, "ddp", TORCHRUN),
    _compiled({}, {"regional": True}, "fsdp", TORCHRUN),
    _compiled({"mode": "reduce-overhead"}, {"backend": "INDUCTOR", "mode": "reduce-overhead"}, "zero2", DEEPSPEED),
)


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        found |= _leaves(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return found


def _plan(case: Case) -> Plan:
    program = {"kind": "accelerate", "script": "train.py"}
    tree = {**case.recipe, "program": program, "launcher": {"kind": "accelerate"}}
    origin = Origin("file r.yaml", 0, "r.yaml", 1, 1)
    history = {key: (Entry(value, origin),) for key, value in _leaves(tree).items()}
    packages = {"torch": "2.13.0", "accelerate": "1.15.0", "deepspeed": "0.19.8", "transformers": "5.23.0"}
    cards = tuple(Gpu(i, f"GPU-{i}", "NVIDIA A100", 80 * 2**30, 79 * 2**30, (8, 0)) for i in range(case.cards))
    facts = Facts("linux", "x86_64", "h", "3.11", sys.executable, 8, 2**36, gpus=cards, packages=packages, mps=True)
    return build_plan(Resolved(Recipe.model_validate(with_kinds(tree)), tree, history), facts).plan


TOLD = """
import sys
from accelerate.commands import launch
args = launch.launch_command_parser().parse_args([f"--config_file={sys.argv[1]}", "train.py"])
args, *_ = launch._validate_launch_command(args)
print(args.tpu, args.tpu_use_cluster, args.multi_gpu, args.mixed_precision, args.main_training_function)
"""


def test_the_exported_file_for_a_tpu_starts_accelerates_launcher_for_one(tmp_path: Path) -> None:
    tree: dict[str, Any] = {"devices": {"type": "xla"}, "precision": {"dtype": "bf16"}}
    tree["program"] = {"kind": "accelerate", "script": "train.py"}
    origin = Origin("file r.yaml", 0, "r.yaml", 1, 1)
    history = {key: (Entry(value, origin),) for key, value in _leaves(tree).items()}
    packages = {"torch": "2.9.0", "torch-xla": "2.9.0", "accelerate": "1.15.0"}
    facts = Facts("linux", "x86_64", "h", "3.11", sys.executable, 8, 2**36, packages=packages)
    context, *_ = decide(Resolved(Recipe.model_validate(with_kinds(tree)), tree, history), facts, ())
    (tmp_path / "a.yaml").write_text(export(context, "accelerate", "out").files["accelerate.yaml"])
    command = [sys.executable, "-c", TOLD, str(tmp_path / "a.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.stdout == "True False False bf16 main\n", done.stderr


def _asked(plan: Plan) -> dict[str, Any]:
    words = [str(word) for word in plan.commands[0].launcher]
    for name, value in BOUND.items():
        words = [word.replace(name, value) for word in words]
    return {
        "words": [*words[words.index("accelerate.commands.launch") + 1 :], "program"],
        "environment": {name: str(value) for name, value in plan.environment.set},
        "files": {file.path: file.content for file in plan.files},
    }


@pytest.fixture(scope="module")
def answers() -> list[tuple[Case, Plan, dict[str, Any]]]:
    """Each case with its plan and with what accelerate makes of it, in one process for all."""
    plans = [_plan(case) for case in CASES]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "FSDP_"))}
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        input=json.dumps([_asked(plan) for plan in plans]),
        env={**environ, "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return list(zip(CASES, plans, found, strict=True))


def _report(wrong: Mapping[str, Any]) -> str:
    return json.dumps(wrong, indent=1)


def test_each_plan_is_launched_as_it_is_meant(answers: list[tuple[Case, Plan, dict[str, Any]]]) -> None:
    wrong = {}
    for case, _, answer in answers:
        flags = {name: answer.get("flags", {}).get(name) for name in case.flags}
        if "error" in answer or answer["launcher"] != case.launcher or flags != case.flags:
            wrong[json.dumps(case.recipe)] = answer.get("error") or [answer["launcher"], flags]
    assert not wrong, _report(wrong)


def test_a_worker_has_every_variable_that_the_plan_shows(answers: list[tuple[Case, Plan, dict[str, Any]]]) -> None:
    wrong = {}
    for case, plan, answer in answers:
        shown = {name: str(value) for name, value in plan.environment.set}
        assert case.variables.items() <= shown.items(), case.recipe
        environment = answer["environment"]
        lost = {name: environment.get(name) for name, value in shown.items() if environment.get(name) != value}
        if lost or "ACCELERATE_CPU_AFFINITY" in environment:
            wrong[json.dumps(case.recipe)] = lost or environment
    assert not wrong, _report(wrong)


def test_accelerate_adds_nothing_that_the_plan_does_not_show(
    answers: list[tuple[Case, Plan, dict[str, Any]]],
) -> None:
    wrong = {}
    for case, plan, answer in answers:
        shown = {name: value and str(value) for name, value in plan.environment.added}
        added = dict(answer["environment"].items() - {(name, str(value)) for name, value in plan.environment.set})
        differs = {name: value for name, value in added.items() if shown.get(name, value) not in (None, value)}
        absent = {name for name, value in shown.items() if value and name.startswith(("ACCELERATE_", "FSDP_", "KMP_"))}
        hidden = {"not shown": sorted(added.keys() - shown), "not set": sorted(absent - added.keys()), **differs}
        if any(hidden.values()):
            wrong[json.dumps(case.recipe)] = hidden
    assert not wrong, _report(wrong)


def test_accelerator_reads_the_recipe_and_the_same_under_every_launcher(
    answers: list[tuple[Case, Plan, dict[str, Any]]],
) -> None:
    wrong = {}
    for case, _, answer in answers:
        found = _leaves(answer["launched"])
        differences = {name: found.get(name) for name, value in case.reads.items() if found.get(name) != value}
        bare = _leaves(answer["bare"])
        differences |= {name: bare.get(name) for name in found if found[name] != bare.get(name)}
        if differences:
            wrong[json.dumps(case.recipe)] = differences
    assert not wrong, _report(wrong)
