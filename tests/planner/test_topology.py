"""Which device, how many ranks, which rank on which card: on machines with none, one, two and eight cards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from trainkit.errors import RecipeError
from trainkit.launch_plan.model import Choice, Plan
from trainkit.launch_plan.render.table import render
from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan
from trainkit.recipe.resolved import Resolved

Layered = Callable[..., Resolved]
Machine = Callable[..., Facts]


def variable(plan: Plan, name: str) -> str | None:
    return {key: str(value) for key, value in plan.environment.set}.get(name)


def blockers(plan: Plan) -> list[str]:
    return [notice.what for notice in plan.notices if notice.severity == "blocker"]


@pytest.mark.parametrize(
    ("gpus", "strategy", "device", "ranks"),
    [
        (0, "single", "cpu", 1),
        (0, "ddp", "cpu", 2),
        (1, "single", "cuda", 1),
        (1, "ddp", "cuda", 1),
        (2, "single", "cuda", 1),
        (2, "fsdp", "cuda", 2),
        (8, "zero3", "cuda", 8),
        (8, "single", "cuda", 1),
    ],
)
def test_auto_takes_what_the_machine_has(
    layered: Layered, machine: Machine, gpus: int, strategy: str, device: str, ranks: int
) -> None:
    plan = build_plan(layered({"strategy": {"kind": strategy}}), machine(gpus)).plan
    assert (plan.topology.device, plan.topology.world_size) == (device, ranks)
    assert blockers(plan) == []


def test_one_process_on_a_machine_of_eight_cards_sees_exactly_one(layered: Layered, machine: Machine) -> None:
    facts = machine(8)
    plan = build_plan(layered({}), facts).plan
    assert variable(plan, "CUDA_VISIBLE_DEVICES") == facts.gpus[0].uuid


def test_apple_silicon_is_taken_when_there_is_no_cuda_card(layered: Layered, machine: Machine) -> None:
    plan = build_plan(layered({}), machine(0, mps=True)).plan
    assert (plan.topology.device, plan.topology.world_size) == ("mps", 1)


def test_the_order_of_a_list_is_the_order_of_ranks(layered: Layered, machine: Machine) -> None:
    facts = machine(4)
    plan = build_plan(layered({"strategy": {"kind": "ddp"}, "devices": {"select": [2, 0]}}), facts).plan
    assert plan.topology.groups[0].devices == (facts.gpus[2].uuid, facts.gpus[0].uuid)
    assert variable(plan, "CUDA_VISIBLE_DEVICES") == f"{facts.gpus[2].uuid},{facts.gpus[0].uuid}"


OWN = {"program": {"kind": "torch", "script": "t.py"}}


@pytest.mark.parametrize(
    ("recipe", "processes", "cards"),
    [
        ({"devices": {"select": [2, 0]}}, 1, (2, 0)),
        ({"devices": {"select": "all"}}, 1, (0, 1, 2, 3)),
        ({"devices": {"select": 2}}, 1, (0, 1)),
        ({}, 1, (0,)),
        ({"devices": {"select": [3, 1]}, "nodes": {"processes_per_node": 1}, "strategy": {"kind": "ddp"}}, 1, (3, 1)),
        ({"devices": {"select": 4}, "nodes": {"processes_per_node": 2}, "strategy": {"kind": "ddp"}}, 2, (0, 1, 2, 3)),
        ({"devices": {"select": [3, 1]}, "strategy": {"kind": "ddp"}}, 2, (3, 1)),
    ],
)
def test_processes_of_an_own_program_may_see_more_cards_than_one(
    layered: Layered, machine: Machine, recipe: dict[str, Any], processes: int, cards: tuple[int, ...]
) -> None:
    facts = machine(4)
    plan = build_plan(layered(OWN, recipe), facts).plan
    uuids = tuple(facts.gpus[index].uuid for index in cards)
    assert (plan.topology.groups[0].processes, plan.topology.groups[0].devices) == (processes, uuids)
    assert variable(plan, "CUDA_VISIBLE_DEVICES") == ",".join(uuids)
    assert [card.index for card in plan.cards] == list(cards)  # which the run locks
    seen = [notice.what for notice in plan.notices if f"{len(cards)} GPUs" in notice.what]
    assert bool(seen) == (len(cards) > processes)
    page = render(plan)
    assert (f"sees GPU {cards[-1]}" in page) == (len(cards) > processes)


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        ({"devices": {"select": [0, 1]}, "launcher": {"kind": "deepspeed"}}, "a process for each GPU"),
        (
            {"devices": {"select": [0, 1]}, "nodes": {"processes_per_node": 3}, "strategy": {"kind": "ddp"}},
            "of its own",
        ),
    ],
)
def test_who_cannot_be_shown_several_cards_is_refused(
    layered: Layered, machine: Machine, recipe: dict[str, Any], why: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        build_plan(layered(OWN, recipe), machine(4))
    assert why in caught.value.diagnostics[0].why


def test_the_built_in_trainer_computes_on_one_card_for_each_process(layered: Layered, machine: Machine) -> None:
    with pytest.raises(RecipeError, match="strategy single"):
        build_plan(layered({"devices": {"select": [0, 1]}}), machine(4))


@pytest.mark.parametrize(("kind", "cards"), [("single", 1), ("single", 2), ("ddp", 1)])
def test_one_process_of_a_plain_program_has_no_rank_unless_it_forms_a_group(
    layered: Layered, machine: Machine, kind: str, cards: int
) -> None:
    recipe = {"strategy": {"kind": kind}, "devices": {"select": cards}}
    names = {name for name, _ in build_plan(layered(OWN, recipe), machine(4)).plan.environment.set}
    there = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} & names
    assert there == (set() if kind == "single" else {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})


def test_a_prefix_of_a_uuid_names_its_card(layered: Layered, machine: Machine) -> None:
    facts = machine(4)
    plan = build_plan(layered({"devices": {"select": ["GPU-3"]}}), facts).plan
    assert plan.topology.groups[0].devices == (facts.gpus[3].uuid,)


@pytest.mark.parametrize(
    ("visible", "select", "indices"),
    [
        ("2,3", "auto", (2, 3)),
        ("3,1", "auto", (3, 1)),
        ("2,3", 1, (2,)),
        ("2,3", [3], (3,)),
        ("GPU-5,6", "all", (5, 6)),
        ("1,99,2", "auto", (1,)),  # CUDA: an invalid entry hides all that follow
    ],
)
def test_cards_are_chosen_inside_the_callers_allocation_and_keep_their_numbers(
    layered: Layered, machine: Machine, visible: str, select: Any, indices: tuple[int, ...]
) -> None:
    facts = machine(8, visible=visible)
    plan = build_plan(layered({"strategy": {"kind": "ddp"}, "devices": {"select": select}}), facts).plan
    assert plan.topology.groups[0].devices == tuple(facts.gpus[index].uuid for index in indices)
    assert any(visible in notice.what for notice in plan.notices)


@pytest.mark.parametrize(
    ("visible", "entry"), [("1,99,2", "99"), ("1,GPU-,2", "GPU-"), ("1,0,-1,2", ""), ("1,", ""), ("2,1", "")]
)
def test_an_entry_that_hides_the_cards_behind_it_is_named(
    layered: Layered, machine: Machine, visible: str, entry: str
) -> None:
    plan = build_plan(layered({}), machine(3, visible=visible)).plan
    told = [each.what for each in plan.notices if each.severity == "warning"]
    words = f"`{entry}` in CUDA_VISIBLE_DEVICES={visible} matches no single GPU; CUDA ignores it and all later entries"
    assert told == ([words] if entry else [])


@pytest.mark.parametrize(("select", "told"), [("all", ["the run uses the CPU: there is no GPU here"]), ("auto", [])])
def test_all_of_no_cards_is_not_the_cpu_without_a_word(
    layered: Layered, machine: Machine, select: str, told: list[str]
) -> None:
    plan = build_plan(layered({"devices": {"select": select}}), machine(0)).plan
    assert plan.topology.device == "cpu"
    assert [each.what for each in plan.notices if each.severity == "warning"] == told


@pytest.mark.parametrize("name", [-1, "", " "])
def test_what_can_name_no_card_is_an_error_in_the_recipe(layered: Layered, machine: Machine, name: int | str) -> None:
    with pytest.raises(RecipeError, match="which no GPU can be"):
        build_plan(layered({"devices": {"select": [name]}}), machine(2))


@pytest.mark.parametrize(("gpus", "waiting"), [(0, False), (1, True)])
def test_only_who_asks_for_a_card_that_may_become_free_is_told_to_wait(
    layered: Layered, machine: Machine, gpus: int, waiting: bool
) -> None:
    recipe = {"strategy": {"kind": "ddp"}, "devices": {"select": "free"}, "nodes": {"processes_per_node": 2}}
    (blocker,) = (
        each for each in build_plan(layered(recipe), machine(gpus)).plan.notices if each.severity == "blocker"
    )
    assert ("`trainkit run --wait` waits" in blocker.hint) == waiting


@pytest.mark.parametrize(
    ("gpus", "devices", "device", "reason"),
    [
        (0, {}, "cpu", "there is no GPU here"),
        (1, {}, "cuda", "1 GPU can be used here"),
        (2, {"type": "cpu"}, "cpu", "devices.type is cpu"),
        (2, {"select": [1]}, "cuda", "devices.select requests GPUs"),
    ],
)
def test_a_plan_says_why_it_runs_on_its_device(
    layered: Layered, machine: Machine, gpus: int, devices: dict[str, Any], device: str, reason: str
) -> None:
    plan = build_plan(layered({"devices": devices}), machine(gpus)).plan
    assert plan.device == Choice(device, reason)
    assert f"  device    {device:<11} {reason}" in render(plan).splitlines()


@pytest.mark.parametrize("visible", ["", "-1", "0,0", "NoDevFiles"])
def test_an_allocation_that_hides_every_card_gives_the_cpu(layered: Layered, machine: Machine, visible: str) -> None:
    plan = build_plan(layered({}), machine(2, visible=visible)).plan
    assert plan.topology.device == "cpu"
    assert variable(plan, "CUDA_VISIBLE_DEVICES") == ""
    told = {(each.severity, each.what) for each in plan.notices}
    severity = "warning" if visible else "note"
    assert (severity, f"the run uses the CPU: CUDA_VISIBLE_DEVICES={visible} hides every GPU") in told


@pytest.mark.parametrize(
    ("select", "gpus", "words"),
    [
        (4, 2, "4 GPUs are requested, 2 available"),
        ([0, 7], 2, "there is no GPU `7` here"),
        (["GPU-f"], 2, "there is no GPU `GPU-f` here"),
        (["GPU-"], 2, "`GPU-` names 2 GPUs"),
        (1, 0, "1 GPU is requested, 0 available"),
    ],
)
def test_cards_that_are_not_there_block_the_run_and_the_plan_can_still_be_read(
    layered: Layered, machine: Machine, select: Any, gpus: int, words: str
) -> None:
    plan = build_plan(layered({"strategy": {"kind": "ddp"}, "devices": {"select": select}}), machine(gpus)).plan
    assert any(words in what for what in blockers(plan))
    assert plan.topology.device == "cuda"
    assert plan.topology.world_size == (select if isinstance(select, int) else len(select))


def test_a_card_outside_the_allocation_is_refused_by_name(layered: Layered, machine: Machine) -> None:
    plan = build_plan(layered({"devices": {"select": [0]}}), machine(4, visible="2,3")).plan
    assert any("GPU `0` is outside CUDA_VISIBLE_DEVICES=2,3" in what for what in blockers(plan))


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ({"devices": {"select": [1, 1]}}, "names GPU `1` twice"),
        ({"devices": {"select": [1, "GPU-1"]}}, "names GPU `GPU-1` twice"),
        ({"devices": {"select": []}}, "empty list"),
        ({"devices": {"type": "cuda", "select": "none"}}, "devices.select is none"),
        ({"devices": {"type": "cpu", "select": [0]}}, "the run uses cpu"),
        ({"devices": {"select": 4}, "nodes": {"processes_per_node": 2}}, "4 GPUs are selected for 2 processes"),
        ({"devices": {"select": ["GPU-1"]}, "nodes": {"count": 2, "processes_per_node": 1}}, "the run has 2 nodes"),
    ],
)
def test_a_selection_that_is_wrong_on_any_machine_is_an_error_at_its_place(
    layered: Layered, machine: Machine, recipe: dict[str, Any], words: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        build_plan(layered({"strategy": {"kind": "ddp"}}, recipe), machine(8))
    (diagnostic,) = caught.value.diagnostics
    assert words in diagnostic.what
    assert diagnostic.hint
    assert diagnostic.origin is not None
    assert diagnostic.origin.source == "layer1.yaml"


@pytest.mark.parametrize(
    ("strategy", "launcher", "nodes", "named_by"),
    [
        ("ddp", "torchrun", 1, "uuid"),
        ("ddp", "accelerate", 1, "uuid"),
        ("fsdp", "torchrun", 2, "index"),  # other nodes have other UUIDs
        ("ddp", "deepspeed", 1, "index"),  # its launcher crashes on UUIDs
        ("zero2", "torchrun", 1, "index"),  # its runtime reads integers
    ],
)
def test_cards_are_named_as_is_sound_for_who_reads_them(
    layered: Layered, machine: Machine, strategy: str, launcher: str, nodes: int, named_by: str
) -> None:
    facts = machine(8, visible="4,6")
    recipe = {"strategy": {"kind": strategy}, "launcher": {"kind": launcher}, "nodes": {"count": nodes}}
    plan = build_plan(layered(recipe), facts).plan
    expected = {"uuid": f"{facts.gpus[4].uuid},{facts.gpus[6].uuid}", "index": "4,6"}[named_by]
    assert variable(plan, "CUDA_VISIBLE_DEVICES") == expected
    assert variable(plan, "CUDA_DEVICE_ORDER") == "PCI_BUS_ID"


def test_the_deepspeed_launcher_is_told_the_cards_by_number(layered: Layered, machine: Machine) -> None:
    recipe = {"strategy": {"kind": "zero1"}, "launcher": {"kind": "deepspeed"}}
    plan = build_plan(layered(recipe), machine(8, visible="4,6")).plan
    assert "--include=localhost:4,6" in [str(word) for word in plan.commands[0].argv]


def test_mixed_cards_are_remarked_on(layered: Layered, machine: Machine) -> None:
    facts = machine(2, "NVIDIA V100", "NVIDIA A100")
    plan = build_plan(layered({"strategy": {"kind": "ddp"}}), facts).plan
    assert any("NVIDIA A100, NVIDIA V100" in notice.what for notice in plan.notices if notice.severity == "warning")


def test_fastest_first_puts_the_faster_card_on_rank_0(layered: Layered, machine: Machine) -> None:
    facts = machine(2, "NVIDIA V100", "NVIDIA A100")
    plan = build_plan(layered({"devices": {"order": "fastest"}}), facts).plan
    assert plan.topology.groups[0].devices == (facts.gpus[1].uuid,)
    assert variable(plan, "CUDA_DEVICE_ORDER") == "FASTEST_FIRST"


def test_a_cpu_run_on_a_machine_with_cards_hides_them(layered: Layered, machine: Machine) -> None:
    plan = build_plan(layered({"devices": {"type": "cpu"}}), machine(2)).plan
    assert variable(plan, "CUDA_VISIBLE_DEVICES") == ""


@pytest.mark.parametrize(("cores", "ranks", "threads"), [(16, 2, "8"), (3, 2, "1"), (1, 4, "1"), (2, 1, "2")])
def test_threads_are_the_cores_shared_by_the_ranks(
    layered: Layered, machine: Machine, cores: int, ranks: int, threads: str
) -> None:
    recipe = {"strategy": {"kind": "ddp"}, "nodes": {"processes_per_node": ranks}}
    plan = build_plan(layered(recipe), machine(0, cores=cores)).plan
    assert variable(plan, "OMP_NUM_THREADS") == threads


def test_a_plan_for_thousands_of_nodes_is_as_large_as_one_for_two(layered: Layered, machine: Machine) -> None:
    def plan(nodes: int) -> Plan:
        where = {"count": nodes, "rendezvous": "node0:29400"}
        return build_plan(layered({"strategy": {"kind": "fsdp"}, "nodes": where}), machine(8)).plan

    few, many = plan(2), plan(4096)
    assert (many.topology.nodes, many.topology.world_size) == (4096, 32768)
    assert len(many.topology.groups) == len(few.topology.groups) == 1
    assert len(many.topology.groups[0].devices) == 8
    assert len(many.commands) == len(few.commands) == 1
    assert len(many.commands[0].argv) == len(few.commands[0].argv)
    assert len(repr(many)) - len(repr(few)) < 100


@pytest.mark.parametrize(("cards", "ranks"), [(0, 1), (2, 2)])
def test_a_program_for_which_its_launcher_counts_cards_is_one_process_where_there_are_none(
    layered: Layered, machine: Machine, cards: int, ranks: int
) -> None:
    # As `accelerate launch train.py` and `deepspeed train.py` are without a number.
    recipe = {"program": {"kind": "torch", "script": "train.py"}, "devices": {"select": "all"}}
    plan = build_plan(layered(recipe, {"strategy": {"kind": "ddp"}}), machine(cards)).plan
    assert plan.topology.world_size == ranks
