"""How much a model computes for a token: the formula against torch's own count, and the share of a card's peak."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from trainkit.trainer.metrics.speed import GPUS, Work, flops_per_token, peak, work_of
from trainkit.trainer.settings import Settings
from trainkit.trainer.setup import prepared_model

MakeSettings = Callable[..., Settings]
GPT: dict[str, Any] = {"layers": 3, "heads": 4, "hidden_size": 64}
LLAMA: dict[str, Any] = {
    "kind": "hf",
    "architecture": "llama",
    "config": {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
    },
}


def counted(model: Any, length: int) -> float:
    """Operations of all products in forward and backward, for a token."""
    tokens = torch.randint(0, 256, (2, length))
    with FlopCounterMode(display=False) as counter:
        model(tokens=tokens, targets=tokens).backward()
    return float(counter.get_total_flops()) / tokens.numel()


@pytest.mark.parametrize(
    "sections",
    [
        {"model": GPT},
        {"model": {**GPT, "moe": {"experts": 4, "top_k": 2, "every": 1}}},
        {"model": LLAMA},
    ],
    ids=["gpt", "mixture of experts", "hf"],
)
def test_the_formula_is_what_torch_counts(make_settings: MakeSettings, sections: dict[str, Any]) -> None:
    settings = make_settings(**sections, data={"sequence_length": 96}, efficiency={"attention": "eager"})
    model = prepared_model(settings)
    told = flops_per_token(model, 96)
    assert told is not None
    assert told == pytest.approx(counted(model, 96), rel=0.01)


def test_frozen_weights_have_no_gradient_to_compute(make_settings: MakeSettings) -> None:
    settings = make_settings(
        model=GPT, peft={"kind": "lora"}, data={"sequence_length": 96}, efficiency={"attention": "eager"}
    )
    model = prepared_model(settings)
    told = flops_per_token(model, 96)
    assert told == pytest.approx(counted(model, 96), rel=0.05)  # the first layer's input needs no gradient either


def test_a_mixture_whose_experts_are_not_known_has_no_figure(make_settings: MakeSettings) -> None:
    config = {**LLAMA["config"], "num_local_experts": 2, "num_experts_per_tok": 1, "num_key_value_heads": 4}
    settings = make_settings(model={"kind": "hf", "architecture": "mixtral", "config": config})
    assert flops_per_token(prepared_model(settings), 96) is None


def test_the_share_is_work_done_over_what_the_cards_could_do() -> None:
    work = Work(flops_per_token=6e9, peak=300e12)
    assert work.share(tokens_per_second=40_000, ranks=2) == 0.4
    assert Work(6e9, None).share(1.0, 1) is None
    assert Work(None, 300e12).share(1.0, 1) is None


def test_on_a_cpu_the_peak_is_not_known_and_nothing_is_said(make_settings: MakeSettings) -> None:
    settings = make_settings()
    assert work_of(prepared_model(settings), settings, torch.device("cpu")).peak is None


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("Tesla V100-SXM2-16GB", 125),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA Something New", None),
    ],
)
def test_a_card_is_known_by_its_whole_name(name: str, teraflops: float | None) -> None:
    assert peak(name, "16 bits") == (None if teraflops is None else teraflops * 1e12)


def test_every_card_names_its_source_and_is_faster_in_fewer_bits() -> None:
    for card in GPUS:
        assert card.source
        assert card.half > card.fp32 > 0
    assert peak("Tesla V100-SXM2-16GB", "tf32") is None
