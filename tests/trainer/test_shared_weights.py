"""Shared weights where FSDP cuts a model up."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trainer.training import CPU, MakeSettings, parts_of, trained
from trainkit.errors import TrainingError
from trainkit.trainer.distributed import process_group
from trainkit.trainer.settings import World

SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
TIED: dict[str, Any] = {"vocab_size": 256, "tie_word_embeddings": True}
RUN: dict[str, Any] = {
    "model": {"kind": "hf", "architecture": "llama", "config": {**SIZES, **TIED}},
    "train": {"steps": 3},
    "schedule": {"warmup_steps": 0},
}


@pytest.mark.needs("torch>=2.7")  # before, FSDP2 has no CPU
def test_fsdp_leaves_a_module_whole_that_shares_a_weight_with_one_outside(make_settings: MakeSettings) -> None:
    alone = trained(make_settings(**RUN)).losses
    by_size = {"kind": "fsdp", "auto_wrap": "size", "min_params": 500}
    with process_group(World(), CPU, needed=True):
        assert trained(make_settings(**RUN, strategy=by_size)).losses == pytest.approx(alone, rel=1e-6)


def test_a_class_to_wrap_that_shares_a_weight_with_a_module_outside_is_refused(make_settings: MakeSettings) -> None:
    settings = make_settings(**RUN, strategy={"kind": "fsdp", "wrap_classes": ["LlamaModel"]})
    message = "LlamaModel holds a weight that a module outside it shares"
    with process_group(World(), CPU, needed=True), pytest.raises(TrainingError, match=message):
        parts_of(settings)
