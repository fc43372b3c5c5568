"""The table of strategy x launcher x program x device: what is refused, why, and what to do instead."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any, get_args

import pytest

from trainkit.distribution import RELEASES, install
from trainkit.errors import RecipeError
from trainkit.launch_plan.context import bare_context
from trainkit.launch_plan.model import Device
from trainkit.machine.facts import Facts, at_least
from trainkit.planner.build import build_plan
from trainkit.planner.requirements import REQUIREMENTS, of_tool
from trainkit.planner.rules import OF_BUILTIN, STRATEGIES, refusals, table_cells
from trainkit.recipe.resolved import Resolved
from trainkit.recipe.schema import Launcher
from trainkit.tools.registry import LAUNCHERS, PROGRAMS

Layered = Callable[..., Resolved]
Machine = Callable[..., Facts]

DEVICES: tuple[Device, ...] = ("cpu", "cuda")


def test_every_launcher_can_be_chosen_in_a_recipe() -> None:
    assert get_args(Launcher.model_fields["kind"].annotation) == ("auto", *LAUNCHERS)


def test_every_strategy_can_run_on_cpu_and_cuda_under_some_launcher_with_one_and_with_several_processes() -> None:
    for strategy, device, ranks in itertools.product(STRATEGIES, DEVICES, (1, 2)):
        if strategy == "single" and ranks > 1:
            continue
        program = "deepspeed" if strategy == "zero0" else "builtin"
        sound = [name for name in LAUNCHERS if not refusals(bare_context(strategy, name, program, device, ranks))]
        assert sound, (strategy, device, ranks)


def test_the_table_for_people_has_a_row_for_each_strategy_and_launcher() -> None:
    rows = table_cells()
    assert len(rows) == len(OF_BUILTIN) * len(LAUNCHERS)
    assert rows["ddp", "torchrun"] == {"cpu": "yes", "cuda": "yes", "mps": "no"}
    assert rows["ddp", "python"] == {"cpu": "one process", "cuda": "one process", "mps": "no"}
    assert rows["single", "accelerate"] == {"cpu": "one process", "cuda": "one process", "mps": "one process"}
    assert rows["zero3", "deepspeed"] == {"cpu": "yes", "cuda": "yes", "mps": "no"}


ZERO_ON_CPU = {"strategy": {"kind": "zero2"}, "devices": {"type": "cpu"}}


@pytest.mark.parametrize(
    ("recipe", "facts", "key", "reason", "instead"),
    [
        ({"nodes": {"processes_per_node": 2}}, {}, "strategy.kind", "separate copies", "strategy.kind: ddp"),
        (
            {"devices": {"select": "all"}},
            {"gpus": 8},
            "strategy.kind",
            "one process on one device",
            "strategy.kind: ddp",
        ),
        (
            {"strategy": {"kind": "ddp"}, "launcher": {"kind": "python"}},
            {},
            "launcher.kind",
            "starts one process",
            "launcher.kind: torchrun",
        ),
        ({"strategy": {"kind": "fsdp"}}, {"mps": True}, "strategy.kind", "MPS", "strategy.kind: single"),
        ({"launcher": {"kind": "torchrun"}}, {"mps": True}, "launcher.kind", "MPS takes one", "launcher.kind: python"),
        (
            {"strategy": {"kind": "ddp"}, "launcher": {"kind": "deepspeed"}, "nodes": {"count": 2}},
            {},
            "launcher.kind",
            "hostfile",
            "launcher.kind: torchrun",
        ),
        (
            {"strategy": {"kind": "ddp"}, "launcher": {"kind": "deepspeed"}, "devices": {"select": [1, 0]}},
            {"gpus": 2},
            "devices.select",
            "sorts the GPUs",
            "ascending order",
        ),
        (
            {"strategy": {"kind": "ddp"}, "launcher": {"kind": "deepspeed", "max_restarts": 1}},
            {},
            "launcher.max_restarts",
            "never restarts",
            "torchrun",
        ),
        (
            {"launcher": {"kind": "accelerate", "max_restarts": 1}},
            {},
            "launcher.max_restarts",
            "never restarts",
            "torchrun",
        ),
        ({**ZERO_ON_CPU, "precision": {"dtype": "fp16"}}, {}, "precision.dtype", "oneDNN", "bf16 or fp32"),
        ({"precision": {"weights": "bf16"}}, {}, "precision.weights", "computed with in bf16", "precision.dtype: bf16"),
        (
            {**ZERO_ON_CPU, "precision": {"dtype": "bf16", "weights": "bf16"}},
            {},
            "precision.weights",
            "fp32 copy of the weights",
            "strategy.kind: fsdp",
        ),
        (
            {"precision": {"dtype": "bf16", "weights": "bf16", "eval": "fp32"}},
            {},
            "precision.eval",
            "evaluated in bf16",
            "precision.eval: same",
        ),
        (
            {"strategy": {"kind": "fsdp"}, "precision": {"dtype": "bf16", "eval": "fp32"}},
            {},
            "precision.eval",
            "casts the weights once",
            "precision.eval: same, or strategy.kind: ddp",
        ),
        (
            {**ZERO_ON_CPU, "precision": {"dtype": "auto", "eval": "bf16"}},
            {},
            "precision.eval",
            "casts the weights once",
            "precision.eval: same",
        ),
        (
            {"strategy": {"kind": "zero2"}, "optimizer": {"name": "muon"}},
            {},
            "optimizer.name",
            "Muon needs whole matrices",
            "strategy.kind: fsdp",
        ),
        (
            {"devices": {"type": "cpu"}, "efficiency": {"offload_activations": True}},
            {},
            "efficiency.offload_activations",
            "in the machine's memory already",
            "efficiency.gradient_checkpointing",
        ),
        (
            {"efficiency": {"offload_activations": True, "compile": {"enabled": True}}},
            {"gpus": 1},
            "efficiency.offload_activations",
            "a compiled block decides for itself",
            "efficiency.compile: false",
        ),
        (
            {"strategy": {"kind": "zero3"}, "efficiency": {"gradient_checkpointing": {"every": 1, "selective": True}}},
            {},
            "efficiency.gradient_checkpointing.selective",
            "gradients come out wrong",
            "strategy.kind: fsdp",
        ),
    ],
)
def test_an_unsound_combination_is_refused_with_its_reason_and_the_nearest_sound_one(
    layered: Layered,
    machine: Machine,
    recipe: dict[str, Any],
    facts: dict[str, Any],
    key: str,
    reason: str,
    instead: str,
) -> None:
    with pytest.raises(RecipeError) as caught:
        build_plan(layered(recipe), machine(**facts))
    diagnostic = next(found for found in caught.value.diagnostics if found.key == key)
    assert reason in diagnostic.why
    assert instead in diagnostic.hint


@pytest.mark.parametrize(
    "recipe",
    [
        {"strategy": {"kind": "fsdp"}, "precision": {"dtype": "bf16", "eval": "bf16"}},
        {"strategy": {"kind": "ddp"}, "precision": {"dtype": "bf16", "eval": "fp32"}},
        {
            "strategy": {"kind": "fsdp"},
            "precision": {"eval": "bf16"},
            "program": {"kind": "torch", "script": "t.py", "reads_recipe": True},
        },
    ],
)
def test_a_format_of_its_own_for_evaluation_is_taken_where_it_can_be_had(
    layered: Layered, machine: Machine, recipe: dict[str, Any]
) -> None:
    assert build_plan(layered(recipe), machine()).plan.strategy.kind == recipe["strategy"]["kind"]


def test_all_that_is_unsound_is_said_at_once(layered: Layered, machine: Machine) -> None:
    recipe = {"launcher": {"kind": "python", "max_restarts": 2}, "nodes": {"processes_per_node": 2}}
    with pytest.raises(RecipeError) as caught:
        build_plan(layered(recipe), machine())
    assert {found.key for found in caught.value.diagnostics} == {
        "strategy.kind",
        "launcher.kind",
        "launcher.max_restarts",
    }


@pytest.mark.parametrize(
    ("recipe", "packages", "missing", "command"),
    [
        (
            {"strategy": {"kind": "zero1"}},
            {"torch": "2.13.0", "numpy": "2.0", "safetensors": "0.8.0"},
            ["deepspeed >= 0.19.4; it is not installed"],
            "'deepspeed>=0.19.4,<0.19.9' 'ninja>=1.11.1,<2'",
        ),
        (
            {"strategy": {"kind": "ddp"}},
            {},
            ["torch >= 2.6; it is not installed", "numpy", "safetensors"],
            "'torch>=2.6,<2.14' 'numpy>=1.26,<3' 'safetensors>=0.4.3,<0.9'",
        ),
        (  # its command is for all that the plan needs
            {"strategy": {"kind": "fsdp"}},
            {"torch": "2.4.1", "numpy": "2.0", "safetensors": "0.8.0"},
            ["torch >= 2.6; 2.4.1 is installed"],
            "'torch>=2.7,<2.14'",
        ),
        (
            {"launcher": {"kind": "accelerate"}},
            {"torch": "2.13.0", "numpy": "2.0", "safetensors": "0.8.0"},
            ["launcher accelerate requires accelerate >= 1.9"],
            "'accelerate>=1.9,<1.16'",
        ),
        ({"program": {"kind": "torch", "script": "t.py"}}, {}, [], ""),
    ],
)
def test_a_missing_package_blocks_the_run_and_says_how_to_install_it(
    layered: Layered,
    machine: Machine,
    recipe: dict[str, Any],
    packages: dict[str, str],
    missing: list[str],
    command: str,
) -> None:
    plan = build_plan(layered(recipe), machine(packages=packages)).plan
    found = [notice for notice in plan.notices if notice.severity == "blocker"]
    assert len(found) == len(missing)
    for words, notice in zip(missing, found, strict=True):
        assert words in notice.what
        assert notice.hint == f"/opt/python -m pip install {command}"


@pytest.mark.parametrize(
    ("program", "version", "blocked"),
    [
        ({}, "0.18.0", "program builtin under zero2 requires deepspeed >= 0.19.4; 0.18.0 is installed"),
        ({}, "0.19.4", None),
        ({"kind": "deepspeed", "script": "t.py"}, "0.18.0", None),
        (
            {"kind": "deepspeed", "script": "t.py"},
            "0.15.4",
            "strategy zero2 requires deepspeed >= 0.16; 0.15.4 is installed",
        ),
    ],
)
def test_the_trainer_wants_a_newer_deepspeed_than_programs_that_choose_theirs(
    layered: Layered, machine: Machine, program: dict[str, str], version: str, blocked: str | None
) -> None:
    packages = {"torch": "2.13.0", "numpy": "2.0", "safetensors": "0.8.0", "deepspeed": version}
    plan = build_plan(layered({"strategy": {"kind": "zero2"}, "program": program}), machine(packages=packages)).plan
    assert [each.what for each in plan.notices if each.severity == "blocker"] == ([blocked] if blocked else [])


def of_accelerate(**sizes: str) -> dict[str, Any]:
    """A script whose Accelerator() is told of a mesh over two ranks."""
    variables = {f"PARALLELISM_CONFIG_{name.upper()}_SIZE": size for name, size in sizes.items()}
    program = {"kind": "accelerate", "script": "t.py"}
    return {
        "program": program,
        "strategy": {"kind": "ddp"},
        "env": {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", **variables},
    }


MESH, SEQUENCES = of_accelerate(tp="2"), of_accelerate(sp="2")


@pytest.mark.parametrize(
    ("recipe", "installed", "blocked"),
    [
        ({}, {"torch": "2.6.0"}, "fsdp on cpu requires torch >= 2.7; 2.6.0 is installed"),
        ({}, {"torch": "2.7.0"}, None),
        ({"strategy": {"kind": "ddp"}}, {"torch": "2.6.0"}, None),
        ({"program": {"kind": "torch", "script": "t.py"}}, {"torch": "2.6.0"}, None),
        (MESH, {"accelerate": "1.9.0"}, "a mesh of ranks requires accelerate >= 1.10; 1.9.0 is installed"),
        (MESH, {"accelerate": "1.10.0"}, None),
        (SEQUENCES, {"accelerate": "1.11.0"}, "sequence parallelism over ranks requires accelerate >= 1.12; 1.11.0 is"),
    ],
)
def test_what_an_older_release_cannot_do_is_blocked(
    layered: Layered, machine: Machine, recipe: dict[str, Any], installed: dict[str, str], blocked: str | None
) -> None:
    packages = {
        "torch": "2.13.0",
        "numpy": "2.0",
        "safetensors": "0.8.0",
        "accelerate": "1.15.0",
        "deepspeed": "0.19.8",
        **installed,
    }
    layer = {"strategy": {"kind": "fsdp"}, "devices": {"type": "cpu"}, "nodes": {"processes_per_node": 2}, **recipe}
    plan = build_plan(layered(layer), machine(packages=packages)).plan
    found = [each.what for each in plan.notices if each.severity == "blocker"]
    assert len(found) == bool(blocked), found
    assert not blocked or found[0].startswith(blocked)


def test_a_hint_is_for_the_interpreter_that_the_run_has(layered: Layered, machine: Machine) -> None:
    def hint(executable: str, **recipe: Any) -> str:
        plan = build_plan(layered({"logging": {"report_to": ["wandb"]}, **recipe}), machine(executable=executable)).plan
        (found,) = plan.blockers
        return found.hint

    install = "-m pip install 'wandb>=0.19,<1'"
    assert hint("python") == f"python {install}"  # of a profile: no path is known
    assert hint("/opt/it's mine/python") == f"""'/opt/it'"'"'s mine/python' {install}"""
    elsewhere = {"kind": "slurm", "python": "/shared/bin/python"}
    assert hint("/opt/python", cluster=elsewhere) == f"/shared/bin/python {install}"


def test_what_a_hint_installs_is_new_enough_for_every_choice_that_names_it() -> None:
    tools = [*(of_tool("launcher", name) for name in LAUNCHERS), *(of_tool("program", kind) for kind in PROGRAMS)]
    rows = (*REQUIREMENTS, *(each for tool in tools for each in tool))
    wanted = [each for each in rows if not each.install]
    assert len(wanted) > 10
    for each in wanted:
        oldest, untested = RELEASES[each.package]
        assert at_least(untested, each.minimum) and untested != each.minimum, each
        lowest = re.search(r">=([\d.]+),<", install("python", f"{each.package}>={each.minimum}"))
        assert lowest and at_least(lowest[1], oldest) and at_least(lowest[1], each.minimum), each


@pytest.mark.parametrize(
    ("program", "installed", "blocked"),
    [
        ({}, {}, "logging.report_to tensorboard requires tensorboard >= 2.18; it is not installed"),
        (
            {},
            {"tensorboard": "2.9.1"},
            "logging.report_to tensorboard requires tensorboard >= 2.18; 2.9.1 is installed",
        ),
        ({}, {"tensorboard": "2.21.0"}, None),
        ({"kind": "torch", "script": "t.py", "reads_recipe": True}, {}, None),
    ],
)
def test_a_reporter_of_the_trainer_needs_its_package(
    layered: Layered, machine: Machine, program: dict[str, Any], installed: dict[str, str], blocked: str | None
) -> None:
    recipe = layered({"logging": {"report_to": ["tensorboard"]}, "program": program})
    plan = build_plan(
        recipe, machine(packages={"torch": "2.13.0", "numpy": "2.0", "safetensors": "0.8.0", **installed})
    ).plan
    found = [notice for notice in plan.notices if notice.severity == "blocker"]
    assert [notice.what for notice in found] == ([blocked] if blocked else [])
    assert all(notice.hint == "/opt/python -m pip install 'tensorboard>=2.18,<3'" for notice in found)


@pytest.mark.parametrize(
    ("name", "dtype", "severity"),
    [("NVIDIA V100", "bf16", "blocker"), ("NVIDIA A100", "bf16", None), ("NVIDIA V100", "fp16", None)],
)
def test_bf16_needs_a_card_that_has_it(
    layered: Layered, machine: Machine, name: str, dtype: str, severity: str | None
) -> None:
    plan = build_plan(layered({"precision": {"dtype": dtype}}), machine(1, name)).plan
    assert [notice.severity for notice in plan.notices] == ([severity] if severity else [])


@pytest.mark.parametrize(
    ("precision", "words", "remedy"),
    [
        ({"dtype": "bf16"}, "bf16 requires compute capability 8.0; NVIDIA V100 has 7.0", "set precision to fp16"),
        ({"dtype": "fp16", "eval": "bf16"}, "precision.eval bf16 requires", "set precision.eval to same"),
        ({"tf32": True}, "tf32 requires compute capability 8.0; NVIDIA V100 has 7.0", "leave precision.tf32 out"),
    ],
)
def test_one_old_card_among_new_ones_blocks_the_formats_of_ampere(
    layered: Layered, machine: Machine, precision: dict[str, Any], words: str, remedy: str
) -> None:
    facts = machine(2, "NVIDIA A100", "NVIDIA V100")
    recipe = {"precision": precision, "strategy": {"kind": "ddp"}}
    (found,) = [each for each in build_plan(layered(recipe), facts).plan.notices if each.severity == "blocker"]
    assert words in found.what
    assert found.hint == remedy
    assert not build_plan(layered({"precision": precision}), machine(1)).plan.notices


def test_bf16_weights_under_an_optimizer_that_loses_small_updates_are_warned_of(
    layered: Layered, machine: Machine
) -> None:
    def warnings(name: str) -> list[str]:
        recipe = {"precision": {"dtype": "bf16", "weights": "bf16"}, "optimizer": {"name": name}}
        notices = build_plan(layered(recipe), machine(1)).plan.notices
        return [notice.hint for notice in notices if notice.severity == "warning"]

    assert warnings("adamw_anyprecision") == []
    (hint,) = warnings("adamw_torch")
    assert "adamw_anyprecision" in hint


@pytest.mark.parametrize(
    ("gpus", "dtype"),
    [((0,), "fp32"), ((1, "NVIDIA A100"), "bf16"), ((1, "NVIDIA V100"), "fp16"), ((1, "Tesla P100"), "fp32")],
)
def test_auto_precision_is_what_every_card_is_fast_at(
    layered: Layered, machine: Machine, gpus: tuple[Any, ...], dtype: str
) -> None:
    planned = build_plan(layered({"precision": {"dtype": "auto"}}), machine(*gpus))
    (settings,) = planned.plan.files
    assert f'"dtype": "{dtype}"' in settings.content
