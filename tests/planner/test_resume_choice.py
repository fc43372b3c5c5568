"""Which checkpoints a plan resumes from when another strategy or number of ranks saved them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from trainkit.launch_plan.model import Plan
from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan
from trainkit.planner.resume import SavedCheckpoint, unreadable
from trainkit.recipe.resolved import Resolved

Layered = Callable[..., Resolved]
Machine = Callable[..., Facts]
PATH = "/runs/r/checkpoints/step-00000004"


@pytest.mark.parametrize(
    ("writer", "reader", "by_rank", "reason"),
    [
        (("ddp", 2), ("zero3", 4), False, None),
        (("zero2", 2), ("single", 1), False, None),
        (("zero3", 2), ("zero3", 2), True, None),
        (("zero3", 2), ("zero3", 4), True, "a file for each rank, which zero3 on 4 ranks cannot read"),
        (("zero2", 2), ("zero3", 2), True, "a file for each rank, which zero3 on 2 ranks cannot read"),
    ],
)
def test_strategies_read_one_another_but_for_files_of_single_ranks(
    writer: tuple[str, int], reader: tuple[str, int], by_rank: bool, reason: str | None
) -> None:
    found = unreadable(*writer, *reader, by_rank=by_rank)
    assert found is None if reason is None else reason in str(found)


@pytest.fixture
def plan_with(layered: Layered, machine: Machine) -> Callable[..., Plan]:
    """The plan of an fsdp run on 2 ranks that resumes, with one checkpoint that another strategy saved."""

    def make(resume: str, strategy: str, ranks: int, *, by_rank: bool = False) -> Plan:
        recipe = {
            "strategy": {"kind": "fsdp"},
            "nodes": {"processes_per_node": 2},
            "devices": {"type": "cpu"},
            "batch": {"global": 8, "micro": 1},
            "checkpoint": {"resume": resume},
        }
        resolved = layered(recipe)
        digest = build_plan(resolved, machine()).plan.training_digest
        saved = SavedCheckpoint(PATH, 4, digest, "r", strategy, ranks, by_rank=by_rank)
        return build_plan(resolved, machine(), [saved]).plan

    return make


@pytest.mark.parametrize("resume", ["auto", PATH])
def test_a_plan_says_who_saved_what_it_resumes_from(plan_with: Callable[..., Plan], resume: str) -> None:
    plan = plan_with(resume, "ddp", 4)
    assert plan.resume.path == PATH
    assert plan.resume.reason.endswith("saved by ddp on 4 ranks")
    (said,) = [notice.what for notice in plan.notices if "saved by" in notice.what]
    assert said.startswith("the checkpoint was saved by ddp on 4 ranks, and fsdp on 2 ranks goes on from it: ")


def test_the_same_strategy_on_as_many_ranks_is_no_news(plan_with: Callable[..., Plan]) -> None:
    assert not [notice for notice in plan_with("auto", "fsdp", 2).notices if "rounding" in notice.what]


def test_auto_passes_over_files_of_single_ranks_and_says_so(plan_with: Callable[..., Plan]) -> None:
    plan = plan_with("auto", "zero2", 2, by_rank=True)
    assert plan.resume.path is None
    assert "zero2 on 2 ranks saved it as a file for each rank" in plan.resume.reason
    assert [notice.severity for notice in plan.notices if "file for each rank" in notice.what] == ["warning"]


def test_named_files_of_single_ranks_stop_the_plan_of_another_strategy(plan_with: Callable[..., Plan]) -> None:
    plan = plan_with(PATH, "zero2", 2, by_rank=True)
    assert [notice.severity for notice in plan.notices if "cannot be resumed from" in notice.what] == ["blocker"]


@pytest.mark.parametrize("resume", ["auto", PATH])
def test_a_run_that_is_over_before_its_first_step_is_warned_of(layered: Layered, machine: Machine, resume: str) -> None:
    def warnings(steps: int) -> list[str]:
        resolved = layered({"train": {"steps": steps}, "checkpoint": {"resume": resume}})
        digest = build_plan(resolved, machine()).plan.training_digest
        plan = build_plan(resolved, machine(), [SavedCheckpoint(PATH, 4, digest, "r", "single", 1)]).plan
        return [notice.what for notice in plan.notices if "nothing is left to train" in notice.what]

    assert warnings(4) == ["the checkpoint is of step 4, and train.steps is 4: nothing is left to train"]
    assert warnings(5) == []


@pytest.mark.parametrize("resume", ["auto", PATH])
def test_a_damaged_checkpoint_is_named_and_passed_over(layered: Layered, machine: Machine, resume: str) -> None:
    resolved = layered({"devices": {"type": "cpu"}, "checkpoint": {"resume": resume}})
    digest = build_plan(resolved, machine()).plan.training_digest
    older = SavedCheckpoint("/runs/r/checkpoints/step-00000002", 2, digest, "r", "single", 1)
    damaged = SavedCheckpoint(PATH, 4, "", "r", damage="state is missing")
    oldest = SavedCheckpoint("/runs/r/checkpoints/step-00000001", 1, "", "r", damage="state is missing")
    plan = build_plan(resolved, machine(), [damaged, older, oldest]).plan
    said = [each for each in plan.notices if "damaged" in each.what]
    assert [PATH in each.what and "state is missing" in each.what for each in said] == [True]
    assert (plan.resume.step, said[0].severity) == ((2, "warning") if resume == "auto" else (4, "blocker"))
