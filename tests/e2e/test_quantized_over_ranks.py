"""QLoRA over ranks: the losses are those of one process, and nothing that libraries grumble reaches the user."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from strategy_runs import CASES, largest_difference, read_curve, write_corpus, write_settings

from tests.warm_ranks import run_case
from trainkit.trainer.checkpoint.export import export_adapters
from trainkit.trainer.loop import SignalRequests, train
from trainkit.trainer.metrics.writers import Metrics
from trainkit.trainer.settings import World, read_settings
from trainkit.trainer.setup import assemble

pytestmark = pytest.mark.needs("bitsandbytes>=0.50", "transformers>=5", "peft", "torch>=2.7")
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


@pytest.mark.parametrize(("name", "bits"), [("ddp", 8), ("fsdp", 4), ("zero3", 4)])
def test_two_ranks_train_adapters_beside_quantised_weights_as_one_process_does(
    name: str, bits: int, tmp_path: Path
) -> None:
    corpus = tmp_path / "text" / "corpus"
    write_corpus(corpus)
    changes: dict[str, dict[str, Any]] = {
        "model": {"kind": "hf", "architecture": "llama", "config": SIZES, "quantize": {"bits": bits}},
        "peft": {"kind": "lora", "rank": 4},
        "train": {"steps": 4},
        "eval": {"every_steps": 2, "batches": 2},
        "efficiency": {"gradient_checkpointing": {"every": 1}},
        "checkpoint": {"every_steps": 4},
    }
    over_ranks = run_case(tmp_path / "ranks", CASES[name].changed(**changes), corpus)
    alone = read_settings(write_settings(tmp_path / "alone", CASES["single"].changed(**changes), corpus))
    train(assemble(alone, World(), torch.device("cpu")), 0, Metrics(alone.run_dir, [], main=True), SignalRequests())
    curve = read_curve(alone.run_dir)
    assert largest_difference(curve.losses, over_ranks.losses) < 1e-6
    assert largest_difference(curve.eval_losses, over_ranks.eval_losses) < 1e-6
    assert curve.losses[4] < curve.losses[1]
    log = (tmp_path / "ranks/rank-1.log").read_text()
    assert "kernel" not in log
    assert "arning" not in log
    export_adapters(tmp_path / "ranks/checkpoints/step-00000004", tmp_path / "adapters")
