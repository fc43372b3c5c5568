"""Checkpoints of adapters: they hold no base model, and go on only beside the one that they were trained beside."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.training import MakeSettings, parts_of, trained
from trainkit.errors import TrainingError
from trainkit.trainer.checkpoint.export import export
from trainkit.trainer.checkpoint.safe_loading import StateReader
from trainkit.trainer.settings import Settings
from trainkit.trainer.setup import prepared_model

LORA: dict[str, Any] = {"kind": "lora", "rank": 4}
LONG: dict[str, Any] = {
    "peft": LORA,
    "train": {"steps": 4},
    "optimizer": {"lr": 1e-2},
    "checkpoint": {"every_steps": 2, "keep": 0},
    "eval": {"every_steps": 0},
}


def resumed(settings: Settings, folder: Path) -> dict[str, torch.Tensor]:
    return trained(replace(settings, resume=folder)).weights


def names_in(folder: Path) -> set[str]:
    saved = StateReader(folder / "state").read_metadata().state_dict_metadata
    return {name.removeprefix("model.") for name in saved if name.startswith("model.")}


def step(settings: Settings, number: int) -> Path:
    return settings.run_dir / f"checkpoints/step-{number:08d}"


def test_a_checkpoint_of_adapters_holds_them_alone_and_goes_on_bit_equal(make_settings: MakeSettings) -> None:
    settings = make_settings(**LONG)
    parts = parts_of(settings)
    whole = trained(parts).weights
    training = {name for name, each in parts.model.named_parameters() if each.requires_grad}
    assert names_in(step(settings, 2)) == training
    again = resumed(make_settings(**LONG), step(settings, 2))
    assert all(torch.equal(again[name], each) for name, each in whole.items())


def test_a_head_that_trains_beside_adapters_is_in_the_checkpoint(make_settings: MakeSettings) -> None:
    config = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
    model = {"kind": "hf", "architecture": "bert", "task": "sequence_classification", "config": config}
    data = {"kind": "random", "samples": 32, "sequence_length": 8, "classes": 2}
    settings = make_settings(model=model, data=data, **LONG)
    whole = trained(settings).weights
    assert {"inner.classifier.weight", "inner.classifier.bias"} < names_in(step(settings, 2))
    again = resumed(make_settings(model=model, data=data, **LONG), step(settings, 2))
    assert all(torch.equal(again[name], each) for name, each in whole.items())


def test_whole_checkpoints_of_older_releases_are_read_with_their_base(make_settings: MakeSettings) -> None:
    settings = make_settings(**LONG)
    parts = parts_of(settings)
    engine: Any = parts.strategy
    engine._adapts = False  # as it was saved, without a base in the manifest
    parts.checkpoints.identity = replace(parts.checkpoints.identity, base="")
    whole = trained(parts).weights
    assert set(whole) <= names_in(step(settings, 2))
    elsewhere = make_settings(**{**LONG, "train": {"steps": 4, "seed": 5}})  # another base, until it is read
    again = resumed(elsewhere, step(settings, 4))
    assert all(torch.equal(again[name], each) for name, each in whole.items())
    export(step(settings, 2), settings.run_dir / "exported")


def test_adapters_do_not_go_on_beside_another_base_model(make_settings: MakeSettings, tmp_path: Path) -> None:
    config = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 256, "n_positions": 32}
    random: dict[str, Any] = {"kind": "hf", "architecture": "gpt2", "config": config}
    prepared_model(make_settings(model=random)).inner.save_pretrained(tmp_path / "base")  # type: ignore[operator, union-attr]
    asked = make_settings(model={"kind": "hf", "path": str(tmp_path / "base")}, **LONG)
    trained(asked)
    other = prepared_model(make_settings(model=random, train={"seed": 1}))
    other.inner.save_pretrained(tmp_path / "base")  # type: ignore[operator, union-attr]
    with pytest.raises(TrainingError, match="this run's base model is another one"):
        resumed(asked, step(asked, 2))
    with pytest.raises(TrainingError, match="holds adapters without their base model"):
        export(step(asked, 2), tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    with pytest.raises(TrainingError, match=r"this run has none \(peft.kind: none\)"):
        resumed(make_settings(model=random, **{**LONG, "peft": {"kind": "none"}}), step(asked, 2))


@pytest.mark.parametrize("kept", ["fp32", "bf16"])
def test_a_base_in_another_format_of_weights_is_the_same_model(kept: str, make_settings: MakeSettings) -> None:
    precision = {"dtype": "bf16", "weights": kept}
    plain = prepared_seeded(make_settings(peft=LORA))
    assert prepared_seeded(make_settings(peft=LORA, precision=precision)) == plain
    assert prepared_seeded(make_settings(peft={"kind": "lora", "rank": 2})) == plain
    assert prepared_seeded(make_settings(peft=LORA, model={"layers": 3})) != plain


def prepared_seeded(settings: Settings) -> str:
    torch.manual_seed(settings.recipe.train.seed)
    return prepared_model(settings).base
