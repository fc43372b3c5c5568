"""Models of transformers in the built-in trainer, tiny and without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from tests.trainer.training import MakeSettings, parts_of, trained
from trainkit.errors import TrainingError
from trainkit.recipe.schema import Recipe
from trainkit.trainer.models.hf import Transformer
from trainkit.trainer.settings import Settings
from trainkit.trainer.setup import describe, prepared_model

WIDTHS: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "vocab_size": 256}
LLAMA: dict[str, Any] = {
    "kind": "hf",
    "architecture": "llama",
    "config": {**WIDTHS, "num_key_value_heads": 1, "intermediate_size": 32},
}
GPT2: dict[str, Any] = {
    "kind": "hf",
    "architecture": "gpt2",
    "config": {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 256, "n_positions": 32},
}


def built(settings: Settings) -> Transformer:
    torch.manual_seed(0)
    model = prepared_model(settings)
    assert isinstance(model, Transformer)
    return model


@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_a_model_from_the_recipe_learns_and_recomputes_to_the_same_bits(
    model: dict[str, Any], make_settings: MakeSettings
) -> None:
    short = {"train": {"steps": 6}, "optimizer": {"lr": 1e-2}}
    plain = trained(make_settings(model=model, **short)).losses
    assert plain[-1] < plain[0] - 0.3
    again = trained(make_settings(model=model, **short, efficiency={"gradient_checkpointing": True}))
    assert again.losses == plain


def test_a_classifier_learns_its_labels(make_settings: MakeSettings) -> None:
    bert = {"kind": "hf", "architecture": "bert", "task": "sequence_classification"}
    bert["config"] = {**WIDTHS, "intermediate_size": 32, "hidden_dropout_prob": 0.0}  # type: ignore[assignment]
    data = {"kind": "random", "samples": 32, "sequence_length": 16, "low": 0, "high": 256, "classes": 2}
    curve = trained(make_settings(model=bert, data=data, train={"steps": 16}, optimizer={"lr": 1e-2})).losses
    assert curve[0] == pytest.approx(0.693, abs=0.1)
    assert curve[-1] < 0.6


def test_blocks_and_tied_weights_are_found(make_settings: MakeSettings) -> None:
    made = built(make_settings(model=GPT2))
    assert [type(block).__name__ for block in made.blocks] == ["GPT2Block", "GPT2Block"]
    assert {type(module).__name__ for module in made.tied} == {"Embedding", "Linear"}
    assert made.stochastic  # the architecture has dropout unless the recipe says otherwise
    assert not built(make_settings(model=LLAMA)).stochastic
    assert built(make_settings(model=LLAMA)).tied == ()


def test_the_loss_is_that_of_transformers_summed(make_settings: MakeSettings) -> None:
    made, tokens = built(make_settings(model=LLAMA)), torch.randint(0, 256, (2, 12))
    theirs = made.inner(input_ids=tokens, labels=tokens).loss
    targets = torch.cat([tokens[:, 1:], torch.full((2, 1), -100)], dim=1)
    torch.testing.assert_close(made(tokens, targets) / 22, theirs)


def test_the_attention_that_is_used_is_said(make_settings: MakeSettings) -> None:
    for asked, used in (("auto", "sdpa"), ("eager", "eager")):
        settings = make_settings(model=LLAMA, efficiency={"attention": asked})
        assert f"and {used} attention" in describe(parts_of(settings))


def test_a_folder_is_read_in_full_precision_with_settings_above_its_own(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    first = built(make_settings(model=LLAMA))
    folder = tmp_path / "model"
    first.inner.to(torch.bfloat16).save_pretrained(folder)
    settings = {"kind": "hf", "architecture": None, "path": str(folder), "config": {"rms_norm_eps": 0.5}}
    again = built(make_settings(model=settings))
    assert again.inner.config.rms_norm_eps == 0.5
    assert again.training
    for one, other in zip(first.inner.parameters(), again.inner.parameters(), strict=True):
        assert other.dtype == torch.float32
        assert torch.equal(one.float(), other)


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        ({"config": {**LLAMA["config"], "num_hiden_layers": 2}}, "num_hiden_layers: llama has no such", "did you mean"),
        ({"architecture": "lama"}, "model.architecture: .*lama", ""),
        ({"architecture": "vit", "config": {}}, "transformers cannot build it: Unrecognized configuration", ""),
        ({"architecture": None, "path": "no/such/folder", "config": {}}, "model.path: ", ""),
        ({"config": {**LLAMA["config"], "max_position_embeddings": 16}}, "the model has 16 places", "lower it"),
        pytest.param(
            {"config": {**LLAMA["config"], "hidden_size": 15}}, "model", "", marks=pytest.mark.needs("transformers>=5")
        ),
        ({"config": {**LLAMA["config"], "hidden_act": "sillu"}}, "transformers cannot build it: KeyError: 'sillu'", ""),
    ],
)
def test_a_model_that_cannot_be_is_refused_with_the_setting_to_blame(
    changes: dict[str, Any], message: str, hint: str, make_settings: MakeSettings
) -> None:
    with pytest.raises(TrainingError, match=message) as caught:
        prepared_model(make_settings(model={**LLAMA, **changes}))
    assert hint in caught.value.diagnostics[0].hint


@pytest.mark.parametrize("extra", [{}, {"path": "x", "architecture": "llama"}])
def test_a_model_comes_from_one_place(extra: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="needs path or architecture"):
        Recipe.model_validate({"model": {"kind": "hf", **extra}})
