"""A model and a loss of the user's own, by import path."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.training import MakeSettings, parts_of, trained
from trainkit.errors import TrainingError
from trainkit.recipe.schema import Recipe
from trainkit.trainer.checkpoint.export import export, export_adapters
from trainkit.trainer.setup import prepared_model

PROGRAM = """
import torch
from torch import nn
from torch.nn import functional

class Small(nn.Module):
    def __init__(self, width=8, layers=2, reduction="mean", form="scalar", tied=False):
        super().__init__()
        self.reduction, self.form = reduction, form
        self.tokens = nn.Embedding(256, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers))
        self.head = nn.Linear(width, 256)
        if tied:
            self.head.weight = self.tokens.weight
    def forward(self, tokens, targets=None):
        x = self.tokens(tokens)
        for layer in self.layers:
            x = x + layer(x)
        logits = self.head(x)
        if self.form == "logits":
            return logits
        logits, targets = logits.flatten(0, 1), targets.flatten()
        loss = functional.cross_entropy(logits, targets, reduction=self.reduction)
        forms = {"scalar": loss, "tuple": (loss, logits), "mapping": {"loss": loss}, "row": loss * torch.ones(2)}
        return forms.get(self.form)

def judge(logits, inputs):
    return functional.cross_entropy(logits.flatten(0, 1), inputs["targets"].flatten())

def judge_hf(outputs, inputs):
    return judge(outputs.logits, inputs)

def number():
    return 7
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the program above, which stands in the working folder."""
    name = f"small_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def test_exported_weights_have_the_names_of_the_own_model_even_those_that_are_tied(
    module: str, make_settings: MakeSettings
) -> None:
    model = {"kind": "target", "target": f"{module}:Small", "args": {"tied": True}}
    settings = make_settings(model=model, train={"steps": 2}, checkpoint={"every_steps": 2})
    parts = trained(settings).parts
    checkpoint = settings.run_dir / "checkpoints/step-00000002"
    with pytest.raises(TrainingError, match=f"whose model is custom code: model.target {module}:Small"):
        export(checkpoint, settings.run_dir / "out")
    export(checkpoint, settings.run_dir / "out", trusted=True)
    own = importlib.import_module(module).Small(tied=True)
    own.load_state_dict(load_file(settings.run_dir / "out/model.safetensors"))
    tokens = torch.arange(32).reshape(1, 32)
    assert torch.equal(own(tokens, tokens), parts.model.inner(tokens, tokens))  # type: ignore[operator]


def test_a_model_of_ones_own_learns_the_same_whatever_form_its_loss_has(
    module: str, make_settings: MakeSettings
) -> None:
    def curve(form: str, reduction: str = "mean", **sections: Any) -> list[float]:
        model = {"kind": "target", "target": f"{module}:Small", "args": {"form": form, "reduction": reduction}}
        changes = {"steps": 4, "loss_reduction": reduction, **sections.pop("train", {})}
        return trained(make_settings(model=model, train=changes, optimizer={"lr": 1e-2}, **sections)).losses

    first = curve("scalar")
    assert first[-1] < first[0] - 0.02
    # Micro batches of 2 have different numbers of targets; a mean of means would be another loss.
    assert curve("scalar", "sum") == pytest.approx(first, rel=1e-6)
    assert curve("tuple") == first
    assert curve("mapping") == first
    assert curve("scalar", efficiency={"gradient_checkpointing": True}) == first
    judged = curve("logits", train={"loss": f"{module}:judge"})
    assert judged == first


def test_a_loss_of_ones_own_takes_the_place_of_that_of_any_model(module: str, make_settings: MakeSettings) -> None:
    config = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 16}
    llama = {"kind": "hf", "architecture": "llama", "config": {**config, "vocab_size": 256}}
    gpt = {"layers": 1, "heads": 2, "hidden_size": 16}
    for model, judge in ((llama, "judge_hf"), (gpt, "judge")):
        short = {"steps": 3}
        own = trained(make_settings(model=model, train={**short, "loss": f"{module}:{judge}"})).losses
        assert own == pytest.approx(trained(make_settings(model=model, train=short)).losses, rel=1e-5)


@pytest.mark.parametrize(
    ("target", "args", "sections", "message"),
    [
        ("Gone", {}, {}, "model.target: .*:Gone cannot be imported"),
        ("Small", {"widht": 3}, {}, "model.target: .*:Small failed: TypeError: .*widht"),
        ("number", {}, {}, "model.target: .*:number gives int, which is not a torch.nn.Module"),
        ("Small", {}, {"train": {"loss": "nowhere:loss"}}, "train.loss: nowhere:loss cannot be imported"),
        (
            "Small",
            {"layers": 0},
            {"efficiency": {"gradient_checkpointing": True}},
            "efficiency.gradient_checkpointing works on the blocks of a model",
        ),
    ],
)
def test_a_model_that_cannot_be_made_or_split_is_refused(
    target: str, args: dict[str, Any], sections: dict[str, Any], message: str, module: str, make_settings: MakeSettings
) -> None:
    settings = make_settings(model={"kind": "target", "target": f"{module}:{target}", "args": args}, **sections)
    with pytest.raises(TrainingError, match=message):
        prepared_model(settings)


@pytest.mark.parametrize(
    ("form", "message"), [("none", "gives NoneType and not one number"), ("row", "gives a tensor of shape")]
)
def test_a_loss_that_is_not_one_number_is_refused(
    form: str, message: str, module: str, make_settings: MakeSettings
) -> None:
    model = {"kind": "target", "target": f"{module}:Small", "args": {"form": form}}
    with pytest.raises(TrainingError, match=f"the model {message}"):
        trained(make_settings(model=model, train={"steps": 1}))


def test_a_target_must_be_named() -> None:
    with pytest.raises(ValueError, match="target must name the model"):
        Recipe.model_validate({"model": {"kind": "target"}})


def test_adapters_find_linear_layers_that_are_named_like_other_modules(
    module: str, make_settings: MakeSettings
) -> None:
    model = {"kind": "target", "target": f"{module}:Small"}  # its blocks are layers.0 and layers.1, of 0 and 1 each
    settings = make_settings(model=model, peft={"kind": "lora"}, train={"steps": 1}, checkpoint={"every_steps": 1})
    parts = parts_of(settings)
    training = {name for name, each in parts.model.named_parameters() if each.requires_grad}
    assert training == {f"inner.layers.{block}.0.lora_{side}.default.weight" for block in (0, 1) for side in "AB"}
    trained(parts)
    export_adapters(settings.run_dir / "checkpoints/step-00000001", settings.run_dir / "adapters", trusted=True)
    config = json.loads((settings.run_dir / "adapters/adapter_config.json").read_text())
    assert sorted(config["target_modules"]) == ["layers.0.0", "layers.1.0"]
