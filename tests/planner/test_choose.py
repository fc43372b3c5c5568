"""`strategy.kind: auto`: the decision tree of the guides follows from memory and time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from trainkit.launch_plan.model import Plan
from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan, decide
from trainkit.planner.choose import SEVERAL
from trainkit.recipe.resolved import Resolved

Layered = Callable[..., Resolved]
Machine = Callable[..., Facts]
GIB = 1024**3


def facts_of(machine: Machine, cards: int, memory: float, host: int = 512) -> Facts:
    facts = machine(cards)
    sized: dict[str, Any] = {
        "name": "NVIDIA A100-SXM4-40GB",
        "memory_total": int(memory * GIB),
        "memory_free": int(memory * GIB),
    }
    gpus = tuple(replace(gpu, **sized) for gpu in facts.gpus)
    return replace(facts, gpus=gpus, memory_total=host * GIB)


def model(layers: int, width: int) -> dict[str, Any]:
    return {"layers": layers, "hidden_size": width, "heads": width // 64, "vocab_size": 1024}


def chosen(layered: Layered, facts: Facts, size: dict[str, Any], **recipe: Any) -> Plan:
    asked = {"strategy": {"kind": "auto"}, "precision": {"dtype": "bf16"}, "batch": {"global": 64}, "model": size}
    return build_plan(layered({**asked, "data": {"sequence_length": 256}, **recipe}), facts).plan


SMALL, MIDDLE, LARGE = model(12, 768), model(12, 2880), model(12, 8192)  # 85 M, 1.2 B, 9.7 B


@pytest.mark.parametrize(
    ("cards", "memory", "size", "kinds", "offloads"),
    [
        (1, 40, SMALL, {"single"}, False),  # one GPU, and it fits
        (1, 40, MIDDLE, {"single"}, False),
        (1, 16, MIDDLE, {"zero2", "zero3"}, True),  # one GPU, and it does not fit: offload
        (4, 40, SMALL, {"ddp"}, False),  # many GPUs, and it fits on each
        (4, 40, MIDDLE, {"ddp"}, False),
        (4, 16, MIDDLE, {"zero2", "fsdp"}, False),  # many GPUs, and it does not fit on one: divide it
        (8, 40, LARGE, {"fsdp"}, False),
        (2, 40, LARGE, {"fsdp", "zero2", "zero3"}, True),  # not even divided: offload besides
    ],
)
def test_the_decision_tree(
    layered: Layered, machine: Machine, cards: int, memory: float, size: dict[str, Any], kinds: set[str], offloads: bool
) -> None:
    facts = facts_of(machine, cards, memory)
    resolved = layered({"strategy": {"kind": "auto"}, "precision": {"dtype": "bf16"}, "batch": {"global": 64},
                        "model": size, "data": {"sequence_length": 256}})  # fmt: skip
    context, *_ = decide(resolved, facts)
    strategy = context.recipe.strategy
    offloaded = any(getattr(strategy, name, None) not in (None, False, "none")
                    for name in ("offload", "offload_optimizer", "offload_param"))  # fmt: skip
    assert strategy.kind in kinds
    assert offloaded is offloads
    assert context.foresight is not None
    assert context.foresight.verdict == "fits"


def test_what_is_too_large_for_every_strategy_is_said(layered: Layered, machine: Machine) -> None:
    plan = chosen(layered, facts_of(machine, 2, 8, host=64), model(5, 32768))
    assert "no strategy fits, and this is the one that takes least" in plan.strategy.reason
    assert any(each.severity == "blocker" and "does not fit" in each.what for each in plan.notices)


def test_choice_and_runner_up_stand_in_the_plan_with_their_numbers(layered: Layered, machine: Machine) -> None:
    reason = chosen(layered, facts_of(machine, 4, 40), SMALL).strategy.reason
    assert "chosen by its estimate: ddp, micro batch" in reason
    assert "s a step" in reason


def test_numbers_of_the_training_stay_the_same(layered: Layered, machine: Machine) -> None:
    facts = facts_of(machine, 4, 16)
    plans = [chosen(layered, facts, size) for size in (SMALL, MIDDLE)]
    assert {plan.batch.global_ for plan in plans} == {64}
    for plan in plans:
        batch = plan.batch
        assert batch.micro is not None
        assert batch.accumulation is not None
        assert batch.micro * batch.accumulation * batch.ranks == 64


def test_what_the_recipe_gives_is_not_chosen(layered: Layered, machine: Machine) -> None:
    plan = chosen(layered, facts_of(machine, 4, 40), SMALL, batch={"global": 64, "micro": 2})
    assert (plan.batch.micro, plan.batch.accumulation) == (2, 8)


def test_one_process_where_a_device_takes_no_more(layered: Layered, machine: Machine) -> None:
    facts = replace(machine(0), mps=True, platform="darwin")
    plan = chosen(layered, facts, SMALL, precision={"dtype": "fp32"}, devices={"type": "mps"})
    assert plan.strategy.kind == "single"
    assert "cannot be told" in plan.strategy.reason


def test_a_program_of_ones_own_gets_the_simplest(layered: Layered, machine: Machine) -> None:
    resolved = layered({"program": {"kind": "torch", "script": "train.py"}, "strategy": {"kind": "auto"}})
    assert build_plan(resolved, machine(2)).plan.strategy.kind == SEVERAL[0]["strategy.kind"]


def test_the_largest_micro_batch_that_fits_is_found_without_trials(layered: Layered, machine: Machine) -> None:
    recipe = {"strategy": {"kind": "single"}, "precision": {"dtype": "bf16"}, "model": MIDDLE,
              "data": {"sequence_length": 1024}, "batch": {"global": 64, "micro": "auto"}}  # fmt: skip
    plan = build_plan(layered(recipe), facts_of(machine, 1, 40)).plan
    assert plan.batch.search == ()
    assert plan.batch.micro in (1, 2, 4, 8, 16, 32)
    assert "the quickest that fits" in plan.batch.note
    larger = {**recipe, "batch": {"global": 64, "micro": 2 * plan.batch.micro}}
    assert build_plan(layered(larger), facts_of(machine, 1, 40)).plan.foresight.verdict != "fits"  # type: ignore[union-attr]
