"""Advice on sizes that tensor cores like: by number format and by card, and only where there are tensor cores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from trainkit.launch_plan.model import Notice
from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan
from trainkit.recipe.resolved import Resolved
from trainkit.tools.builtin.rules import SOURCE

Layered = Callable[..., Resolved]
Machine = Callable[..., Facts]
A100, V100 = "NVIDIA A100", "NVIDIA V100"


def advised(layered: Layered, facts: Facts, dtype: str = "fp16", **recipe: Any) -> list[Notice]:
    precision = {"dtype": "fp32", "tf32": True} if dtype == "tf32" else {"dtype": dtype}
    notices = build_plan(layered({"precision": precision, **recipe}), facts).plan.notices
    return [notice for notice in notices if SOURCE in notice.hint]


@pytest.mark.parametrize(
    ("card", "dtype", "multiple"),
    [(A100, "fp16", 64), (A100, "bf16", 64), (A100, "tf32", 32), (V100, "fp16", 8)],
)
def test_the_multiple_depends_on_format_and_card(
    layered: Layered, machine: Machine, card: str, dtype: str, multiple: int
) -> None:
    facts = machine(1, card)
    (found,) = advised(layered, facts, dtype, model={"vocab_size": 50257})
    assert found.severity == "warning"
    assert f"{card} multiplies {dtype} fastest in multiples of {multiple}; not so: model.vocab_size 50257" in found.what
    following = -(-50257 // multiple) * multiple
    assert f"(next {following})" in found.what
    assert advised(layered, facts, dtype, model={"vocab_size": following}) == []


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ({"model": {"hidden_size": 132, "heads": 1}}, "model.hidden_size 132 (next 136)"),
        ({"batch": {"micro": 3}, "data": {"sequence_length": 10}}, "batch.micro 3 of 10 tokens: 30 (next 32)"),
        ({"model": {"hidden_size": 160, "heads": 10}}, ""),
        ({"model": {"hidden_size": 96, "heads": 8}}, "model.heads 8, which makes heads 12 wide"),
    ],
)
def test_every_side_of_the_large_products_is_looked_at(
    layered: Layered, machine: Machine, recipe: dict[str, Any], words: str
) -> None:
    found = [notice.what for notice in advised(layered, machine(1, V100), **recipe) if notice.severity == "warning"]
    assert (words in found[0]) if words else not found


GPT2: dict[str, Any] = {"kind": "hf", "architecture": "gpt2", "task": "causal_lm"}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"n_embd": 132, "n_head": 1}, "model.config.n_embd 132 (next 136)"),
        ({"n_embd": 96, "n_head": 8}, "model.config.n_head 8, which makes heads 12 wide"),
        ({"n_embd": 96, "n_head": 6, "n_inner": 300}, "model.config.n_inner 300 (next 304)"),
        ({"hidden_size": 64, "num_attention_heads": 2, "head_dim": 20}, "model.config.head_dim 20"),
        ({"n_embd": 96, "n_head": 6, "n_inner": 384, "vocab_size": 256}, ""),
    ],
)
def test_a_model_of_transformers_is_looked_at_by_the_names_of_its_architecture(
    layered: Layered, machine: Machine, config: dict[str, int], words: str
) -> None:
    found = [notice.what for notice in advised(layered, machine(1, V100), model={**GPT2, "config": config})]
    assert (words in found[0]) if words else not found


def test_the_least_fitting_card_of_several_decides(layered: Layered, machine: Machine) -> None:
    recipe: dict[str, Any] = {"strategy": {"kind": "ddp"}, "model": {"hidden_size": 136, "heads": 1}}
    assert "multiples of 64" in advised(layered, machine(2, V100, A100), **recipe)[0].what


def test_a_size_that_leaves_tiles_idle_is_noted(layered: Layered, machine: Machine) -> None:
    (found,) = advised(layered, machine(1, V100), model={"hidden_size": 160, "heads": 2, "vocab_size": 320})
    assert found.severity == "note"
    assert "model.hidden_size 160" in found.what  # 160 of 256
    assert "320" not in found.what  # 320 of 384


@pytest.mark.parametrize(
    ("gpus", "card", "dtype", "recipe"),
    [
        (0, A100, "bf16", {}),
        (1, A100, "fp32", {}),
        (1, V100, "tf32", {}),
        (1, "NVIDIA GeForce GTX 1660", "fp16", {}),
        (1, A100, "bf16", {"program": {"kind": "torch", "script": "t.py", "reads_recipe": True}}),
    ],
)
def test_nothing_is_advised_where_no_tensor_core_computes(
    layered: Layered, machine: Machine, gpus: int, card: str, dtype: str, recipe: dict[str, Any]
) -> None:
    assert advised(layered, machine(gpus, card), dtype, model={"hidden_size": 132, "heads": 1}, **recipe) == []
