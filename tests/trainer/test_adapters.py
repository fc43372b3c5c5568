"""LoRA: only the adapters train, they can be merged and exported, and a run starts from some, or says why it cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load, load_file, save_file

from tests.trainer.training import MakeSettings, parts_of, trained
from trainkit.errors import TrainingError
from trainkit.recipe.schema import Recipe
from trainkit.trainer.checkpoint.export import export, export_adapters
from trainkit.trainer.data import SOURCES
from trainkit.trainer.loop import batches, split_micro
from trainkit.trainer.models.adapters import linear_layers, merge_adapters, write_adapters
from trainkit.trainer.settings import Settings
from trainkit.trainer.setup import Parts, agreed_values, describe, prepared_model

GPT2: dict[str, Any] = {
    "kind": "hf",
    "architecture": "gpt2",
    "config": {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 256, "n_positions": 32},
}
GPT: dict[str, Any] = {"kind": "gpt", "layers": 2, "heads": 2, "hidden_size": 32}
ROBERTA: dict[str, Any] = {  # its head has a layer of the name of some in its blocks
    "kind": "hf",
    "architecture": "roberta",
    "task": "sequence_classification",
    "config": {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32},
}
LABELS: dict[str, Any] = {"kind": "random", "samples": 32, "sequence_length": 8, "classes": 2, "low": 3, "high": 99}
# peft asks transformers by an old name; what a test does with both is no affair of trainkit's.
OLD_NAME = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
# Kernels may round otherwise where weights that were read from a file lie elsewhere in memory.
ROUNDING: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-7}
SHORT: dict[str, Any] = {"train": {"steps": 2}, "optimizer": {"lr": 1e-2}, "checkpoint": {"every_steps": 2}}
LORA: dict[str, Any] = {"kind": "lora", "rank": 4, "alpha": 12.0}


def changed_by_training(parts: Parts) -> set[str]:
    before = {name: value.clone() for name, value in parts.model.state_dict().items()}
    trained(parts)
    return {name for name, value in parts.model.state_dict().items() if not torch.equal(value, before[name])}


@pytest.mark.parametrize("model", [GPT, GPT2], ids=["gpt", "gpt2"])
def test_only_the_adapters_change_and_only_they_have_optimizer_state(
    model: dict[str, Any], make_settings: MakeSettings
) -> None:
    parts = parts_of(make_settings(model=model, peft={"kind": "lora", "rank": 4}, **SHORT))
    assert changed_by_training(parts) == {name for name in parts.model.state_dict() if "lora_" in name}
    optimizer: Any = parts.strategy
    count = parts.parameters
    assert sum(each.numel() for each in optimizer.optimizer.state) == count.training
    total = count.training + count.frozen
    assert f"{count.training:,} of {total:,} parameters training" in describe(parts)


def test_the_head_of_a_classifier_which_starts_anew_trains_beside_the_adapters(make_settings: MakeSettings) -> None:
    settings = make_settings(model={**ROBERTA, "architecture": "bert"}, data=LABELS, peft=LORA, **SHORT)
    heads = {name for name in changed_by_training(parts_of(settings)) if "lora_" not in name}
    assert heads == {"inner.classifier.weight", "inner.classifier.bias"}


@pytest.mark.parametrize("extra", [{}, {"rslora": True}, {"dora": True}])
def test_merged_adapters_give_the_same_outputs_under_the_names_of_the_model(
    extra: dict[str, bool], make_settings: MakeSettings
) -> None:
    parts = trained(make_settings(model=GPT, peft={"kind": "lora", **extra}, **SHORT)).parts
    tokens = torch.arange(20)[None]
    parts.model.eval()
    expected = parts.model(tokens)
    merge_adapters(parts.model)
    torch.testing.assert_close(parts.model(tokens), expected, rtol=1e-4, atol=1e-5)
    assert parts.model.state_dict().keys() == prepared_model(make_settings(model=GPT)).state_dict().keys()


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


def saved(settings: Settings) -> Path:
    return settings.run_dir / "checkpoints/step-00000002"


def test_a_base_from_the_hub_is_known_by_its_name_there(make_settings: MakeSettings, tmp_path: Path) -> None:
    folder = tmp_path / "hub/models--ada--tiny-2/snapshots" / ("a" * 40)
    prepared_model(make_settings(model=GPT2)).inner.save_pretrained(folder)  # type: ignore[operator, union-attr]
    settings = make_settings(model={"kind": "hf", "path": str(folder)}, peft=LORA)
    write_adapters(prepared_model(settings), settings.recipe, tmp_path, step=1)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("ada/tiny-2", "a" * 40)


@OLD_NAME
@pytest.mark.parametrize("extra", [{}, {"rslora": True}, {"dora": True}])
def test_peft_reads_exported_adapters_onto_their_base(
    extra: dict[str, bool], make_settings: MakeSettings, tmp_path: Path
) -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    prepared_model(make_settings(model=GPT2)).inner.save_pretrained(tmp_path / "base")  # type: ignore[operator, union-attr]
    model = {"kind": "hf", "path": str(tmp_path / "base")}
    settings = make_settings(model=model, peft={**LORA, **extra}, **SHORT)
    parts, weights = trained(settings).parts, tmp_path / "base/model.safetensors"
    weights.rename(tmp_path / "aside")
    export_adapters(saved(settings), tmp_path / "adapters")  # which needs no base: it may be of hundreds of gigabytes
    (tmp_path / "aside").rename(weights)
    export(saved(settings), tmp_path / "merged")
    assert {path.name for path in (tmp_path / "adapters").iterdir()} == {
        *("adapter_config.json", "adapter_model.safetensors"),
        *("README.md", "tokenizer.json", "tokenizer_config.json"),  # of bytes, as it was trained
    }
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    tokens = torch.arange(32).reshape(1, 32)
    with torch.no_grad():
        plain = base.eval()(input_ids=tokens).logits
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").eval()(input_ids=tokens).logits
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()(input_ids=tokens).logits
        torch.testing.assert_close(adapted, parts.model.eval()(tokens), **ROUNDING)
    torch.testing.assert_close(adapted, merged, rtol=1e-4, atol=1e-5)  # merging rounds the weights
    assert (adapted - plain).abs().max() > 1e-3
    config = json.loads((tmp_path / "adapters/adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["task_type"]) == (str(tmp_path / "base"), "CAUSAL_LM")


@OLD_NAME
def test_exported_adapters_of_a_classifier_bring_its_head(make_settings: MakeSettings, tmp_path: Path) -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    prepared_model(make_settings(model=ROBERTA, data=LABELS)).inner.save_pretrained(tmp_path / "base")  # type: ignore[operator, union-attr]
    model = {"kind": "hf", "path": str(tmp_path / "base"), "task": "sequence_classification"}
    settings = make_settings(model=model, data=LABELS, peft=LORA, **SHORT)
    parts = trained(settings).parts
    assert not [name for name in parts.model.state_dict() if "classifier" in name and "lora_" in name]
    export_adapters(saved(settings), tmp_path / "adapters")
    base = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    tokens = torch.arange(3, 11).reshape(1, 8)
    with torch.no_grad():
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").eval()(input_ids=tokens).logits
        torch.testing.assert_close(adapted, parts.model.eval()(tokens), **ROUNDING)
    assert "base_model.model.classifier.dense.weight" in load_file(tmp_path / "adapters/adapter_model.safetensors")


@pytest.mark.parametrize(("model", "more"), [(GPT, {}), (ROBERTA, {"data": LABELS})])
def test_a_run_that_starts_from_adapters_starts_with_the_loss_of_the_model_they_came_from(
    model: dict[str, Any], more: dict[str, Any], make_settings: MakeSettings, tmp_path: Path
) -> None:
    settings = make_settings(model=model, peft=LORA, **SHORT, **more)
    first = trained(settings).parts
    export_adapters(saved(settings), tmp_path / "adapters")
    onward = make_settings(model=model, peft={**LORA, "path": str(tmp_path / "adapters")}, **SHORT, **more)
    second = parts_of(onward)
    inputs = split_micro(next(batches(second, 0)), second)[0]
    untrained = parts_of(settings)
    with torch.no_grad():
        losses = [float(parts.model.eval()(**inputs)) for parts in (first, second, untrained)]
    assert losses[0] == losses[1] != losses[2]
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)
        assert one.requires_grad == other.requires_grad


def test_adapters_of_a_native_model_say_which_model_they_stand_beside(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    settings = make_settings(peft=LORA, **SHORT)
    parts = trained(settings).parts
    export_adapters(saved(settings), tmp_path / "adapters")
    config = json.loads((tmp_path / "adapters/config.json").read_text())
    assert (config["model"]["kind"], config["seed"]) == ("gpt", settings.recipe.train.seed)
    torch.manual_seed(config["seed"])
    base = prepared_model(make_settings())
    tokens = torch.arange(20)[None]
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").eval()
    torch.testing.assert_close(adapted(tokens), parts.model.eval()(tokens), **ROUNDING)


def test_a_run_without_adapters_has_none_to_export(make_settings: MakeSettings, tmp_path: Path) -> None:
    settings = make_settings(**SHORT)
    trained(settings)
    with pytest.raises(TrainingError, match="belongs to a run without adapters"):
        export_adapters(saved(settings), tmp_path / "adapters")
    assert not (tmp_path / "adapters").exists()


@pytest.fixture
def exported(make_settings: MakeSettings, tmp_path: Path) -> Path:
    """Adapters of rank 4 beside every layer of the small native model."""
    settings = make_settings(peft=LORA, **SHORT)
    trained(settings)
    export_adapters(saved(settings), tmp_path / "adapters")
    return tmp_path / "adapters"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"rank": 8, "alpha": 1.5},
            r"rank is 8 in the recipe and 4 there; peft.alpha is 1.5 in the recipe and 12 there",
        ),
        ({"dora": True}, "peft.dora is 1 in the recipe and 0 there"),
        (
            {"target_modules": ["qkv"]},
            "the recipe adapts qkv, and the adapters in .* are of mlp_in, mlp_out, out, qkv",
        ),
    ],
)
def test_adapters_that_are_others_than_the_recipe_says_are_refused_with_both(
    changes: dict[str, Any], told: str, exported: Path, make_settings: MakeSettings
) -> None:
    with pytest.raises(TrainingError, match=told):
        prepared_model(make_settings(peft={**LORA, **changes, "path": str(exported)}))


def test_adapters_of_another_model_or_kind_are_refused(exported: Path, make_settings: MakeSettings) -> None:
    asked = {**LORA, "path": str(exported)}
    with pytest.raises(
        TrainingError, match=r"another model: their blocks\.0\S+ is \(4, 32\), and this model's \(4, 16\)"
    ):
        prepared_model(make_settings(model={**GPT, "hidden_size": 16}, peft=asked))
    with pytest.raises(TrainingError, match=r"adapts blocks\.2\.\S+, .* are of no others"):
        prepared_model(make_settings(model={**GPT, "layers": 3}, peft=asked))
    config = json.loads((exported / "adapter_config.json").read_text())
    (exported / "adapter_config.json").write_text(json.dumps({**config, "init_lora_weights": "pissa", "bias": "all"}))
    with pytest.raises(TrainingError, match='made with bias "all", init_lora_weights "pissa"'):
        prepared_model(make_settings(peft=asked))
    (exported / "adapter_config.json").write_text(json.dumps({**config, "peft_type": "IA3"}))
    with pytest.raises(TrainingError, match="does not describe LoRA adapters"):
        prepared_model(make_settings(peft=asked))


def test_ranks_that_would_start_from_other_adapters_do_not_agree(exported: Path, make_settings: MakeSettings) -> None:
    settings = make_settings(peft={**LORA, "path": str(exported)})
    source = SOURCES["text"](settings.recipe, settings.run_dir)
    here = agreed_values(settings, source, 1)
    weights = exported / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.unlink()
    gone = agreed_values(settings, source, 1)
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    other = agreed_values(settings, source, 1)
    assert len({str(each["adapters in peft.path"]) for each in (here, gone, other)}) == 3
    assert {name for name in here if here[name] != other[name]} == {"adapters in peft.path"}


def test_missing_and_damaged_files_of_adapters_are_named(exported: Path, make_settings: MakeSettings) -> None:
    settings = make_settings(peft={**LORA, "path": str(exported)})
    weights = exported / "adapter_model.safetensors"
    whole = weights.read_bytes()
    content = load(whole)
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TrainingError, match=r"adapter_model\.safetensors is damaged"):
        prepared_model(settings)
    save_file({**content, "base_model.model.head.weight": torch.zeros(2)}, weights)
    with pytest.raises(TrainingError, match=r"holds head\.weight besides"):
        prepared_model(settings)
    weights.unlink()
    with pytest.raises(TrainingError, match=r"there is no .*adapter_model\.safetensors"):
        prepared_model(settings)
    (exported / "adapter_config.json").write_text("{")
    with pytest.raises(TrainingError, match=r"adapter_config\.json is no JSON"):
        prepared_model(settings)
    (exported / "adapter_config.json").unlink()
    with pytest.raises(TrainingError, match=r"there is no .*adapter_config\.json"):
        prepared_model(settings)
