"""Exported models of transformers are what `from_pretrained` reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from trainkit.train.assembly import assemble
from trainkit.train.export import export
from trainkit.train.loop import train
from trainkit.train.metrics import Metrics
from trainkit.train.settings import Settings, World
from trainkit.train.signals import Requests

GPT2: dict[str, Any] = {  # its output layer shares the embedding's weights
    "kind": "hf",
    "architecture": "gpt2",
    "config": {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 256, "n_positions": 32},
}


def test_from_pretrained_reads_what_was_trained(make_settings: Callable[..., Settings]) -> None:
    transformers = pytest.importorskip("transformers")
    settings = make_settings(model=GPT2, train={"steps": 2}, checkpoint={"every_steps": 2})
    parts = assemble(settings, World(), torch.device("cpu"))
    train(parts, 0, Metrics(settings.run_dir, [], main=False), Requests())
    export(settings.run_dir / "checkpoints/step-00000002", settings.run_dir / "out")
    read = transformers.AutoModelForCausalLM.from_pretrained(settings.run_dir / "out").eval()
    tokens = torch.arange(32).reshape(1, 32)
    with torch.no_grad():
        expected = parts.strategy.model.eval()(tokens)
        assert torch.equal(read(input_ids=tokens).logits, expected)
    assert (settings.run_dir / "out/model.safetensors").exists()
