"""A run on a TPU is planned as one process of a script of the user's own, and what XLA would drop is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from trainkit.convert.exporting import export
from trainkit.errors import RecipeError
from trainkit.launch_plan.model import Plan
from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan, decide
from trainkit.recipe.resolved import Resolved
from trainkit.tools.registry import PROGRAMS

Layered = Callable[..., Resolved]
Machine = Callable[..., Facts]

PACKAGES = {"torch": "2.9.0", "torch-xla": "2.9.0", "accelerate": "1.15.0", "transformers": "4.57.6"}
TPU: dict[str, Any] = {"devices": {"type": "xla"}}
FSDP: dict[str, Any] = {"strategy": {"kind": "fsdp", "wrap_classes": ["LlamaDecoderLayer"]}}
RECOMPUTING = "efficiency.gradient_checkpointing.every"
EVERY: dict[str, Any] = {"efficiency": {"gradient_checkpointing": {"every": True}}}


def program(kind: str) -> dict[str, Any]:
    return {"program": {} if kind == "builtin" else {"kind": kind, "script": "train.py"}}


@pytest.fixture
def plan(layered: Layered, machine: Machine) -> Callable[..., Plan]:
    """The plan for layers of a recipe over one on a TPU. packages: in place of PACKAGES; None takes one away."""

    def build(*layers: dict[str, Any], kind: str = "hf", cards: int = 0, **packages: str | None) -> Plan:
        names = {name.replace("_", "-"): version for name, version in packages.items()}
        installed = {name: version for name, version in (PACKAGES | names).items() if version}
        return build_plan(layered(program(kind), TPU, *layers), machine(cards, packages=installed)).plan

    return build


@pytest.fixture
def refused(plan: Callable[..., Plan]) -> Callable[..., dict[str, str]]:
    """Reasons by the key that each refusal points at."""

    def errors(*layers: dict[str, Any], **more: Any) -> dict[str, str]:
        with pytest.raises(RecipeError) as caught:
            plan(*layers, **more)
        assert all(found.hint for found in caught.value.diagnostics)
        return {found.key: f"{found.what} {found.why}" for found in caught.value.diagnostics}

    return errors


def variables(plan: Plan) -> dict[str, str]:
    return {name: str(value) for name, value in plan.environment.set}


def fsdp_file(plan: Plan) -> dict[str, Any]:
    (content,) = [file.content for file in plan.files if file.path == "fsdp_config.json"]
    found: dict[str, Any] = json.loads(content)
    return found


def passed(plan: Plan, flag: str) -> str:
    words = [str(word) for word in plan.commands[0].program]
    return words[words.index(flag) + 1]


def blockers(plan: Plan) -> list[str]:
    return [f"{notice.what} {notice.hint}" for notice in plan.notices if notice.severity == "blocker"]


def test_fsdp_over_every_chip_is_one_process_under_spmd(plan: Callable[..., Plan]) -> None:
    found = plan(FSDP, EVERY)
    assert (found.launcher.kind, found.topology.device, found.topology.world_size) == ("python", "xla", 1)
    told = variables(found)
    assert {name: told.get(name) for name in ("PJRT_DEVICE", "XLA_USE_SPMD", "USE_TORCH_XLA")} == {
        "PJRT_DEVICE": "TPU",
        "XLA_USE_SPMD": "1",
        "USE_TORCH_XLA": "1",
    }
    assert not {"TPU_VISIBLE_CHIPS", "LOCAL_RANK", "WORLD_SIZE"} & told.keys()
    assert fsdp_file(found) == {
        "xla": True,
        "xla_fsdp_v2": True,
        "xla_fsdp_grad_ckpt": True,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    }
    assert "--fsdp" in [str(word) for word in found.commands[0].program]
    assert passed(found, "--optim") == "adamw_torch"  # the script's default has no step on XLA
    assert blockers(found) == []


def test_the_first_fsdp_has_further_settings_and_one_chip(plan: Callable[..., Plan]) -> None:
    settings = {"compute_dtype": "bfloat16", "reshard_after_forward": False}
    found = plan({"strategy": {"kind": "fsdp", "version": 1, "auto_wrap": "none", "xla_settings": settings}})
    assert fsdp_file(found) == {
        "xla": True,
        "xla_fsdp_v2": False,
        "xla_fsdp_settings": settings,
        "auto_wrap_policy": "NO_WRAP",
        "transformer_layer_cls_to_wrap": [],  # else Trainer wraps by the model's own list
    }
    told = variables(found)
    assert told["TPU_VISIBLE_CHIPS"] == "0" and "XLA_USE_SPMD" not in told
    assert "XLA_USE_SPMD" in found.environment.unset
    assert "one process keeps every shard" in str(found.notices)


@pytest.mark.parametrize("kind", ["hf", "accelerate"])
def test_a_library_that_counts_chips_as_processes_sees_one(plan: Callable[..., Plan], kind: str) -> None:
    found = plan(kind=kind)
    told = variables(found)
    assert (found.launcher.kind, told["TPU_PROCESS_BOUNDS"], told["TPU_VISIBLE_CHIPS"]) == ("python", "1,1,1", "0")
    assert "LOCAL_RANK" not in told and not any(file.path == "accelerate.yaml" for file in found.files)
    (expected,) = [json.loads(file.content) for file in found.files if file.path == "expected.json"]
    assert (expected["device"], expected["strategy"]) == ("xla", "single")


@pytest.mark.parametrize(("recipe_says", "name"), [({}, "USE"), ({"ACCELERATE_DOWNCAST_BF16": "1"}, "DOWNCAST")])
def test_bf16_is_a_variable_of_torch_xla(plan: Callable[..., Plan], recipe_says: dict[str, str], name: str) -> None:
    found = plan({"precision": {"dtype": "bf16"}, "env": recipe_says})
    assert [key for key in variables(found) if key.startswith("XLA_")] == [f"XLA_{name}_BF16"]
    assert "the optimizer's state too" in str(found.notices)
    assert not any(key.startswith("XLA_") for key in variables(plan()))


def test_a_script_that_spawns_by_itself_sees_every_chip(plan: Callable[..., Plan]) -> None:
    told = variables(plan(kind="torch", cards=2))
    assert (told["PJRT_DEVICE"], told["CUDA_VISIBLE_DEVICES"]) == ("TPU", "")
    assert not {"TPU_VISIBLE_CHIPS", "XLA_USE_SPMD", "USE_TORCH_XLA"} & told.keys()


@pytest.mark.parametrize("kind", ["hf", "accelerate"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_libraries_are_kept_from_an_installed_torch_xla_in_other_runs(
    plan: Callable[..., Plan], kind: str, device: str
) -> None:
    elsewhere = {"devices": {"type": device}}
    assert variables(plan(elsewhere, kind=kind, cards=1))["USE_TORCH_XLA"] == "0"
    assert "USE_TORCH_XLA" not in variables(plan(elsewhere, kind=kind, cards=1, torch_xla=None))


@pytest.mark.parametrize(
    ("kind", "layer", "key", "why"),
    [
        ("builtin", {}, "devices.type", "CUDA, MPS and CPU"),
        ("deepspeed", {"strategy": {"kind": "zero1"}}, "devices.type", "DeepSpeed does not run"),
        ("hf", {"nodes": {"processes_per_node": 4}, **FSDP}, "nodes.processes_per_node", "xmp.spawn"),
        ("hf", {"launcher": {"kind": "torchrun"}, **FSDP}, "launcher.kind", "several processes"),
        ("accelerate", {"launcher": {"kind": "accelerate"}}, "launcher.kind", "imports it and calls its main()"),
        ("hf", {"strategy": {"kind": "ddp"}}, "strategy.kind", "a process for each chip"),
        ("accelerate", FSDP, "strategy.kind", "shards nothing"),
        ("hf", {"precision": {"dtype": "fp16"}}, "precision.dtype", "fp16 on a TPU"),
        ("hf", {"optimizer": {"name": "adamw_torch_fused"}}, "optimizer.name", "no step for XLA"),
        ("hf", {"precision": {"tf32": True}}, "precision.tf32", "CUDA GPUs"),
        ("hf", {"strategy": {"kind": "fsdp", "offload": True}}, "strategy.offload", "no such setting"),
        ("hf", {"strategy": {"kind": "fsdp", "sharding": "shard_grad_op"}}, "strategy.sharding", "no such setting"),
        ("hf", {"strategy": {"kind": "fsdp", "state_dict_type": "full"}}, "strategy.state_dict_type", "no such"),
        ("hf", {"strategy": {"kind": "fsdp", "backward_prefetch": "no_prefetch"}}, "strategy.backward_prefetch", "no"),
        ("hf", {"strategy": {"kind": "fsdp", "auto_wrap": "none"}, **EVERY}, RECOMPUTING, "wrapped units"),
        ("hf", {"strategy": {"kind": "fsdp", "xla_settings": {"a": 1}}}, "strategy.xla_settings", "version 1 alone"),
        ("hf", {"env": {"XLA_USE_SPMD": "0"}}, "env.XLA_USE_SPMD", "the plan decides"),
    ],
)  # fmt: skip
def test_what_a_tpu_would_not_do_is_refused(
    refused: Callable[..., dict[str, str]], kind: str, layer: dict[str, Any], key: str, why: str
) -> None:
    found = refused(layer, kind=kind)
    assert why in found[key]
    assert kind in ("deepspeed",) or len(found) == 1  # which also names the strategy


@pytest.mark.parametrize("name", ["compute_dtype", "buffer_dtype", "auto_wrap_policy"])
def test_further_settings_that_trainer_could_not_hand_over_are_refused(
    refused: Callable[..., dict[str, str]], name: str
) -> None:
    found = refused({"strategy": {"kind": "fsdp", "version": 1, "xla_settings": {name: "bf16"}}})
    assert list(found) == [f"strategy.xla_settings.{name}"]


@pytest.mark.parametrize("kind", ["builtin", "hf", "torch"])
def test_settings_of_xla_are_refused_off_xla(refused: Callable[..., dict[str, str]], kind: str) -> None:
    layer = {"devices": {"type": "cuda"}, "strategy": {"kind": "fsdp", "xla_settings": {"compute_dtype": "bfloat16"}}}
    assert "only torch_xla's FSDP" in refused(layer, kind=kind, cards=2)["strategy.xla_settings"]


@pytest.mark.parametrize(
    ("layer", "packages", "says"),
    [
        (
            {},
            {"torch_xla": None},
            "torch-xla >= 2.0; it is not installed /opt/python -m pip install 'torch_xla[tpu]'",
        ),
        (FSDP, {"torch_xla": None}, "requires torch-xla >= 2.2; it is not installed"),
        (FSDP, {"torch_xla": "2.1.0"}, "requires torch-xla >= 2.2; 2.1.0 is installed"),
        ({}, {"torch_xla": "1.13"}, "requires torch-xla >= 2.0; 1.13 is installed"),
        (FSDP, {"transformers": "5.3.0"}, "lacks an optimizer for torch_xla's FSDP"),
        (FSDP, {"transformers": "5.23.0"}, "/opt/python -m pip install 'transformers<5.3'"),
        ({}, {"torch": "2.13.0"}, "torch_xla 2.9.0 is made for torch 2.9, and torch 2.13.0 is installed"),
    ],
)
def test_the_torch_xla_that_a_run_needs_is_a_blocker(
    plan: Callable[..., Plan], layer: dict[str, Any], packages: dict[str, str | None], says: str
) -> None:
    assert says in " ".join(blockers(plan(layer, **packages)))


def test_no_machine_takes_xla_by_itself(plan: Callable[..., Plan]) -> None:
    assert plan({"devices": {"type": "auto"}}).topology.device == "cpu"


def test_an_export_says_xla_to_accelerate_and_spmd_to_the_shell(layered: Layered, machine: Machine) -> None:
    def exported(name: str, *layers: dict[str, Any], kind: str) -> str:
        context = decide(layered(program(kind), TPU, *layers), machine(0, packages=PACKAGES), ())[0]
        return next(iter(export(context, name, "out").files.values()))

    config = exported("accelerate", kind="accelerate")
    assert "\ndistributed_type: XLA\n" in config and "once for each chip" in config.splitlines()[0]
    assert "\nPJRT_DEVICE=TPU USE_TORCH_XLA=1 XLA_USE_SPMD=1 python " in exported("hf", FSDP, kind="hf")
    elsewhere = exported("hf", FSDP, {"env": {"PJRT_DEVICE": "CPU"}}, kind="hf")
    assert "\nUSE_TORCH_XLA=1 XLA_USE_SPMD=1 PJRT_DEVICE=CPU python " in elsewhere


def test_every_kind_of_program_has_an_answer_for_a_tpu(plan: Callable[..., Plan]) -> None:
    for kind in PROGRAMS.keys() - {"builtin", "deepspeed"}:
        assert plan(kind=kind).topology.device == "xla"
