"""How the ranks' environment differs from the caller's, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from trainkit.errors import RecipeError
from trainkit.launch_plan.model import Plan
from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan
from trainkit.planner.env import DECIDED, LEAKS
from trainkit.recipe.resolved import Resolved

Layered = Callable[..., Resolved]
Machine = Callable[..., Facts]


def variables(plan: Plan) -> dict[str, str]:
    return {name: str(value) for name, value in plan.environment.set}


@pytest.mark.parametrize(
    ("cluster", "threads"),
    [
        ({"kind": "slurm"}, "1"),  # a processor for each process is asked for
        ({"kind": "slurm", "cpus_per_node": 10}, "5"),
        ({"kind": "slurm", "machine": "8xh100"}, "2"),  # of 16, with two of eight cards
        ({"kind": "ssh", "hosts": ["a"]}, "8"),  # all of the machine's
    ],
)
def test_the_ranks_share_the_processors_that_their_job_asks_for(
    layered: Layered, machine: Machine, cluster: dict[str, Any], threads: str
) -> None:
    recipe = {"strategy": {"kind": "ddp"}, "nodes": {"processes_per_node": 2}, "cluster": cluster}
    assert variables(build_plan(layered(recipe), machine(8)).plan)["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize(
    ("recipe", "gpus", "cores", "threads"),
    [
        ({}, 1, 224, "16"),
        ({}, 1, 12, "12"),
        ({}, 0, 224, "224"),
        ({"strategy": {"kind": "ddp"}, "devices": {"select": 8}}, 8, 224, "16"),
        ({"strategy": {"kind": "ddp"}, "devices": {"select": 8}}, 8, 64, "8"),
        ({"program": {"kind": "torch", "script": "t.py"}}, 1, 224, "16"),
        ({"strategy": {"kind": "fsdp", "offload": True}}, 1, 224, "224"),
        ({"strategy": {"kind": "zero2", "offload_optimizer": "cpu"}}, 1, 224, "224"),
        ({"strategy": {"kind": "zero2"}}, 1, 224, "16"),
    ],
)
def test_threads_on_cards_are_few_unless_the_cpu_updates_the_weights(
    layered: Layered, machine: Machine, recipe: dict[str, Any], gpus: int, cores: int, threads: str
) -> None:
    one = {"devices": {"select": gpus}} if gpus == 1 else {}
    planned = build_plan(layered({**one, **recipe}), machine(gpus, cores=cores))
    assert variables(planned.plan)["OMP_NUM_THREADS"] == threads
    capped = "at most 16 on GPUs" in planned.provenance.rules["environment.OMP_NUM_THREADS"]
    assert capped == (threads == "16")


GROWING = "expandable_segments:True"
VIRTUAL = "NVIDIA A40-48C"


@pytest.mark.parametrize(
    ("recipe", "cards", "facts", "expected"),
    [
        ({}, ("NVIDIA A100",), {}, GROWING),
        ({}, ("NVIDIA A100-SXM4-80GB",), {}, GROWING),
        ({"strategy": {"kind": "zero3"}}, ("NVIDIA V100", "NVIDIA A100"), {}, GROWING),
        ({}, (), {}, None),
        ({"devices": {"type": "cpu"}}, ("NVIDIA A100",), {}, None),
        ({}, ("Tesla P100",), {}, None),
        ({}, (VIRTUAL,), {}, None),
        ({}, ("NVIDIA A100",), {"kernel": "5.15.90.1-microsoft-standard-WSL2"}, None),
        ({}, ("NVIDIA A100",), {"allocator": "max_split_size_mb:512"}, None),
        ({}, ("NVIDIA A100",), {"allocator": ""}, None),
        ({"env": {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}}, ("NVIDIA A100",), {}, None),
        ({"env_from": ["PYTORCH_CUDA_ALLOC_CONF"]}, ("NVIDIA A100",), {}, None),
        ({"env": {"PYTORCH_CUDA_ALLOC_CONF": "a:1"}}, ("NVIDIA A100",), {}, "a:1"),
        ({"efficiency": {"compile": {"enabled": True}}}, ("NVIDIA A100",), {}, GROWING),
        ({"efficiency": {"compile": {"enabled": True, "mode": "reduce-overhead"}}}, ("NVIDIA A100",), {}, None),
        ({"program": {"kind": "torch", "script": "t.py"}}, ("NVIDIA A100",), {}, None),
        (
            {"container": {"kind": "podman", "image": "i", "packages": {"torch": "2.13.0"}}},
            ("NVIDIA A100",),
            {"allocator": "max_split_size_mb:512"},  # which does not go into the container
            GROWING,
        ),
    ],
)
def test_the_allocator_grows_its_segments_where_that_works_and_nobody_says_otherwise(
    layered: Layered,
    machine: Machine,
    recipe: dict[str, Any],
    cards: tuple[str, ...],
    facts: dict[str, Any],
    expected: str | None,
) -> None:
    plan = build_plan(layered(recipe), machine(len(cards), *cards, **facts)).plan
    assert variables(plan).get("PYTORCH_CUDA_ALLOC_CONF") == expected


def test_what_the_recipe_sets_reaches_the_ranks_word_for_word(layered: Layered, machine: Machine) -> None:
    plan = build_plan(layered({"env": {"NCCL_DEBUG": "WARN", "N": 3, "ODD": "a $b 'c'\n"}}), machine()).plan
    assert variables(plan).items() >= {"NCCL_DEBUG": "WARN", "N": "3", "ODD": "a $b 'c'\n"}.items()


def test_the_recipe_may_choose_its_own_number_of_threads(layered: Layered, machine: Machine) -> None:
    assert variables(build_plan(layered({"env": {"OMP_NUM_THREADS": 3}}), machine()).plan)["OMP_NUM_THREADS"] == "3"


def test_secrets_are_taken_by_name_and_their_value_is_not_in_the_plan(layered: Layered, machine: Machine) -> None:
    plan = build_plan(layered({"env_from": ["HF_TOKEN", "A_KEY"]}), machine()).plan
    assert plan.environment.take == ("A_KEY", "HF_TOKEN")
    assert "HF_TOKEN" not in variables(plan)


def test_the_diff_is_sorted_and_names_every_leak(layered: Layered, machine: Machine) -> None:
    diff = build_plan(layered({"env": {"Z": "1", "A": "1"}}), machine()).plan.environment
    assert [name for name, _ in diff.set] == sorted(name for name, _ in diff.set)
    assert diff.unset == tuple(sorted(LEAKS))
    assert {"PET_*", "RANK", "MASTER_ADDR", "TORCHELASTIC_*", "ACCELERATE_*", "FSDP_*"} <= set(diff.unset)


@pytest.mark.parametrize("section", ["env", "env_from"])
@pytest.mark.parametrize("name", sorted(DECIDED))
def test_a_variable_that_the_plan_decides_cannot_be_set_beside_it(
    layered: Layered, machine: Machine, section: str, name: str
) -> None:
    recipe: dict[str, Any] = {"env": {name: "1"}} if section == "env" else {"env_from": [name]}
    with pytest.raises(RecipeError) as caught:
        build_plan(layered(recipe), machine())
    assert name in caught.value.diagnostics[0].what
    assert caught.value.diagnostics[0].hint == DECIDED[name]
    assert caught.value.diagnostics[0].origin is not None


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (
            {"launcher": {"kind": "python"}},
            {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "<port>"},
        ),
        ({"launcher": {"kind": "accelerate"}}, {"RANK": "0", "WORLD_SIZE": "1", "ACCELERATE_USE_CPU": "True"}),
        (
            {"launcher": {"kind": "accelerate"}, "strategy": {"kind": "ddp"}},
            {"ACCELERATE_USE_CPU": "True", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "35"},
        ),
        (
            {"launcher": {"kind": "deepspeed"}, "strategy": {"kind": "ddp"}},
            {"DS_ACCELERATOR": "cpu", "LOCAL_WORLD_SIZE": "2"},
        ),
        ({"strategy": {"kind": "zero1"}}, {"DS_ACCELERATOR": "cpu"}),
    ],
)
def test_each_launcher_gets_the_variables_that_it_needs(
    layered: Layered, machine: Machine, recipe: dict[str, Any], expected: dict[str, str]
) -> None:
    assert variables(build_plan(layered(recipe), machine()).plan).items() >= expected.items()


def test_what_the_recipe_takes_from_the_caller_the_plan_does_not_set(layered: Layered, machine: Machine) -> None:
    plan = build_plan(layered({"env_from": ["OMP_NUM_THREADS"]}), machine()).plan
    assert plan.environment.take == ("OMP_NUM_THREADS",)
    assert "OMP_NUM_THREADS" not in variables(plan)


def test_several_ranks_are_numbered_by_their_launcher_alone(layered: Layered, machine: Machine) -> None:
    for launcher in ("torchrun", "accelerate", "deepspeed"):
        recipe = {"strategy": {"kind": "ddp"}, "launcher": {"kind": launcher}}
        assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} & set(variables(build_plan(layered(recipe), machine()).plan))


@pytest.mark.parametrize(
    ("recipe", "gpus", "expected"),
    [
        ({"train": {"deterministic": True}}, 1, ":4096:8"),
        ({"train": {"deterministic": True}, "env": {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}}, 1, ":16:8"),
        ({"train": {"deterministic": True}}, 0, None),
        ({}, 1, None),
    ],
)
def test_cublas_is_told_before_it_starts_to_be_deterministic(
    layered: Layered, machine: Machine, recipe: dict[str, Any], gpus: int, expected: str | None
) -> None:
    found = dict(build_plan(layered(recipe), machine(gpus)).plan.environment.set)
    assert (str(found["CUBLAS_WORKSPACE_CONFIG"]) if expected else found.get("CUBLAS_WORKSPACE_CONFIG")) == expected


@pytest.mark.parametrize(
    ("launcher", "name", "value"),
    [("torchrun", "ROLE_NAME", "mine"), ("accelerate", "ACCELERATE_DYNAMO_MODE", "max-autotune")],
)
def test_a_variable_that_the_launcher_would_overwrite_is_an_error_and_under_another_launcher_it_arrives(
    layered: Layered, machine: Machine, launcher: str, name: str, value: str
) -> None:
    recipe = {"strategy": {"kind": "ddp"}, "env": {name: value}}
    with pytest.raises(RecipeError) as caught:
        build_plan(layered(recipe, {"launcher": {"kind": launcher}}), machine())
    (found,) = caught.value.diagnostics
    assert f"env names {name}, which launcher {launcher} sets to" in found.what
    assert (found.key, found.origin and found.origin.source) == (f"env.{name}", "layer0.yaml")
    other = build_plan(layered(recipe, {"launcher": {"kind": "deepspeed"}}), machine()).plan
    assert variables(other)[name] == value


def test_a_variable_that_the_launcher_leaves_alone_may_be_given(layered: Layered, machine: Machine) -> None:
    recipe = {"strategy": {"kind": "ddp"}, "env": {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}}
    plan = build_plan(layered(recipe), machine()).plan
    assert variables(plan)["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in dict(plan.environment.added)


@pytest.mark.parametrize(
    ("cards", "driver", "wanted"),
    [
        (("NVIDIA GeForce RTX 4090",), "535.183.01", "1"),
        (("NVIDIA GeForce RTX 4090",), "550.54.15", None),  # this driver knows what the card lacks
        (("NVIDIA A100",), "535.183.01", None),
    ],
)
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_cards_without_direct_links_are_not_asked_for_them_whatever_launches(
    layered: Layered, machine: Machine, launcher: str, cards: tuple[str, ...], driver: str, wanted: str | None
) -> None:
    program = {"kind": "accelerate", "script": "train.py"}
    recipe = {"program": program, "strategy": {"kind": "ddp"}, "launcher": {"kind": launcher}}
    found = variables(build_plan(layered(recipe), machine(2, *cards, driver=driver)).plan)
    assert (found.get("NCCL_P2P_DISABLE"), found.get("NCCL_IB_DISABLE")) == (wanted, wanted)
