"""What a plan says of a run that waits for its GPUs: for how many, among which, and who is before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from trainkit.errors import RecipeError
from trainkit.launch_plan.model import GpuWait, Plan, plan_from_json, plan_to_json
from trainkit.machine.facts import Facts, GpuProcess, Hold
from trainkit.planner.build import build_plan
from trainkit.recipe.resolved import Resolved

Layered = Callable[..., Resolved]
Machine = Callable[..., Facts]
GIGABYTE = 1024**3
OTHER = GpuProcess(4711, "ada", "python other.py", 40 * GIGABYTE)
BUSY: dict[str, Any] = {"memory_free": 40 * GIGABYTE, "processes": (OTHER,)}
HELD: dict[str, Any] = {"held_by": Hold(7, "ada", "/runs/other")}
AWAITED: dict[str, Any] = {"wanted_by": Hold(8, "bob", "large")}
DDP: dict[str, Any] = {"strategy": {"kind": "ddp"}}


def said(plan: Plan, severity: str) -> str:
    return " ".join(f"{each.what} {each.hint}" for each in plan.notices if each.severity == severity)


@pytest.fixture
def planned(layered: Layered, machine: Machine) -> Callable[..., Plan]:
    """The plan of a recipe that waits, on four GPUs of which some are changed."""

    def plan(recipe: Mapping[str, Any], changes: Mapping[int, Mapping[str, Any]], **devices: Any) -> Plan:
        facts = machine(4)
        facts = replace(facts, gpus=tuple(replace(gpu, **changes.get(gpu.index, {})) for gpu in facts.gpus))
        return build_plan(layered({**recipe, "devices": {"when_busy": "wait", **devices}}), facts).plan

    return plan


@pytest.mark.parametrize(
    ("recipe", "select", "changes", "amount", "among", "ready", "cards"),
    [
        ({}, "auto", {}, 1, [0, 1, 2, 3], True, [0]),
        ({}, "auto", {0: BUSY, 1: HELD, 2: AWAITED}, 1, [0, 1, 2, 3], True, [3]),
        (DDP, 2, {0: BUSY}, 2, [0, 1, 2, 3], True, [1, 2]),
        (DDP, 2, {0: BUSY, 1: HELD, 3: AWAITED}, 2, [0, 1, 2, 3], False, [0, 2]),
        (DDP, "auto", {2: HELD}, 4, [0, 1, 2, 3], False, [0, 1, 2, 3]),
        (DDP, "all", {}, 4, [0, 1, 2, 3], True, [0, 1, 2, 3]),
        (DDP, "free", {2: HELD}, 1, [0, 1, 2, 3], True, [0, 1, 3]),
        (DDP, "free", {0: HELD, 1: HELD, 2: HELD, 3: BUSY}, 1, [0, 1, 2, 3], False, [0]),
        (DDP, [3, 1], {}, 2, [3, 1], True, [3, 1]),
        (DDP, [3, 1], {1: AWAITED}, 2, [3, 1], False, [3, 1]),
        (DDP, 2, {0: {"compute_mode": "prohibited"}}, 2, [1, 2, 3], True, [1, 2]),
    ],
)
def test_a_plan_says_for_which_cards_its_run_waits(
    planned: Callable[..., Plan],
    machine: Machine,
    recipe: dict[str, Any],
    select: Any,
    changes: dict[int, Any],
    amount: int,
    among: list[int],
    ready: bool,
    cards: list[int],
) -> None:
    plan = planned(recipe, changes, select=select)
    assert plan.blockers == ()
    uuids = [gpu.uuid for gpu in machine(4).gpus]
    assert plan.waits == GpuWait(amount, tuple(uuids[number] for number in among), 1024 * 2**20, ready)
    assert [card.index for card in plan.cards] == cards
    assert ("the run waits until" in said(plan, "warning")) is not ready
    assert plan_from_json(plan_to_json(plan)) == plan


def test_it_is_said_who_is_in_the_way(planned: Callable[..., Plan]) -> None:
    told = said(planned(DDP, {0: BUSY, 1: HELD, 3: AWAITED}, select=2), "warning")
    assert "the run waits until 2 of 4 GPUs are idle, and takes those; 1 are now" in told
    assert "GPU 0 is busy: 40.0 GiB of 80 in use, pid 4711 (ada: python other.py)" in told
    assert "GPU 1 is busy: held by the trainkit run /runs/other (pid 7, ada)" in told
    assert "GPU 3 is busy: next for the trainkit run large (pid 8, bob), which waits" in told
    assert "the run waits until its GPUs are idle" in said(planned({}, {1: HELD}, select=[1]), "warning")


def test_more_cards_than_there_are_are_not_waited_for(planned: Callable[..., Plan]) -> None:
    plan = planned(DDP, {}, select=5)
    assert "5 GPUs are requested, 4 available" in said(plan, "blocker")
    assert plan.waits is None
    closed = planned({}, {1: {"compute_mode": "prohibited"}}, select=[1])
    assert "is closed to computing" in said(closed, "blocker")


def test_a_card_that_others_wait_for_is_not_taken_from_them(layered: Layered, machine: Machine) -> None:
    """Not by a run that does not wait, either: one that needs many would never have its turn."""
    facts = machine(2)
    facts = replace(facts, gpus=(replace(facts.gpus[0], **AWAITED), facts.gpus[1]))
    assert "next for the trainkit run large" in said(build_plan(layered({}), facts).plan, "blocker")
    free = build_plan(layered({"devices": {"select": "free"}}), facts).plan
    assert [card.index for card in free.cards] == [1]
    beside = build_plan(layered({"devices": {"when_busy": "warn"}}), facts).plan
    assert "next for the trainkit run large" in said(beside, "warning")


def test_several_machines_without_a_scheduler_have_no_common_line(layered: Layered, machine: Machine) -> None:
    recipe = {**DDP, "devices": {"when_busy": "wait"}, "nodes": {"count": 2, "rendezvous": "a:1"}}
    with pytest.raises(RecipeError, match="when_busy is wait, but the run has 2 nodes"):
        build_plan(layered(recipe), machine(2))


def test_under_a_scheduler_it_is_said_that_waiting_means_nothing(layered: Layered, machine: Machine) -> None:
    facts = machine(1)
    recipe = {"devices": {"when_busy": "wait"}, "cluster": {"kind": "slurm"}}
    plan = build_plan(layered(recipe), facts).plan
    assert plan.waits is None
    assert "devices.when_busy: wait has no effect with cluster.kind: slurm" in said(plan, "note")
    busy = replace(facts, gpus=(replace(facts.gpus[0], **HELD),))
    assert "held by the trainkit run" in said(build_plan(layered(recipe), busy).plan, "blocker")


def test_without_cards_there_is_nothing_to_wait_for(layered: Layered, machine: Machine) -> None:
    assert build_plan(layered({"devices": {"when_busy": "wait"}}), machine(0)).plan.waits is None
