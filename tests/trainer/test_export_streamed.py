"""An export that holds one tensor at a time writes what transformers writes of the whole model, bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.trainer.training import MakeSettings, trained
from trainkit.errors import TrainingError
from trainkit.trainer.checkpoint import export as exporting
from trainkit.trainer.checkpoint.export import export, trained_model, weights_format
from trainkit.trainer.checkpoint.shards import Shards, weight_files
from trainkit.trainer.generate import Sampling, open_folder
from trainkit.trainer.models.adapters import merge_adapters
from trainkit.trainer.models.base import cast_weights
from trainkit.trainer.optim import DTYPES

transformers = pytest.importorskip("transformers")
ROPE = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 256}
WIDTH = {"hidden_size": 16, "intermediate_size": 32}
MOE = {**ROPE, **WIDTH, "num_key_value_heads": 2}
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 256, "n_positions": 64},
    "llama": {**ROPE, **WIDTH},
    "mixtral": {**MOE, "num_local_experts": 4},
    "qwen3_moe": {**MOE, "moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2},
    "t5": {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 2, "num_heads": 2, "vocab_size": 256},
    "bert": {**WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 256},
}
TASKS = {"t5": "seq2seq_lm", "bert": "masked_lm"}
MAKERS = {
    "causal_lm": "AutoModelForCausalLM",
    "seq2seq_lm": "AutoModelForSeq2SeqLM",
    "masked_lm": "AutoModelForMaskedLM",
}
LABELS = {"kind": "random", "samples": 16, "sequence_length": 16, "low": 3, "high": 256, "classes": 2}
PAIRS = {"kind": "random", "samples": 16, "sequence_length": 16, "low": 3, "high": 256, "target_length": 8}


def folder_of(name: str, folder: Path, dtype: str = "float32") -> Path:
    """A folder of a model with random weights."""
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(name, **SIZES[name])
    model = getattr(transformers, MAKERS[TASKS.get(name, "causal_lm")]).from_config(config)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def checkpoint_of(make_settings: MakeSettings, **changes: Any) -> Path:
    short: dict[str, Any] = {"train": {"steps": 1}, "optimizer": {"lr": 1e-2}, "checkpoint": {"every_steps": 1}}
    settings = make_settings(**short, **changes)
    trained(settings)
    return settings.run_dir / "checkpoints/step-00000001"


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    files = weight_files(folder) or {}
    return {name: each for file in {*files.values()} for name, each in load_file(file).items()}


def compare(checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: str = "") -> None:
    """Both ways, and that the streamed one never builds the model."""
    model, recipe, _ = trained_model(checkpoint)
    if recipe.peft.kind == "lora":
        merge_adapters(model)
    inner: Any = model.inner
    cast_weights(inner, DTYPES[dtype or weights_format(recipe)])
    inner.save_pretrained(folder / "whole")
    monkeypatch.setattr(exporting, "_in_memory", None)
    export(checkpoint, folder / "streamed", dtype=dtype, shard_bytes=3000)
    whole, streamed = tensors_in(folder / "whole"), tensors_in(folder / "streamed")
    assert streamed.keys() == whole.keys()
    for name, each in whole.items():
        assert (streamed[name].dtype, streamed[name].shape) == (each.dtype, each.shape), name
        assert torch.equal(streamed[name], each), name
    ours, theirs = (json.loads((folder / each / "config.json").read_text()) for each in ("streamed", "whole"))
    assert ours == theirs
    read = getattr(transformers, MAKERS[recipe.model.task]) if recipe.model.task in MAKERS else None  # type: ignore[union-attr]
    if read is not None:
        found = read.from_pretrained(folder / "streamed", output_loading_info=True)
        assert not found[1]["missing_keys"] | found[1]["unexpected_keys"]
        for name, each in found[0].state_dict().items():
            assert torch.equal(each, inner.state_dict()[name]), name


@pytest.mark.parametrize("name", [*SIZES])
def test_models_of_every_form(
    name: str, make_settings: MakeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = TASKS.get(name, "causal_lm")
    model: dict[str, Any] = {"kind": "hf", "architecture": name, "task": task, "config": SIZES[name]}
    if task == "masked_lm":
        model["mask_token"] = 1
    more = {"data": PAIRS} if task == "seq2seq_lm" else {}
    compare(checkpoint_of(make_settings, model=model, **more), tmp_path, monkeypatch, "bf16")


@pytest.mark.parametrize(
    ("name", "dtype", "model", "peft"),
    [
        ("mixtral", "float32", {}, {}),
        ("llama", "bfloat16", {}, {"rank": 2}),
        ("llama", "float32", {}, {"rank": 2, "rslora": True, "dora": True, "target_modules": ["q_proj", "up_proj"]}),
        ("gpt2", "float32", {}, {"rank": 2}),
        ("mixtral", "bfloat16", {}, {"rank": 2, "target_modules": ["q_proj", "o_proj"]}),
        ("llama", "bfloat16", {"quantize": 4}, {"rank": 2, "target_modules": ["q_proj"]}),
        ("gpt2", "float32", {"quantize": 8}, {"rank": 2}),
    ],
    ids=["full", "lora", "dora", "conv1d", "experts", "4-bit", "8-bit-conv1d"],
)
def test_models_of_a_folder_and_adapters_merged_into_them(
    name: str,
    dtype: str,
    model: dict[str, Any],
    peft: dict[str, Any],
    make_settings: MakeSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = folder_of(name, tmp_path / "base", dtype)
    changes: dict[str, Any] = {"peft": {"kind": "lora", **peft}} if peft else {}
    checkpoint = checkpoint_of(make_settings, model={"kind": "hf", "path": str(base), **model}, **changes)
    compare(checkpoint, tmp_path, monkeypatch)
    assert tensors_in(tmp_path / "streamed").keys() == tensors_in(base).keys()


def test_a_new_head_on_a_folders_body(
    make_settings: MakeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = folder_of("llama", tmp_path / "base")
    model = {"kind": "hf", "path": str(base), "task": "sequence_classification", "config": {"pad_token_id": 0}}
    checkpoint = checkpoint_of(make_settings, model=model, data=LABELS, peft={"kind": "lora", "rank": 2})
    compare(checkpoint, tmp_path, monkeypatch)


def test_another_base_is_refused_before_anything_is_written(make_settings: MakeSettings, tmp_path: Path) -> None:
    base = folder_of("llama", tmp_path / "base")
    model = {"kind": "hf", "path": str(base)}
    checkpoint = checkpoint_of(make_settings, model=model, peft={"kind": "lora", "rank": 2})
    weights = {name: each + 1 for name, each in tensors_in(base).items()}
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(TrainingError, match="adapters without their base model"):
        export(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_native_gpt_is_written_in_files_of_a_size(make_settings: MakeSettings, tmp_path: Path) -> None:
    gpt = {"kind": "gpt", "layers": 2, "heads": 2, "hidden_size": 32}
    checkpoint = checkpoint_of(make_settings, model=gpt)
    export(checkpoint, tmp_path / "one")
    export(checkpoint, tmp_path / "many", shard_bytes=40_000)
    one, many = tensors_in(tmp_path / "one"), tensors_in(tmp_path / "many")
    assert one.keys() == many.keys()
    assert all(torch.equal(each, many[name]) for name, each in one.items())
    files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert files == [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    assert len(files) > 1
    assert all((tmp_path / "many" / file).stat().st_size < 42_000 for file in files)
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in one.values())
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "many")
    assert torch.equal(read.state_dict()["transformer.wte.weight"], one["transformer.wte.weight"])


def test_experts_in_a_format_of_our_own_answer_from_several_files(make_settings: MakeSettings, tmp_path: Path) -> None:
    gpt = {"kind": "gpt", "layers": 2, "heads": 2, "hidden_size": 32, "moe": {"experts": 2}}
    checkpoint = checkpoint_of(make_settings, model=gpt)
    for name, size in (("one", 10**9), ("many", 40_000)):
        export(checkpoint, tmp_path / name, shard_bytes=size)
    models = [open_folder(tmp_path / name, torch.device("cpu")) for name in ("one", "many")]
    answers = [each.answer(each.ids({"prompt": "the "}), Sampling(8, temperature=0)).text for each in models]
    assert answers[0] == answers[1]


def test_a_file_is_that_of_safetensors_byte_by_byte(tmp_path: Path) -> None:
    tensors = {"b.weight": torch.randn(3, 5), "a": torch.randn(7), "c": torch.ones(4, dtype=torch.int64)}
    tensors |= {
        "ä": torch.tensor(2.5),
        "half": torch.randn(3).bfloat16(),
        "yes": torch.tensor([True]),
        "e": torch.ones(0),
    }
    save_file(tensors, tmp_path / "theirs", {"format": "pt"})
    shards = Shards(tmp_path, {name: each.to("meta") for name, each in tensors.items()}, 1000, {"format": "pt"})
    for name, each in reversed(tensors.items()):
        shards.write(name, each)
    shards.finish()
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_a_tensor_that_does_not_come_or_is_another_is_an_error(tmp_path: Path) -> None:
    shards = Shards(tmp_path, {"a": torch.empty(2, device="meta"), "b": torch.empty(2, device="meta")}, 1000, {})
    shards.write("a", torch.ones(2))
    with pytest.raises(ValueError, match="b is not there"):
        shards.finish()
    with pytest.raises(ValueError, match=r"b is torch\.float64"):
        shards.write("b", torch.ones(2, dtype=torch.float64))
