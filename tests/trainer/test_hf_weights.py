"""Weights from a folder of transformers: what is missing in it or left out of it is said, never passed over."""

from __future__ import annotations

import logging
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.training import MakeSettings
from trainkit.errors import TrainingError
from trainkit.trainer.__main__ import train_and_report
from trainkit.trainer.loop import SignalRequests
from trainkit.trainer.settings import Settings, World
from trainkit.trainer.setup import prepared_model

SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32}
LABELS = {"kind": "random", "samples": 16, "sequence_length": 16, "low": 3, "high": 256, "classes": 2}


class Unasked(SignalRequests):
    """Takes over no signals: they are the test runner's."""

    def listen(self, *numbers: signal.Signals) -> None:
        """Nothing."""


@pytest.fixture
def folder(make_settings: MakeSettings, tmp_path: Path) -> Path:
    """A small Llama's."""
    config = {**SIZES, "hidden_size": 16, "vocab_size": 256}
    made: Any = prepared_model(make_settings(model={"kind": "hf", "architecture": "llama", "config": config}))
    made.inner.save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def said(settings: Settings, caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    """What the trainer says of the folder while it runs."""
    with caplog.at_level(logging.INFO, logger="trainkit.trainer"):
        assert train_and_report(settings, World(), torch.device("cpu"), Unasked()) == 0
    return [(each.levelno, each.getMessage()) for each in caplog.records if "model.path" in each.getMessage()]


def of(folder: Path, **more: Any) -> dict[str, Any]:
    return {"model": {"kind": "hf", "path": str(folder), **more}, "train": {"steps": 1}}


def test_layers_that_the_folder_does_not_have_are_a_warning(
    folder: Path, make_settings: MakeSettings, caplog: pytest.LogCaptureFixture
) -> None:
    assert said(make_settings(**of(folder)), caplog) == []
    [(level, line)] = said(make_settings(**of(folder, config={"num_hidden_layers": 3})), caplog)
    assert level == logging.WARNING
    names = ", ".join(f"model.layers.2.{each}.weight" for each in ("input_layernorm", "mlp.down_proj", "mlp.gate_proj"))
    assert line == f"model.path: 9 weights are not in {folder} and drawn at random: {names} and 6 more"


def test_layers_that_the_model_does_not_have_are_a_warning(
    folder: Path, make_settings: MakeSettings, caplog: pytest.LogCaptureFixture
) -> None:
    [(level, line)] = said(make_settings(**of(folder, config={"num_hidden_layers": 1})), caplog)
    assert level == logging.WARNING
    assert line.startswith(
        f"model.path: 9 weights are in {folder} and not in the model: model.layers.1.input_layernorm"
    )


def test_the_head_of_another_task_is_news_and_no_warning(
    folder: Path, make_settings: MakeSettings, caplog: pytest.LogCaptureFixture
) -> None:
    task = of(folder, task="sequence_classification", config={"num_labels": 2, "pad_token_id": 0})
    assert said(make_settings(**task, data=LABELS), caplog) == [
        (logging.INFO, f"model.path: 1 weight is not in {folder} and drawn at random: score.weight"),
        (logging.INFO, f"model.path: 1 weight is in {folder} and not in the model: lm_head.weight"),
    ]


def test_a_weight_of_another_size_is_refused_by_its_name(folder: Path, make_settings: MakeSettings) -> None:
    asked = make_settings(**of(folder, config={"hidden_size": 32}))
    with pytest.raises(TrainingError, match=r"lm_head.weight has another size in .* than \(256, 32\), which") as caught:
        prepared_model(asked)
    assert "leave them out of model.config" in caught.value.diagnostics[0].hint


def test_a_file_that_was_cut_short_is_refused_with_its_folder(folder: Path, make_settings: MakeSettings) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(TrainingError, match=f"transformers cannot build it from {folder}: .*(?i:metadata)"):
        prepared_model(make_settings(**of(folder)))


def test_bf16_weights_are_cast_as_transformers_casts_them(folder: Path, make_settings: MakeSettings) -> None:
    """Rotary frequencies among others stay in fp32: rounded, position 500 would be another one."""
    from transformers import AutoModelForCausalLM

    precision = {"dtype": "bf16", "weights": "bf16"}
    mine = prepared_model(make_settings(**of(folder), precision=precision)).eval()
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    tokens = torch.arange(512)[None] % 256
    with torch.no_grad():
        assert torch.equal(mine(tokens), theirs(input_ids=tokens).logits)
