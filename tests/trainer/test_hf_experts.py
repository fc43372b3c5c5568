"""Mixtures of experts among the models of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from trainkit.errors import TrainingError
from trainkit.trainer.loop import Requests, train
from trainkit.trainer.metrics.writers import Metrics
from trainkit.trainer.models.hf import Transformer
from trainkit.trainer.settings import Settings, World
from trainkit.trainer.setup import assemble, prepared_model

MakeSettings = Callable[..., Settings]
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


def records(settings: Settings) -> list[dict[str, Any]]:
    parts = assemble(settings, World(), torch.device("cpu"))
    metrics = Metrics(settings.run_dir, [], main=True)
    train(parts, 0, metrics, Requests())
    metrics.close()
    lines = [json.loads(line) for line in (settings.run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


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
    strong = records(make_settings(model=routed(router_aux_loss_coef=1.0), **short))
    weak = records(make_settings(model=routed(router_aux_loss_coef=0.0), **short))
    assert strong[-1]["expert_imbalance"] < weak[-1]["expert_imbalance"]
    assert [sum(block) for block in strong[-1]["expert_shares"]] == pytest.approx([1, 1], abs=1e-5)
    assert "expert_shares" not in records(make_settings(model=MIXTRAL, train={"steps": 1}))[-1]


def test_recomputing_gives_the_same_losses(make_settings: MakeSettings) -> None:
    short = {"train": {"steps": 3}}
    plain = [each["loss"] for each in records(make_settings(model=routed(), **short))]
    again = records(make_settings(model=routed(), **short, efficiency={"gradient_checkpointing": True}))
    assert [each["loss"] for each in again] == pytest.approx(plain, rel=1e-6)


def test_routers_of_an_architecture_that_does_not_say_how_to_judge_them_are_refused(
    make_settings: MakeSettings,
) -> None:
    with pytest.raises(TrainingError, match="the loss of mixtral's routers is not known"):
        prepared_model(make_settings(model=routed(num_experts_per_tok=0)))
