"""Mixture of experts: routing, its losses, and their effect on a small model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.nn import functional

from trainkit.recipe.schema import Moe, Recipe
from trainkit.tools.builtin.architectures import GPT_MODULES
from trainkit.trainer.loop import Requests, train
from trainkit.trainer.metrics.writers import Metrics
from trainkit.trainer.models.gpt import build_gpt
from trainkit.trainer.models.moe import MixtureOfExperts, balance_loss, z_loss
from trainkit.trainer.settings import Settings, World
from trainkit.trainer.setup import assemble, describe

MakeSettings = Callable[..., Settings]


def run(settings: Settings) -> list[dict[str, Any]]:
    """The metrics lines of a run in this process."""
    parts = assemble(settings, World(), torch.device("cpu"))
    metrics = Metrics(settings.run_dir, [], main=True)
    train(parts, 0, metrics, Requests())
    metrics.close()
    return [json.loads(line) for line in (settings.run_dir / "metrics.jsonl").read_text().splitlines()]


def mixture(top_k: int) -> MixtureOfExperts:
    torch.manual_seed(0)
    made = MixtureOfExperts(8, Moe(experts=4, top_k=top_k))
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return made


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_every_token_gets_the_weighted_sum_of_its_experts(top_k: int) -> None:
    mixed, x = mixture(top_k), torch.randn(2, 5, 8)
    out, _, _, load = mixed(x)
    for sample in range(2):
        for place in range(5):
            token = x[sample, place]
            chances = mixed.router(token).softmax(dim=-1)
            best = chances.topk(top_k).indices.tolist()
            total = chances[best].sum() if top_k > 1 else 1.0
            up, down = mixed.experts.up, mixed.experts.down
            expected = sum(chances[e] / total * (functional.gelu(token @ up[e]) @ down[e]) for e in best)
            torch.testing.assert_close(out[sample, place], expected)
    assert load.sum() == 2 * 5 * top_k


@pytest.mark.parametrize("top_k", [1, 2])
def test_the_predictions_alone_teach_the_router(top_k: int) -> None:
    mixed = mixture(top_k)
    mixed(torch.randn(2, 5, 8))[0].square().sum().backward()
    assert mixed.router.weight.grad is not None
    assert mixed.router.weight.grad.abs().max() > 1e-3


def test_the_balance_loss_is_one_when_even_and_grows_to_the_number_of_experts() -> None:
    even, assigned = torch.full((3, 8, 4), 0.25), functional.one_hot(torch.arange(8) % 4, 4).expand(3, 8, 4)
    torch.testing.assert_close(balance_loss(even, assigned), torch.ones(3))
    collapsed = functional.one_hot(torch.zeros(8, dtype=torch.int64), 4).expand(3, 8, 4)
    torch.testing.assert_close(balance_loss(collapsed.float(), collapsed), torch.full((3,), 4.0))
    torch.testing.assert_close(z_loss(torch.zeros(1, 1, 4)), torch.tensor([[4.0]]).log().square())


def test_the_balance_loss_lowers_imbalance(make_settings: MakeSettings) -> None:
    def imbalance(coefficient: float) -> float:
        moe = {"experts": 4, "top_k": 1, "every": 2, "balance_coef": coefficient, "z_coef": 0.0}
        settings = make_settings(model={"moe": moe}, train={"steps": 20}, logging={"every_steps": 10})
        batch = dataclasses.replace(settings.batch, micro=16, accumulation=1)
        lines = [line for line in run(dataclasses.replace(settings, batch=batch)) if "expert_shares" in line]
        assert all(sum(line["expert_shares"][0]) == pytest.approx(1, abs=1e-4) for line in lines)
        return float(lines[-1]["expert_imbalance"])

    without, with_loss = imbalance(0.0), imbalance(0.2)
    assert 1 <= with_loss < 0.75 * without


def test_a_run_says_how_many_parameters_a_token_meets(make_settings: MakeSettings) -> None:
    dense, sparse = (
        assemble(make_settings(model={"moe": moe}), World(), torch.device("cpu"))
        for moe in ({}, {"experts": 4, "top_k": 1, "every": 2})
    )
    width = 32  # one of two blocks has experts: two matrices without biases, and a router
    expert, biases, router = 8 * width * width, 5 * width, 4 * width
    count, of_dense = sparse.parameters, dense.parameters
    assert count.training == of_dense.training + 3 * expert - biases + router
    assert count.active == count.training - 3 * expert
    assert f"{count.training:,} parameters ({count.active:,} active)" in describe(sparse)
    assert "active" not in describe(dense)


@pytest.mark.parametrize(
    ("moe", "words"),
    [
        ({"experts": 2, "top_k": 3}, "top_k 3 is more than there are experts"),
        ({"top_k": 1}, "experts is 0"),
        ({"experts": 4, "every": 5}, "leaves no block of 4 with experts"),
    ],
)
def test_experts_that_cannot_be_are_refused(moe: dict[str, int], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Recipe.model_validate({"model": {"kind": "gpt", "moe": moe}})


def test_what_is_active_of_frozen_experts_is_not_taken_from_what_trains(make_settings: MakeSettings) -> None:
    model = {"layers": 2, "heads": 2, "hidden_size": 16, "moe": {"experts": 4, "top_k": 2, "every": 1}}
    parts = assemble(make_settings(model=model, peft={"kind": "lora", "rank": 2}), World(), torch.device("cpu"))
    count = parts.parameters
    assert 0 < count.training < count.frozen
    assert count.active == count.training


def test_the_plan_knows_the_classes_of_the_models_modules() -> None:
    recipes = [
        Recipe.model_validate({"train": {"steps": 1}, "model": {"kind": "gpt", "moe": moe}})
        for moe in ({}, {"experts": 4})
    ]
    with torch.device("meta"):
        found = {type(each).__name__ for recipe in recipes for each in build_gpt(recipe).modules()}
    assert found == set(GPT_MODULES)
