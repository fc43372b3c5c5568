"""What a plan says of memory: that it does not fit and what to change, and what it does not need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from trainkit.foresight.estimate import GIB, by_formula
from trainkit.foresight.render import verdict
from trainkit.launch_plan.context import Context
from trainkit.launch_plan.model import Foresight, Notice, Plan
from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan, decide
from trainkit.planner.changes import on_more_nodes, what_if
from trainkit.planner.room import answer
from trainkit.recipe.resolved import Resolved
from trainkit.runner.report.shortage import Shortage

Layered = Callable[..., Resolved]
Machine = Callable[..., Facts]
V100 = "NVIDIA V100"  # 16 GiB
BASE: dict[str, Any] = {"precision": {"dtype": "fp16"}, "batch": {"global": 16, "micro": 1}}
SMALL = {"layers": 12, "hidden_size": 768, "heads": 12, "vocab_size": 1024}  # 85 M
LARGE = {"layers": 24, "hidden_size": 2048, "heads": 16, "vocab_size": 1024}  # 1.2 B
HUGE = {"layers": 6, "hidden_size": 32768, "heads": 64, "vocab_size": 1024}  # 77 B


def planned(layered: Layered, facts: Facts, strategy: Any, model: Any, **recipe: Any) -> Plan:
    strategy = strategy if isinstance(strategy, dict) else {"kind": strategy}
    return build_plan(layered({**BASE, "strategy": strategy, "model": model, **recipe}), facts).plan


def about_memory(plan: Plan) -> list[Notice]:
    return [each for each in plan.notices if "fit" in each.what]


@pytest.mark.parametrize("strategy", ["fsdp", "zero3"])
def test_what_fits_whole_need_not_be_divided(layered: Layered, machine: Machine, strategy: str) -> None:
    plan = planned(layered, machine(2, V100), strategy, SMALL)
    assert dict(plan.training)["memory"].endswith(")")
    (found,) = [each for each in about_memory(plan) if f"strategy.kind {strategy}" in each.what]
    assert found.severity == "note"
    assert "it fits without" in found.what
    assert found.hint == "set strategy.kind=ddp"
    assert not [e for e in about_memory(planned(layered, machine(2, V100), "ddp", SMALL)) if "strategy" in e.what]


def test_what_saves_memory_on_a_model_that_fits_only_costs_time(layered: Layered, machine: Machine) -> None:
    recipe = {"efficiency": {"gradient_checkpointing": True}, "batch": {"global": 64, "micro": 1}}
    facts = machine(1)
    named = replace(facts, gpus=tuple(replace(gpu, name="NVIDIA A100-SXM4-80GB") for gpu in facts.gpus))
    said = " ".join(each.what for each in about_memory(planned(layered, named, "single", SMALL, **recipe)))
    assert "it fits without efficiency.gradient_checkpointing, too" in said
    assert "it fits without batch.accumulation 64, too" in said
    assert "times as long" in said


def test_only_a_plan_looks_for_advice(layered: Layered, machine: Machine) -> None:
    """A table of machines decides for each; advice on each would take a hundred times as long as its line."""
    asked = []

    def foresee(context: Context) -> Foresight | None:
        asked.append(context)
        return by_formula(context)

    resolved = layered({**BASE, "strategy": {"kind": "single"}, "model": LARGE})
    assert decide(resolved, machine(1, V100), foresee=foresee)[0].foresight is not None
    assert len(asked) == 1
    build_plan(resolved, machine(1, V100), foresee=foresee)
    assert len(asked) > 5


@pytest.mark.parametrize(
    ("strategy", "cards", "model", "hint"),
    [("ddp", 2, LARGE, "strategy.kind="), ("single", 1, LARGE, "strategy.kind=zero")],
)
def test_what_does_not_fit_is_stopped_here_with_what_makes_it_fit(
    layered: Layered, machine: Machine, strategy: str, cards: int, model: Any, hint: str
) -> None:
    plan = planned(layered, machine(cards, V100), strategy, model)
    found = plan.foresight
    assert found is not None
    (told,) = [each for each in about_memory(plan) if "does not fit" in each.what]
    assert told.severity == "blocker"
    assert "each rank takes" in told.what
    assert "most of it is" in told.what
    assert hint in told.hint
    assert "then it takes" in told.hint


def test_for_another_machine_it_is_a_warning(layered: Layered, machine: Machine) -> None:
    elsewhere = replace(machine(2, V100), origin="profile")
    found = about_memory(planned(layered, elsewhere, "ddp", LARGE))
    assert [each.severity for each in found] == ["warning"]


def found_start(layered: Layered, machine: Machine) -> int:
    found = planned(layered, machine(8), "fsdp", HUGE).foresight
    assert found is not None
    return found.start[1]


def test_the_slices_of_all_ranks_are_in_the_machines_memory_at_first(layered: Layered, machine: Machine) -> None:
    (found,) = [
        each for each in about_memory(planned(layered, machine(8), "fsdp", HUGE)) if "at its start" in each.what
    ]
    assert found.severity == "blocker"
    assert "8 ranks take" in found.what
    whole = 4 * 6 * 12 * 32768**2
    assert whole < found_start(layered, machine) < 1.5 * whole  # once, and for each rank the tensor that is drawn


def test_the_largest_model_that_nothing_helps_is_sent_to_other_machines(layered: Layered, machine: Machine) -> None:
    told = about_memory(planned(layered, machine(1, V100), "single", HUGE))
    assert any("--on all" in each.hint for each in told)


def test_less_precision_saves_what_it_saves(layered: Layered, machine: Machine) -> None:
    sections = {"precision": {"dtype": "fp32"}, "batch": {"global": 16, "micro": 16}, "strategy": {"kind": "single"}}
    resolved = layered({**sections, "model": SMALL})
    context = decide(resolved, machine(1))[0]
    assert context.foresight is not None
    (found,) = (each for each in what_if(context, by_formula) if each.change.settings == {"precision.dtype": "bf16"})
    assert found.foresight.allocated < context.foresight.allocated


ON_GPU = Shortage(1, wanted=2 * GIB, allocated=13 * GIB, free=GIB // 2, limit=16 * GIB, moment="forward")


def answered(layered: Layered, facts: Facts, lacking: Shortage, **recipe: Any) -> list[str]:
    resolved = layered({**BASE, "strategy": {"kind": "ddp"}, "model": SMALL, **recipe})
    return [*answer(decide(resolved, facts)[0], lacking, by_formula, lambda *_: None)]


def test_what_was_missing_is_added_to_what_a_change_comes_to(layered: Layered, machine: Machine) -> None:
    told, expected, *following = answered(layered, machine(2, V100), ON_GPU, batch={"global": 64, "micro": 16})
    assert told == "memory ran out on rank 1 in forward: 2048 MiB were wanted, with 13.0 GiB in use of 16.0 GiB"
    assert "expected were" in expected
    assert following[0].startswith("next: ")
    assert all(not line.startswith("next: env.") for line in following)
    assert all("micro=16" not in line for line in following)


def test_memory_in_pieces_is_put_together_first(layered: Layered, machine: Machine) -> None:
    lacking = ON_GPU._replace(allocated=11 * GIB, unused=3 * GIB)
    told = machine(2, V100, allocator="max_split_size_mb:128")
    *_, first, _ = answered(layered, told, lacking, batch={"global": 32, "micro": 16})[:4]
    assert first.startswith("next: env.PYTORCH_ALLOC_CONF=expandable_segments:True")
    grows = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for facts, more in ((told, {"env": grows}), (machine(2, V100), {})):  # where nobody says anything, the plan does
        assert not any("expandable_segments" in line for line in answered(layered, facts, lacking, **more))


def test_the_machines_memory_is_another_matter_than_a_gpus(layered: Layered, machine: Machine) -> None:
    offloading = {"kind": "zero2", "offload_optimizer": "cpu"}
    lines = answered(layered, machine(2, V100), Shortage(0, host=True), strategy=offloading,
                     data={"kind": "random", "sequence_length": 64, "workers": 4})  # fmt: skip
    assert lines[2].startswith("next: data.workers=2")


def test_nothing_is_said_of_a_program_of_ones_own(layered: Layered, machine: Machine) -> None:
    resolved = layered({"program": {"kind": "torch", "script": "train.py"}, "strategy": {"kind": "ddp"}})
    assert build_plan(resolved, machine(2, V100)).plan.foresight is None


def test_a_recipe_on_a_cpu_is_told_its_memory_too(layered: Layered, machine: Machine) -> None:
    plan = planned(layered, machine(0), "single", SMALL, precision={"dtype": "fp32"}, devices={"type": "cpu"})
    assert plan.foresight is not None
    assert plan.foresight.host_limit == machine(0).memory_total
    assert plan.foresight.parts[0][0] == "parameters"


SHARDED: dict[str, Any] = {"strategy": {"kind": "fsdp"}, "model": {"kind": "hf", "architecture": "llama", "config": {
    "hidden_size": 6144, "num_hidden_layers": 32, "num_attention_heads": 48, "intermediate_size": 16384}}}  # fmt: skip


def decided(layered: Layered, facts: Facts, **recipe: Any) -> Context:
    asked = layered({**BASE, **SHARDED, "efficiency": {"gradient_checkpointing": True}, **recipe})
    return decide(asked, facts, foresee=lambda _: None)[0]


def test_a_model_that_is_divided_fits_on_more_nodes(layered: Layered, machine: Machine) -> None:
    facts = replace(machine(8, V100), origin="profile")
    narrow = {"batch": {"global": 64, "micro": 1}}
    one = decided(layered, facts, **narrow)
    wider = on_more_nodes(one, by_formula)
    assert wider is not None
    assert wider.change.words == "nodes.count=4"
    planned_so, half = (by_formula(decided(layered, facts, **narrow, nodes={"count": count})) for count in (4, 2))
    assert wider.foresight == planned_so
    assert half is not None
    assert half.verdict != "fits"
    assert (
        on_more_nodes(decided(layered, facts, batch={"global": 16, "micro": 1}), by_formula) is None
    )  # too few samples
    assert on_more_nodes(decided(layered, facts, **narrow, strategy={"kind": "ddp"}), by_formula) is None


def test_what_is_offloaded_must_fit_in_the_machines_memory(layered: Layered, machine: Machine) -> None:
    offloading = {"strategy": {"kind": "fsdp", "offload": True}}
    small, large = (replace(machine(2, V100), origin="profile", memory_total=size * GIB) for size in (120, 1000))
    short, enough = (by_formula(decided(layered, facts, **offloading)) for facts in (small, large))
    assert short is not None
    assert enough is not None
    assert short.total == enough.total < short.limit
    assert (short.verdict, enough.verdict) == ("too large", "fits")
    assert verdict(short).endswith(" of the machine's memory are missing")
    plan = build_plan(layered({**BASE, **SHARDED, **offloading}), small).plan
    assert any("of the machine's memory, which has 120.0 GiB" in each.what for each in plan.notices)


@pytest.mark.parametrize(("word", "told"), [("fits", "fits: "), ("tight", "may just fit: ")])
def test_a_run_that_fits_for_the_allocator_gives_memory_back_says_so(
    layered: Layered, machine: Machine, word: str, told: str
) -> None:
    found = by_formula(decided(layered, machine(2, V100)))
    assert found is not None
    over = replace(found, total=found.limit + GIB, verdict=word)
    assert verdict(over).startswith(f"{told}torch's allocator gives back 1024 MiB that it holds unused")
