"""Advice on dividing a model: by whether it fits on a card, and only where its size and its state are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from trainkit.launch_plan.model import Notice
from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan
from trainkit.recipe.resolved import Resolved
from trainkit.tools.builtin.memory import largest

Layered = Callable[..., Resolved]
Machine = Callable[..., Facts]
V100 = "NVIDIA V100"  # 16 GiB, so 835 M parameters at 18 bytes each with 2 GiB left
BASE = {"precision": {"dtype": "fp16"}}
MEDIUM = {"layers": 24, "hidden_size": 1024, "heads": 16, "vocab_size": 1024}  # 0.3 B
LARGE = {"layers": 24, "hidden_size": 2048, "heads": 16, "vocab_size": 1024}  # 1.2 B
HUGE = {"layers": 96, "hidden_size": 8192, "heads": 64, "vocab_size": 1024}  # 77 B


def advised(layered: Layered, facts: Facts, strategy: Any, model: Any, **recipe: Any) -> list[Notice]:
    strategy = strategy if isinstance(strategy, dict) else {"kind": strategy}
    notices = build_plan(layered({**BASE, "strategy": strategy, "model": model, **recipe}), facts).plan.notices
    return [notice for notice in notices if " parameters " in notice.what]


@pytest.mark.parametrize("strategy", ["fsdp", "zero1", "zero2", "zero3"])
def test_what_fits_on_one_card_needs_no_dividing(layered: Layered, machine: Machine, strategy: str) -> None:
    (found,) = advised(layered, machine(2, V100), strategy, MEDIUM)
    assert found.severity == "note"
    assert "the model's 303 M parameters fit on one GPU with gradients, optimizer state and activations" in found.what
    assert f"MiB or less for batch.micro 8): {strategy} makes room" in found.what
    assert found.hint == "set strategy.kind to ddp, which is faster"
    assert advised(layered, machine(2, V100), "ddp", MEDIUM) == []


def test_offload_of_what_fits_is_said_to_be_slow(layered: Layered, machine: Machine) -> None:
    (found,) = advised(layered, machine(2, V100), {"kind": "zero2", "offload_optimizer": "cpu"}, MEDIUM)
    assert "offload slows each step" in found.what


BILLION = {"layers": 24, "hidden_size": 2112, "heads": 16, "vocab_size": 50304}  # 1.3 B: 22 of 24 GiB at 18 bytes


@pytest.mark.parametrize(
    ("length", "recipe", "told"),
    [
        (128, {}, True),
        (2048, {}, False),  # 20 GiB of activations
        (2048, {"batch": {"micro": 1}}, True),
        (2048, {"efficiency": {"gradient_checkpointing": True}}, True),
        (2048, {"efficiency": {"gradient_checkpointing": {"every": True, "selective": True}}}, False),
        (128, {"efficiency": {"attention": "eager"}}, False),  # a score for each pair of places is not counted
    ],
)
def test_a_model_is_said_to_fit_only_with_its_activations(
    layered: Layered, machine: Machine, length: int, recipe: dict[str, Any], told: bool
) -> None:
    more: dict[str, Any] = {"data": {"sequence_length": length}, **recipe}
    assert [each.severity for each in advised(layered, machine(2, V100), "fsdp", MEDIUM, **more)] == ["note"] * told


def test_what_fits_without_activations_alone_is_not_said_to_fit(layered: Layered, machine: Machine) -> None:
    facts = machine(8)
    cards = tuple(replace(gpu, memory_total=24 * 1024**3, memory_free=24 * 1024**3) for gpu in facts.gpus)
    recipe: dict[str, Any] = {"data": {"sequence_length": 1024}, "precision": {"dtype": "bf16"}}
    assert largest("single", 1, 24 * 1024**3) >= 1.3e9
    assert advised(layered, replace(facts, gpus=cards), "fsdp", BILLION, **recipe) == []


def test_gradients_that_are_reduced_once_are_counted_whole(layered: Layered, machine: Machine) -> None:
    facts, recipe = machine(8, V100), {"batch": {"micro": 1, "accumulation": 4}}
    large = {**LARGE, "layers": 60}  # 3 B: 6.8 GB of everything on each of eight, and 10.6 more of whole gradients
    once = {"kind": "fsdp", "reduce_gradients": "once"}
    (found,) = advised(layered, facts, once, large, **recipe)
    assert "once holds all gradients on each rank" in found.what
    assert found.hint == "set strategy.reduce_gradients to each_micro_step"
    assert advised(layered, facts, "fsdp", large, **recipe) == []
    assert advised(layered, facts, once, large, batch={"micro": 1, "accumulation": 1}) == []


@pytest.mark.parametrize(
    ("strategy", "cards", "model", "hint"),
    [
        ("single", 1, LARGE, "zero3 with offload_optimizer and offload_param cpu"),
        ("ddp", 2, {**LARGE, "layers": 32}, "set strategy.kind to fsdp"),
        ("ddp", 2, LARGE, "set strategy.kind to zero2"),
        ("zero3", 2, HUGE, "zero3 with offload_optimizer and offload_param cpu"),
    ],
)
def test_what_does_not_fit_is_divided_or_offloaded(
    layered: Layered, machine: Machine, strategy: str, cards: int, model: Any, hint: str
) -> None:
    (found,) = advised(layered, machine(cards, V100), strategy, model)
    assert found.severity == "warning"
    assert f"do not fit with gradients and optimizer state: {strategy} has room for" in found.what
    assert hint in found.hint


def test_weights_without_a_16_bit_copy_leave_more_room(layered: Layered, machine: Machine) -> None:
    between = {"layers": 17, "hidden_size": 2048, "heads": 16, "vocab_size": 1024}  # 0.86 B: 14 GiB at 16 bytes, not 18
    assert advised(layered, machine(1, V100), "single", between)
    assert advised(layered, machine(1, V100), "single", between, precision={"dtype": "fp32"}) == []


@pytest.mark.parametrize(
    ("strategy", "recipe"),
    [
        ("zero2", {}),
        ({"kind": "zero3", "offload_optimizer": "cpu", "offload_param": "cpu"}, {}),
        ("single", {"optimizer": {"name": "adafactor"}}),
        ("single", {"peft": {"kind": "lora"}}),
        ("single", {"devices": {"type": "cpu"}, "precision": {"dtype": "fp32"}}),
    ],
)
def test_nothing_is_said_where_it_fits_so_or_is_not_known(
    layered: Layered, machine: Machine, strategy: Any, recipe: dict[str, Any]
) -> None:
    assert advised(layered, machine(8, V100), strategy, LARGE, **recipe) == []
