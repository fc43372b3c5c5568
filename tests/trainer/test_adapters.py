"""LoRA: only the adapters train, they can be merged, and a checkpoint holds them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from trainkit.errors import TrainingError
from trainkit.recipe.schema import Recipe
from trainkit.trainer.loop import Requests, train
from trainkit.trainer.metrics.writers import Metrics
from trainkit.trainer.models.adapters import linear_layers, merge_adapters
from trainkit.trainer.settings import Settings, World
from trainkit.trainer.setup import Parts, assemble, describe, prepared_model

MakeSettings = Callable[..., Settings]
GPT2: dict[str, Any] = {
    "kind": "hf",
    "architecture": "gpt2",
    "config": {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 256, "n_positions": 32},
}
MODELS: dict[str, dict[str, Any]] = {"gpt": {"kind": "gpt", "layers": 2, "heads": 2, "hidden_size": 32}, "gpt2": GPT2}
SHORT: dict[str, Any] = {"train": {"steps": 3}, "optimizer": {"lr": 1e-2}}


def trained(settings: Settings) -> Parts:
    parts = assemble(settings, World(), torch.device("cpu"))
    train(parts, 0, Metrics(settings.run_dir, [], main=False), Requests())
    return parts


@pytest.mark.parametrize("model", MODELS)
def test_only_the_adapters_change_and_only_they_have_optimizer_state(model: str, make_settings: MakeSettings) -> None:
    settings = make_settings(model=MODELS[model], peft={"kind": "lora", "rank": 4}, **SHORT)
    torch.manual_seed(settings.recipe.train.seed)
    parts = assemble(settings, World(), torch.device("cpu"))
    before = {name: value.clone() for name, value in parts.model.state_dict().items()}
    train(parts, 0, Metrics(settings.run_dir, [], main=False), Requests())
    changed = {name for name, value in parts.model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if "lora_" in name}
    optimizer: Any = parts.strategy
    count = parts.parameters
    assert sum(each.numel() for each in optimizer.optimizer.state) == count.training
    total = count.training + count.frozen
    assert f"{count.training:,} of {total:,} parameters training" in describe(parts)


def test_the_head_of_a_classifier_which_starts_anew_trains_beside_the_adapters(make_settings: MakeSettings) -> None:
    config = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
    bert = {"kind": "hf", "architecture": "bert", "task": "sequence_classification", "config": config}
    data = {"kind": "random", "samples": 32, "sequence_length": 8, "classes": 2}
    settings = make_settings(model=bert, data=data, peft={"kind": "lora", "rank": 4}, **SHORT)
    parts = assemble(settings, World(), torch.device("cpu"))
    before = {name: value.clone() for name, value in parts.model.state_dict().items()}
    train(parts, 0, Metrics(settings.run_dir, [], main=False), Requests())
    changed = {name for name, value in parts.model.state_dict().items() if not torch.equal(value, before[name])}
    heads = {name for name in changed if "lora_" not in name}
    assert heads == {"inner.classifier.weight", "inner.classifier.bias"}


@pytest.mark.parametrize("extra", [{}, {"rslora": True}, {"dora": True}])
def test_merged_adapters_give_the_same_outputs_under_the_names_of_the_model(
    extra: dict[str, bool], make_settings: MakeSettings
) -> None:
    model = MODELS["gpt"]
    parts = trained(make_settings(model=model, peft={"kind": "lora", **extra}, **SHORT))
    tokens = torch.arange(20)[None]
    parts.model.eval()
    expected = parts.model(tokens)
    merge_adapters(parts.model)
    torch.testing.assert_close(parts.model(tokens), expected, rtol=1e-4, atol=1e-5)
    assert parts.model.state_dict().keys() == prepared_model(make_settings(model=model)).state_dict().keys()


def test_a_checkpoint_holds_the_adapters(make_settings: MakeSettings, tmp_path: Path) -> None:
    settings = make_settings(peft={"kind": "lora"}, **SHORT)
    parts, again = trained(settings), assemble(settings, World(), torch.device("cpu"))
    parts.strategy.save(tmp_path)
    again.strategy.load(tmp_path)
    for one, other in zip(parts.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_targets_are_the_linear_layers_of_the_blocks_unless_named(make_settings: MakeSettings) -> None:
    assert linear_layers(prepared_model(make_settings())) == ["mlp_in", "mlp_out", "out", "qkv"]
    named = prepared_model(make_settings(peft={"kind": "lora", "target_modules": ["qkv"]}))
    names = {name for name, parameter in named.named_parameters() if parameter.requires_grad}
    assert all(".qkv.lora_" in name for name in names)
    for targets in (["nope"], ["qkv", "nope"], ["kv", "nope", "qkv"]):
        absent = ", ".join(target for target in targets if target != "qkv")
        with pytest.raises(TrainingError, match=f"has no {absent} that") as caught:
            prepared_model(make_settings(peft={"kind": "lora", "target_modules": targets}))
        assert "qkv" in caught.value.diagnostics[0].hint


def test_settings_of_adapters_without_adapters_are_refused() -> None:
    with pytest.raises(ValidationError, match="kind is none"):
        Recipe.model_validate({"peft": {"rank": 4}})
