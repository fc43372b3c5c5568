"""Mixtures of experts, trainkit's own and those of transformers: routing, its losses, and their effect on a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.nn import functional

from tests.trainer.training import MakeSettings, parts_of, trained
from trainkit.errors import TrainingError
from trainkit.recipe.schema import Moe, Recipe
from trainkit.tools.builtin.inputs import GPT_MODULES
from trainkit.trainer.models.gpt import build_gpt
from trainkit.trainer.models.hf import Transformer
from trainkit.trainer.models.moe import MixtureOfExperts, balance_loss, z_loss
from trainkit.trainer.setup import describe, prepared_model

SHORT: dict[str, Any] = {"train": {"steps": 3}, "schedule": {"warmup_steps": 0}, "eval": {"every_steps": 3}}
CONFIG: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "vocab_size": 256,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
MIXTRAL: dict[str, Any] = {"kind": "hf", "architecture": "mixtral", "config": CONFIG}


def routed(**config: Any) -> dict[str, Any]:
    return {**MIXTRAL, "config": {**CONFIG, "output_router_logits": True, **config}}


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
        lines = [line for line in trained(dataclasses.replace(settings, batch=batch)).lines if "expert_shares" in line]
        assert all(sum(line["expert_shares"][0]) == pytest.approx(1, abs=1e-4) for line in lines)
        return float(lines[-1]["expert_imbalance"])

    without, with_loss = imbalance(0.0), imbalance(0.2)
    assert 1 <= with_loss < 0.75 * without


def test_a_run_says_how_many_parameters_a_token_meets(make_settings: MakeSettings) -> None:
    dense, sparse = (
        parts_of(make_settings(model={"moe": moe})) for moe in ({}, {"experts": 4, "top_k": 1, "every": 2})
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
    count = parts_of(make_settings(model=model, peft={"kind": "lora", "rank": 2})).parameters
    assert 0 < count.training < count.frozen
    assert count.active == count.training


def test_the_plan_knows_the_classes_of_the_models_modules() -> None:
    recipes = [
        Recipe.model_validate({"train": {"steps": 1}, "model": {"kind": "gpt", "moe": moe}})
        for moe in ({}, {"experts": 4})
    ]
    found = {type(each).__name__ for recipe in recipes for each in build_gpt(recipe, "meta").modules()}
    assert found == set(GPT_MODULES)


def test_the_routers_loss_is_that_of_transformers_sample_by_sample(make_settings: MakeSettings) -> None:
    model = prepared_model(make_settings(model=routed(router_aux_loss_coef=0.5)))
    assert isinstance(model, Transformer)
    tokens = torch.randint(0, 256, (1, 13))
    theirs = model.inner(input_ids=tokens[:, :-1], output_router_logits=True)
    targets = tokens[:, 1:]
    plain = torch.nn.functional.cross_entropy(theirs.logits.flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(model(tokens[:, :-1], targets), plain + 0.5 * theirs.aux_loss * 12)
    model.eval()
    torch.testing.assert_close(model(tokens[:, :-1], targets), plain)
    model.train()
    more = torch.randint(0, 256, (3, 13))
    alone = sum(model(row[None, :-1], row[None, 1:]) for row in more)
    torch.testing.assert_close(model(more[:, :-1], more[:, 1:]), alone)


def test_padding_moves_no_router(make_settings: MakeSettings) -> None:
    model = prepared_model(make_settings(model=routed(router_aux_loss_coef=5.0)))
    tokens = torch.randint(0, 256, (1, 9))
    short = model(tokens[:, :-1], tokens[:, 1:])
    filled = torch.cat([tokens[:, :-1], torch.zeros(1, 5, dtype=torch.int64)], dim=1)
    targets = torch.cat([tokens[:, 1:], torch.full((1, 5), -100)], dim=1)
    torch.testing.assert_close(model(filled, targets), short)


def test_the_routers_loss_evens_out_the_experts_and_their_use_is_shown(make_settings: MakeSettings) -> None:
    short = {"train": {"steps": 24}, "optimizer": {"lr": 1e-2}}
    strong = trained(make_settings(model=routed(router_aux_loss_coef=1.0), **short))
    weak = trained(make_settings(model=routed(router_aux_loss_coef=0.0), **short))
    last, other = ([line for line in run.lines if "loss" in line][-1] for run in (strong, weak))
    assert last["expert_imbalance"] < other["expert_imbalance"]
    assert [sum(block) for block in last["expert_shares"]] == pytest.approx([1, 1], abs=1e-5)
    dense = trained(make_settings(model=MIXTRAL, train={"steps": 1}))
    assert not any("expert_shares" in line for line in dense.lines)


def test_recomputing_gives_the_same_losses(make_settings: MakeSettings) -> None:
    short = {"train": {"steps": 3}}
    plain = trained(make_settings(model=routed(), **short))
    again = trained(make_settings(model=routed(), **short, efficiency={"gradient_checkpointing": True}))
    assert again.losses == pytest.approx(plain.losses, rel=1e-6)


def test_routers_of_an_architecture_that_does_not_say_how_to_judge_them_are_refused(
    make_settings: MakeSettings,
) -> None:
    with pytest.raises(TrainingError, match="the loss of mixtral's routers is not known"):
        prepared_model(make_settings(model=routed(num_experts_per_tok=0)))


def test_the_routers_loss_that_a_mixture_of_transformers_is_asked_for_is_trained(make_settings: MakeSettings) -> None:
    plain = trained(make_settings(**SHORT, model=MIXTRAL)).losses
    done = trained(make_settings(**SHORT, model=routed(router_aux_loss_coef=10.0)))
    weighed, evaluated = done.losses, done.lines[-1]["eval_loss"]
    # The loss of an even router is top_k, which is 2, on any number of micro batches and of counted tokens.
    assert weighed[0] - plain[0] == pytest.approx(20.0, rel=0.1)
    assert evaluated == pytest.approx(plain[-1], rel=0.1)  # of the predictions alone


def in_one_place(graph: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
    """A backend whose graphs write what needs no gradient where they wrote it the last time, as CUDA graphs do."""
    places: dict[int, torch.Tensor] = {}

    def kept(number: int, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.requires_grad:
            return value
        return places.setdefault(number, torch.empty_like(value)).copy_(value)

    def run_again(*inputs: Any) -> tuple[Any, ...]:
        for place in places.values():  # what was in it is gone before the graph reads its inputs
            place.fill_(-1000)
        return tuple(kept(number, value) for number, value in enumerate(graph(*inputs)))

    return run_again


@pytest.mark.e2e
def test_the_load_of_experts_is_the_sum_where_each_pass_writes_over_the_one_before(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: compiled(self, backend=in_one_place))
    changes: dict[str, Any] = {**SHORT, "model": routed(), "logging": {"every_steps": 2}}
    told = []
    for efficiency in ({}, {"compile": {"enabled": True}}):
        settings = make_settings(**changes, efficiency=efficiency)
        assert settings.batch.accumulation > 1
        told.append([line["expert_shares"] for line in trained(settings).lines if "expert_shares" in line])
    torch.compiler.reset()
    assert len(told[0]) == 3
    assert told[0] == told[1]


def test_routers_that_add_noise_draw_the_same_again_when_a_block_is_recomputed(make_settings: MakeSettings) -> None:
    def curve(noise: float, **more: Any) -> list[float]:
        model = {"kind": "hf", "architecture": "phimoe", "config": {**CONFIG, "router_jitter_noise": noise}}
        return trained(make_settings(**SHORT, model=model, **more)).losses

    jittered = curve(0.5)
    assert jittered != curve(0.0)
    assert curve(0.5, efficiency={"gradient_checkpointing": True}) == jittered
