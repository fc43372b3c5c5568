"""Mixtures of experts of transformers, and shared weights where FSDP cuts a model up: tiny, without a network."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from trainkit.errors import TrainingError
from trainkit.trainer.distributed import process_group
from trainkit.trainer.loop import Requests, train
from trainkit.trainer.metrics.writers import Metrics
from trainkit.trainer.settings import Settings, World
from trainkit.trainer.setup import assemble

MakeSettings = Callable[..., Settings]
SHORT: dict[str, Any] = {"train": {"steps": 3}, "schedule": {"warmup_steps": 0}, "eval": {"every_steps": 3}}
WIDTHS: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "vocab_size": 256,
}
MIXTRAL: dict[str, Any] = {"kind": "hf", "architecture": "mixtral", "config": {**WIDTHS, "num_local_experts": 4}}
TIED: dict[str, Any] = {"kind": "hf", "architecture": "llama", "config": {**WIDTHS, "tie_word_embeddings": True}}
FSDP: dict[str, Any] = {"kind": "fsdp"}


def curve(settings: Settings) -> tuple[list[float], float]:
    """Training losses, and the last evaluation loss."""
    parts = assemble(settings, World(), torch.device("cpu"))
    metrics = Metrics(settings.run_dir, [], main=True)
    train(parts, 0, metrics, Requests())
    metrics.close()
    lines = [json.loads(line) for line in (settings.run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line], lines[-1]["eval_loss"]


def mixtral(**config: Any) -> dict[str, Any]:
    return {**MIXTRAL, "config": {**MIXTRAL["config"], **config}}


def test_the_routers_loss_that_a_mixture_of_transformers_is_asked_for_is_trained(make_settings: MakeSettings) -> None:
    plain, _ = curve(make_settings(**SHORT, model=mixtral()))
    weighed, evaluated = curve(
        make_settings(**SHORT, model=mixtral(output_router_logits=True, router_aux_loss_coef=10.0))
    )
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


def test_the_load_of_experts_is_the_sum_where_each_pass_writes_over_the_one_before(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: compiled(self, backend=in_one_place))
    changes: dict[str, Any] = {**SHORT, "model": mixtral(output_router_logits=True), "logging": {"every_steps": 2}}
    told = []
    for efficiency in ({}, {"compile": {"enabled": True}}):
        settings = make_settings(**changes, efficiency=efficiency)
        assert settings.batch.accumulation > 1
        curve(settings)
        lines = [json.loads(line) for line in (settings.run_dir / "metrics.jsonl").read_text().splitlines()]
        told.append([line["expert_shares"] for line in lines if "expert_shares" in line])
    torch.compiler.reset()
    assert len(told[0]) == 3
    assert told[0] == told[1]


def test_routers_that_add_noise_draw_the_same_again_when_a_block_is_recomputed(make_settings: MakeSettings) -> None:
    noisy = {"kind": "hf", "architecture": "phimoe", "config": {**MIXTRAL["config"], "router_jitter_noise": 0.5}}
    calm = {"kind": "hf", "architecture": "phimoe", "config": {**MIXTRAL["config"], "router_jitter_noise": 0.0}}
    jittered = curve(make_settings(**SHORT, model=noisy))
    assert jittered != curve(make_settings(**SHORT, model=calm))
    assert curve(make_settings(**SHORT, model=noisy, efficiency={"gradient_checkpointing": True})) == jittered


@pytest.mark.needs("torch>=2.7")  # before, FSDP2 has no CPU
def test_fsdp_leaves_a_module_whole_that_shares_a_weight_with_one_outside(make_settings: MakeSettings) -> None:
    alone, _ = curve(make_settings(**SHORT, model=TIED))
    with process_group(World(), torch.device("cpu"), needed=True):
        sharded, _ = curve(
            make_settings(**SHORT, model=TIED, strategy={**FSDP, "auto_wrap": "size", "min_params": 500})
        )
    assert sharded == pytest.approx(alone, rel=1e-6)


def test_a_class_to_wrap_that_shares_a_weight_with_a_module_outside_is_refused(make_settings: MakeSettings) -> None:
    settings = make_settings(**SHORT, model=TIED, strategy={**FSDP, "wrap_classes": ["LlamaModel"]})
    with (
        process_group(World(), torch.device("cpu"), needed=True),
        pytest.raises(TrainingError, match="LlamaModel holds a weight that a module outside it shares"),
    ):
        assemble(settings, World(), torch.device("cpu"))
