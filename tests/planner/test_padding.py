"""The warning of padded batches: only where a mask takes the flash kernel away, with a remedy that is to be had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan
from trainkit.recipe.resolved import Resolved

Layered = Callable[..., Resolved]
Machine = Callable[..., Facts]
WORDS = "does not use its flash kernel"
ROWS: dict[str, Any] = {"kind": "dataset", "path": "rows.jsonl"}


def warned(layered: Layered, facts: Facts, task: str, data: dict[str, Any], **more: Any) -> list[str]:
    recipe = {
        "model": {"kind": "hf", "architecture": "gpt2" if task == "causal_lm" else "bert", "task": task},
        "data": data if "kind" in data else {**ROWS, **data},
        "precision": {"dtype": "bf16"},
        **more,
    }
    return [each.hint for each in build_plan(layered(recipe), facts).plan.notices if WORDS in each.what]


def test_labelled_texts_are_padded_and_only_another_attention_helps(layered: Layered, machine: Machine) -> None:
    (hint,) = warned(layered, machine(1), "sequence_classification", {"columns": {"label": "label"}})
    assert "flash_attention_2" in hint
    assert "packing" not in hint


def test_hidden_tokens_can_be_packed_instead(layered: Layered, machine: Machine) -> None:
    (hint,) = warned(layered, machine(1), "masked_lm", {"packing": "none"})
    assert "data.packing: dense" in hint
    assert warned(layered, machine(1), "masked_lm", {"packing": "dense"}) == []


@pytest.mark.parametrize(
    ("gpus", "task", "more"),
    [
        (0, "masked_lm", {}),
        (1, "causal_lm", {}),
        (1, "masked_lm", {"precision": {"dtype": "fp32"}}),
        (1, "masked_lm", {"efficiency": {"attention": "eager"}}),
        (1, "masked_lm", {"efficiency": {"attention": "flash_attention_2"}}),
    ],
)
def test_nothing_is_said_where_there_is_no_such_kernel_to_lose(
    layered: Layered, machine: Machine, gpus: int, task: str, more: dict[str, Any]
) -> None:
    assert warned(layered, machine(gpus), task, {"packing": "none"}, **more) == []


def test_cards_before_ampere_have_no_such_kernel_and_are_not_told_to_install_one(
    layered: Layered, machine: Machine
) -> None:
    fp16 = {"precision": {"dtype": "fp16"}}
    assert warned(layered, machine(1), "masked_lm", {"packing": "none"}, **fp16)
    assert warned(layered, machine(1, "NVIDIA V100"), "masked_lm", {"packing": "none"}, **fp16) == []


def test_samples_that_are_full_need_no_mask(layered: Layered, machine: Machine) -> None:
    assert warned(layered, machine(1), "sequence_classification", {"kind": "random"}) == []
