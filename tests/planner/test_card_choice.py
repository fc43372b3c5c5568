"""Which physical card becomes which rank: mixed, split, busy and foreign cards, under every launcher, in the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from trainkit.errors import RecipeError
from trainkit.launch_plan.model import Plan
from trainkit.machine.facts import Allocation, Facts, Gpu, GpuProcess, Hold, MigInstance, NumaNode
from trainkit.planner.build import build_plan
from trainkit.recipe.resolved import Resolved

Layered = Callable[..., Resolved]
Machine = Callable[..., Facts]
GIGABYTE = 1024**3
LAUNCHERS = ("python", "torchrun", "accelerate", "deepspeed")


def variable(plan: Plan, name: str) -> str | None:
    return {key: str(value) for key, value in plan.environment.set}.get(name)


def said(plan: Plan, severity: str) -> str:
    return " ".join(f"{each.what} {each.hint}" for each in plan.notices if each.severity == severity)


def with_cards(facts: Facts, changes: Mapping[int, Mapping[str, Any]], **more: Any) -> Facts:
    """The machine with some of its cards changed."""
    return replace(facts, gpus=tuple(replace(gpu, **changes.get(gpu.index, {})) for gpu in facts.gpus), **more)


def seen(plan: Plan, facts: Facts) -> tuple[str, ...]:
    """The UUIDs that CUDA gives the ranks of a plan, in rank order, worked out from what the ranks are started with.

    The deepspeed launcher writes the variable anew: the numbers behind --include, sorted.
    """
    words = [str(word) for word in plan.commands[0].launcher]
    include = [word.partition("localhost:")[2] for word in words if word.startswith("--include=")]
    visible = ",".join(sorted(include[0].split(","), key=int)) if include else variable(plan, "CUDA_VISIBLE_DEVICES")
    assert visible
    order = variable(plan, "CUDA_DEVICE_ORDER")
    named = [entry.isdecimal() for entry in visible.split(",")]
    assert all(named) or not any(named)
    if all(named):
        assert order == "PCI_BUS_ID", "numbers mean a card only in this order"
        return tuple(next(gpu.uuid for gpu in facts.gpus if gpu.index == int(entry)) for entry in visible.split(","))
    return tuple(visible.split(","))


BUSY = {"memory_free": 40 * GIGABYTE, "processes": (GpuProcess(4711, "ada", "python other.py", 40 * GIGABYTE),)}
FAST = {"cores": 6912, "clock_limit": 1410}
SLOW = {"cores": 2560, "clock_limit": 1590}
SPEEDS = {0: SLOW, 1: FAST, 2: SLOW, 3: FAST}
SELECTIONS: list[tuple[Any, str, str | None, str | None, list[int]]] = [
    # select, order, the caller's CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER, physical cards in rank order
    ("all", "pci", None, None, [0, 1, 2, 3]),
    (2, "pci", None, None, [0, 1]),
    ([1, 3], "pci", None, None, [1, 3]),
    ([2, 0], "pci", None, None, [2, 0]),
    (["GPU-3", "GPU-1"], "pci", None, None, [3, 1]),
    ("all", "fastest", None, None, [1, 3, 0, 2]),
    (2, "fastest", None, None, [1, 3]),
    ([0, 2], "fastest", None, None, [1, 0]),
    ("all", "pci", "3,2", "PCI_BUS_ID", [3, 2]),
    ("all", "pci", "0,1", "FASTEST_FIRST", [1, 3]),
    (1, "pci", "2,3", None, [2]),
    ([3], "pci", "2,3", None, [3]),
    ("all", "pci", "GPU-2,GPU-0", None, [2, 0]),
    ("free", "pci", "1,2,3", None, [1, 2, 3]),
    ("all", "fastest", "0,1", "PCI_BUS_ID", [1, 0]),
]


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(("select", "order", "visible", "told", "cards"), SELECTIONS)
def test_a_selection_means_the_same_physical_cards_under_every_launcher(
    layered: Layered,
    machine: Machine,
    launcher: str,
    strategy: str,
    select: Any,
    order: str,
    visible: str | None,
    told: str | None,
    cards: list[int],
) -> None:
    facts = with_cards(machine(4), SPEEDS, visible_devices=visible, device_order=told)
    recipe = {"strategy": {"kind": strategy}, "devices": {"type": "cuda", "select": select, "order": order}}
    layers = layered(recipe, {"launcher": {"kind": launcher}})
    if launcher == "python" and len(cards) > 1:
        with pytest.raises(RecipeError, match="unsupported combination"):
            build_plan(layers, facts)
        return
    if launcher == "deepspeed" and cards != sorted(cards):
        with pytest.raises(RecipeError) as caught:
            build_plan(layers, facts)
        assert "sorts the GPUs" in caught.value.diagnostics[0].why
        return
    plan = build_plan(layers, facts).plan
    wanted = tuple(facts.gpus[index].uuid for index in cards)
    assert seen(plan, facts) == wanted
    assert tuple(card.uuid for card in plan.cards) == wanted
    assert [card.index for card in plan.cards] == cards


def test_idle_cards_come_first_and_then_those_with_the_most_free_memory(layered: Layered, machine: Machine) -> None:
    small = GpuProcess(9, "ada", "python shell.py", 100 << 20)
    changes: dict[int, dict[str, Any]] = {
        0: {**BUSY},
        1: {"memory_free": 79 * GIGABYTE + 800 * 2**20},
        2: {"processes": (small,)},
        3: {"memory_free": 79 * GIGABYTE + 900 * 2**20},
    }
    facts = with_cards(machine(4), changes)
    plan = build_plan(layered({"strategy": {"kind": "ddp"}, "devices": {"select": "free"}}), facts).plan
    assert [card.index for card in plan.cards] == [3, 1, 2]
    assert "is busy" not in said(plan, "blocker")


@pytest.mark.parametrize(("count", "cards"), [("auto", [1]), (1, [1])])
def test_a_single_process_takes_one_free_card(
    layered: Layered, machine: Machine, count: int | str, cards: list[int]
) -> None:
    recipe = {"devices": {"select": "free"}, "nodes": {"processes_per_node": count}}
    plan = build_plan(layered(recipe), with_cards(machine(2), {0: BUSY})).plan
    assert [card.index for card in plan.cards] == cards


def test_too_few_free_cards_block_the_run_and_who_has_the_others_is_named(layered: Layered, machine: Machine) -> None:
    held = {"held_by": Hold(12, "bob", "/runs/b")}
    recipe = {"strategy": {"kind": "ddp"}, "devices": {"select": "free"}, "nodes": {"processes_per_node": 2}}
    plan = build_plan(layered(recipe), with_cards(machine(3), {0: BUSY, 2: held})).plan
    text = said(plan, "blocker")
    assert "2 idle GPUs are requested, 1 of 3 are free" in text
    assert "GPU 0 is busy: 40.0 GiB of 80 in use, pid 4711 (ada: python other.py)" in text
    assert "GPU 2 is busy: held by the trainkit run /runs/b (pid 12, bob)" in text


def test_free_cards_on_a_machine_without_any_block_the_run(layered: Layered, machine: Machine) -> None:
    plan = build_plan(layered({"devices": {"select": "free"}}), machine(0)).plan
    assert "1 idle GPU is requested, 0 of 0 are free" in said(plan, "blocker")


@pytest.mark.parametrize("select", ["auto", "all", 1, [0], ["GPU-0"]])
def test_a_busy_card_is_refused_with_who_is_on_it(layered: Layered, machine: Machine, select: Any) -> None:
    plan = build_plan(layered({"devices": {"select": select}}), with_cards(machine(1), {0: BUSY})).plan
    assert "GPU 0 is busy: 40.0 GiB of 80 in use, pid 4711 (ada: python other.py)" in said(plan, "blocker")


def test_a_run_may_start_beside_others_when_the_recipe_says_so(layered: Layered, machine: Machine) -> None:
    recipe = {"devices": {"select": [0], "when_busy": "warn"}}
    plan = build_plan(layered(recipe), with_cards(machine(1), {0: BUSY})).plan
    assert said(plan, "blocker") == ""
    assert "GPU 0 is busy" in said(plan, "warning")


def test_a_desktop_on_a_card_keeps_nobody_from_it(layered: Layered, machine: Machine) -> None:
    desktop = GpuProcess(800, "root", "Xorg", 3 * GIGABYTE, graphics=True)
    facts = with_cards(machine(1), {0: {"memory_free": 77 * GIGABYTE, "processes": (desktop,)}})
    assert said(build_plan(layered({"devices": {"select": [0]}}), facts).plan, "blocker") == ""


def test_memory_that_nobody_can_be_named_for_counts_too(layered: Layered, machine: Machine) -> None:
    """In a container the driver may not say whose it is."""
    facts = with_cards(machine(1), {0: {"memory_free": 70 * GIGABYTE}})
    assert "10.0 GiB of 80 in use" in said(build_plan(layered({}), facts).plan, "blocker")
    own = with_cards(machine(1), {0: {"memory_free": 70 * GIGABYTE, "memory_reserved": 10 * GIGABYTE}})
    assert said(build_plan(layered({}), own).plan, "blocker") == ""


def test_the_threshold_of_idleness_is_a_setting(layered: Layered, machine: Machine) -> None:
    facts = with_cards(machine(1), {0: {"memory_free": 78 * GIGABYTE}})
    assert "is busy" in said(build_plan(layered({}), facts).plan, "blocker")
    recipe = {"devices": {"idle_below": 4096}}
    assert said(build_plan(layered(recipe), facts).plan, "blocker") == ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"compute_mode": "prohibited"}, "is closed to computing"),
        ({"compute_mode": "exclusive", "processes": (GpuProcess(5, "eve", "a"),)}, "pid 5 (eve: a)"),
    ],
)
def test_a_card_that_takes_no_process_is_refused_whatever_the_recipe_says(
    layered: Layered, machine: Machine, change: dict[str, Any], words: str
) -> None:
    recipe = {"devices": {"when_busy": "warn"}}
    assert words in said(build_plan(layered(recipe), with_cards(machine(1), {0: change})).plan, "blocker")


def test_facts_from_elsewhere_say_nothing_of_now(layered: Layered, machine: Machine) -> None:
    plan = build_plan(layered({}), with_cards(machine(1), {0: BUSY}, origin="FACTS.json")).plan
    assert said(plan, "blocker") == ""
    assert "when the facts were taken: GPU 0 is busy" in said(plan, "note")


PARTS = tuple(MigInstance(f"MIG-{letter}", "1g.10gb", 10 * GIGABYTE, 10 * GIGABYTE) for letter in "ab")
SPLIT: dict[int, dict[str, Any]] = {1: {"mig": True, "instances": PARTS}}


@pytest.mark.parametrize("launcher", ["auto", "python", "accelerate", "torchrun"])
@pytest.mark.parametrize(("select", "uuid"), [(["MIG-b"], "MIG-b"), (["MIG-a"], "MIG-a"), (["GPU-0"], "GPU-0")])
def test_a_part_of_a_card_is_chosen_by_its_id(
    layered: Layered, machine: Machine, launcher: str, select: list[str], uuid: str
) -> None:
    facts = with_cards(machine(2), SPLIT)
    recipe = {"devices": {"select": select}, "launcher": {"kind": launcher}}
    plan = build_plan(layered(recipe), facts).plan
    assert (variable(plan, "CUDA_VISIBLE_DEVICES") or "").startswith(uuid)
    assert plan.cards[0].name.endswith("MIG 1g.10gb" if uuid.startswith("MIG") else "A100")


def test_a_split_card_cannot_be_had_whole(layered: Layered, machine: Machine) -> None:
    plan = build_plan(layered({"devices": {"select": [1]}}), with_cards(machine(2), SPLIT)).plan
    assert "GPU `1` is split by MIG; name one of its parts: MIG-a, MIG-b" in said(plan, "blocker")
    empty = with_cards(machine(2), {1: {"mig": True}})
    assert "into no parts" in said(build_plan(layered({"devices": {"select": [1]}}), empty).plan, "blocker")


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ({"strategy": {"kind": "ddp"}, "devices": {"select": ["MIG-a", "MIG-b"]}}, "NCCL takes two parts"),
        ({"launcher": {"kind": "deepspeed"}, "devices": {"select": ["MIG-a"]}}, "by number only"),
        ({"strategy": {"kind": "zero2"}, "devices": {"select": ["MIG-a"]}}, "as numbers"),
    ],
)
def test_what_cannot_work_on_parts_of_a_card_is_refused(
    layered: Layered, machine: Machine, recipe: dict[str, Any], words: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        build_plan(layered(recipe), with_cards(machine(2), SPLIT))
    assert any(words in each.why for each in caught.value.diagnostics)


def test_a_part_that_the_caller_was_given_is_what_the_run_gets(layered: Layered, machine: Machine) -> None:
    facts = with_cards(machine(2), SPLIT, visible_devices="MIG-b")
    assert variable(build_plan(layered({}), facts).plan, "CUDA_VISIBLE_DEVICES") == "MIG-b"


def test_the_slow_card_in_front_is_warned_of(layered: Layered, machine: Machine) -> None:
    facts = with_cards(machine(2), {0: {**SLOW, "name": "T4"}, 1: {**FAST, "name": "A100"}})
    assert "GPU 0 (T4) is slower than GPU 1 (A100)" in said(build_plan(layered({}), facts).plan, "warning")
    both = build_plan(layered({"strategy": {"kind": "ddp"}}), facts).plan
    assert "rank 0 is on the slower GPU 0 (T4)" in said(both, "warning")
    fastest = build_plan(layered({"devices": {"order": "fastest"}}), facts).plan
    assert said(fastest, "warning") == ""
    named = build_plan(layered({"devices": {"select": [0]}}), facts).plan
    assert said(named, "warning") == ""


def test_numbers_that_mean_different_cards_to_different_readers_are_warned_of(
    layered: Layered, machine: Machine
) -> None:
    facts = with_cards(machine(2), {0: {"name": "T4"}}, visible_devices="0")
    assert "CUDA alone would count" in said(build_plan(layered({}), facts).plan, "warning")
    for clear in (replace(facts, device_order="PCI_BUS_ID"), replace(facts, visible_devices="GPU-0")):
        assert "CUDA alone would count" not in said(build_plan(layered({}), clear).plan, "warning")


def test_an_exported_order_that_the_plan_replaces_is_named(layered: Layered, machine: Machine) -> None:
    facts = replace(machine(2), device_order="FASTEST_FIRST")
    asked = layered({"devices": {"order": "pci"}})
    assert "replaces CUDA_DEVICE_ORDER=FASTEST_FIRST" in said(build_plan(asked, facts).plan, "note")
    for obeyed in ("PCI_BUS_ID", "FASTEST_FIRST"):
        plan = build_plan(layered({}), replace(facts, device_order=obeyed)).plan
        assert "CUDA_DEVICE_ORDER" not in said(plan, "note")


OWN = {"program": {"kind": "torch", "script": "train.py"}, "strategy": {"kind": "ddp"}}


@pytest.mark.parametrize(
    ("recipe", "exported", "cards"),
    [
        ({}, None, [0]),
        ({}, "FASTEST_FIRST", [1]),
        ({}, "PCI_BUS_ID", [0]),
        ({"devices": {"select": [0]}}, None, [0]),
        ({"devices": {"select": [0]}}, "FASTEST_FIRST", [1]),
        ({**OWN, "devices": {"select": 2}}, None, [1, 3]),
        ({**OWN, "devices": {"select": 2}}, "PCI_BUS_ID", [0, 1]),
        ({**OWN, "devices": {"select": [2, 0]}}, None, [2, 0]),
        ({**OWN, "devices": {"select": 3}, "launcher": {"kind": "deepspeed"}}, None, [0, 1, 3]),
    ],
)
def test_cards_are_counted_as_the_caller_says_and_for_own_programs_as_cuda_does(
    recipe: dict[str, Any], exported: str | None, cards: list[int], layered: Layered, machine: Machine
) -> None:
    facts = with_cards(machine(4), SPEEDS, device_order=exported)
    plan = build_plan(layered(recipe), facts).plan
    assert seen(plan, facts) == tuple(facts.gpus[number].uuid for number in cards)


@pytest.mark.parametrize("exported", [None, "PCI_BUS_ID", "FASTEST_FIRST"])
@pytest.mark.parametrize("recipe", [{"strategy": {"kind": "ddp"}}, OWN])
def test_cards_that_the_caller_lists_stay_in_the_order_of_the_list(
    recipe: dict[str, Any], exported: str | None, layered: Layered, machine: Machine
) -> None:
    facts = with_cards(machine(4), SPEEDS, device_order=exported, visible_devices="GPU-2,GPU-1")
    plan = build_plan(layered({**recipe, "devices": {"select": "all"}}), facts).plan
    assert seen(plan, facts) == (facts.gpus[2].uuid, facts.gpus[1].uuid)
    asked = build_plan(layered({**recipe, "devices": {"select": "all", "order": "fastest"}}), facts).plan
    assert seen(asked, facts) == (facts.gpus[1].uuid, facts.gpus[2].uuid)


def test_cards_of_amd_are_counted_as_hip_does(layered: Layered, machine: Machine) -> None:
    facts = with_cards(machine(4), {index: {**each, "vendor": "amd"} for index, each in SPEEDS.items()})
    for exported in (None, "FASTEST_FIRST"):
        plan = build_plan(layered({**OWN, "devices": {"select": 2}}), replace(facts, device_order=exported)).plan
        assert variable(plan, "HIP_VISIBLE_DEVICES") == "0,1"


def test_an_allocation_is_told_by_its_job(layered: Layered, machine: Machine) -> None:
    job = Allocation("slurm", "17", {"SLURM_JOB_ID": "17"})
    plan = build_plan(layered({}), replace(machine(4), visible_devices="2,3", allocation=job)).plan
    assert "CUDA_VISIBLE_DEVICES=2,3, the allocation of slurm job 17" in said(plan, "note")


def test_free_cards_differ_from_machine_to_machine(layered: Layered, machine: Machine) -> None:
    recipe = {"devices": {"select": "free"}, "nodes": {"count": 2}, "strategy": {"kind": "ddp"}}
    with pytest.raises(RecipeError) as caught:
        build_plan(layered(recipe), machine(4))
    assert "devices.select is free, but the run has 2 nodes" in caught.value.diagnostics[0].what


def amd(index: int) -> Gpu:
    memory = 192 * GIGABYTE
    return Gpu(index, f"GPU-{index}abc", "AMD Instinct MI300X", memory, memory, (9, 4), vendor="amd")


@pytest.mark.parametrize(
    ("told", "select", "cards"),
    [
        ({}, [2, 0], "2,0"),
        ({"hip_devices": "3,1"}, "all", "3,1"),
        ({"visible_devices": "1"}, "all", "1"),
        ({"rocr_devices": "2,3"}, "all", "2,3"),
        ({"rocr_devices": "2,3", "hip_devices": "1"}, "all", "3"),
    ],
)
def test_amd_cards_are_chosen_by_the_variable_that_rocm_reads(
    layered: Layered, machine: Machine, told: dict[str, Any], select: Any, cards: str
) -> None:
    facts = replace(machine(0), gpus=tuple(map(amd, range(4))), **told)
    plan = build_plan(layered({"strategy": {"kind": "ddp"}, "devices": {"select": select}}), facts).plan
    assert variable(plan, "HIP_VISIBLE_DEVICES") == cards
    assert variable(plan, "CUDA_VISIBLE_DEVICES") is None
    assert {"CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"} <= set(plan.environment.unset)


def test_the_deepspeed_launcher_is_refused_on_amd_cards(layered: Layered, machine: Machine) -> None:
    recipe = {"strategy": {"kind": "zero2"}, "launcher": {"kind": "deepspeed"}}
    with pytest.raises(RecipeError, match="unsupported combination"):
        build_plan(layered(recipe), replace(machine(0), gpus=(amd(0),)))


def test_mps_hands_to_the_cpu_what_it_cannot_do(layered: Layered, machine: Machine) -> None:
    plan = build_plan(layered({}), machine(0, mps=True)).plan
    assert variable(plan, "PYTORCH_ENABLE_MPS_FALLBACK") == "1"
    with pytest.raises(RecipeError) as caught:
        build_plan(layered({"nodes": {"processes_per_node": 2}, "strategy": {"kind": "ddp"}}), machine(0, mps=True))
    assert any("neither gloo nor nccl" in each.why for each in caught.value.diagnostics)


@pytest.mark.parametrize(("system", "blocked"), [("macOS 13.6", True), ("macOS 14.5", False)])
def test_bf16_on_mps_needs_a_system_that_has_it(layered: Layered, machine: Machine, system: str, blocked: bool) -> None:
    plan = build_plan(layered({"precision": {"dtype": "bf16"}}), machine(0, mps=True, system=system)).plan
    assert ("requires macOS 14" in said(plan, "blocker")) is blocked


@pytest.mark.parametrize(
    ("torch", "dtype", "blocked"), [("2.7.1", "fp16", True), ("2.8.0", "fp16", False), ("2.7.1", "fp32", False)]
)
def test_fp16_on_mps_needs_a_torch_that_scales_the_loss_there(
    layered: Layered, machine: Machine, torch: str, dtype: str, blocked: bool
) -> None:
    facts = machine(0, mps=True, system="macOS 14.5")
    facts = replace(facts, packages={**facts.packages, "torch": torch})
    told = said(build_plan(layered({"precision": {"dtype": dtype}}), facts).plan, "blocker")
    assert ("fp16 on mps requires torch >= 2.8; 2.7.1 is installed" in told) is blocked


NODES = (NumaNode(0, (0, 1, 2, 3, 8), GIGABYTE), NumaNode(1, (4, 5, 6, 7), GIGABYTE))
BOUND = {"strategy": {"kind": "ddp"}, "launcher": {"numa_binding": "node"}}


def cores(plan: Plan) -> str | None:
    words = [str(word) for word in plan.commands[0].wrapper]
    return words[words.index("--cores") + 1] if "--cores" in words else None


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate", "deepspeed"])
def test_ranks_stay_near_to_their_cards_under_every_launcher(layered: Layered, machine: Machine, launcher: str) -> None:
    facts = with_cards(machine(2), {0: {"numa_node": 1}, 1: {"numa_node": 0}}, numa=NODES)
    recipe = layered(BOUND, {"launcher": {"kind": launcher}})
    assert cores(build_plan(recipe, facts).plan) == "4-7:0-3,8"
    limited = replace(facts, cpu_affinity=(1, 3, 6))
    assert cores(build_plan(recipe, limited).plan) == "6:1,3"


def test_ranks_without_cards_are_spread_over_the_nodes(layered: Layered, machine: Machine) -> None:
    recipe = layered(BOUND, {"nodes": {"processes_per_node": 4}})
    assert cores(build_plan(recipe, machine(0, numa=NODES)).plan) == "0-3,8:0-3,8:4-7:4-7"


def test_nothing_is_bound_unless_it_is_asked_for(layered: Layered, machine: Machine) -> None:
    facts = with_cards(machine(2), {}, numa=NODES)
    assert cores(build_plan(layered({"strategy": {"kind": "ddp"}}), facts).plan) is None


def test_a_binding_that_cannot_be_had_blocks_the_run(layered: Layered, machine: Machine) -> None:
    silent = machine(2)
    assert "does not report its NUMA nodes" in said(build_plan(layered(BOUND), silent).plan, "blocker")
    unplaced = replace(silent, numa=NODES)
    assert "on which node GPU 0 is" in said(build_plan(layered(BOUND), unplaced).plan, "blocker")
    outside = with_cards(silent, {0: {"numa_node": 1}, 1: {"numa_node": 1}}, numa=NODES, cpu_affinity=(0,))
    assert "no core of node 1" in said(build_plan(layered(BOUND), outside).plan, "blocker")
