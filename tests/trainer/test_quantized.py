"""QLoRA: frozen weights in 4 or 8 bits give the loss of the libraries put together by hand, and adapters learn."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.training import MakeSettings, parts_of, trained
from trainkit.errors import TrainingError
from trainkit.trainer.checkpoint.export import export, export_adapters, weights_format
from trainkit.trainer.loop import batches, split_micro
from trainkit.trainer.models.quantized import is_quantized
from trainkit.trainer.setup import Parts, prepared_model

pytestmark = [
    pytest.mark.needs("bitsandbytes>=0.50", "transformers>=5", "peft"),
    # peft's, on GPT-2's transposed layers, and on a name that transformers calls old
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.is_gradient_checkpointing.:FutureWarning"),
]
SIZES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2},
    "gpt2": {"n_layer": 2, "n_head": 2, "n_embd": 64, "n_positions": 64, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}
SIZES["gpt2"]["resid_pdrop"] = 0.0
SHORT: dict[str, Any] = {
    "peft": {"kind": "lora", "rank": 4},
    "train": {"steps": 4},
    "optimizer": {"lr": 1e-2},
    "schedule": {"warmup_steps": 0},
    "eval": {"every_steps": 0},
}


def random_model(name: str, **more: Any) -> dict[str, Any]:
    return {"kind": "hf", "architecture": name, "config": {**SIZES[name], "vocab_size": 256}, **more}


def adapters(parts: Parts) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in parts.model.named_parameters() if each.requires_grad}


@pytest.fixture
def make_folder(make_settings: MakeSettings, tmp_path: Path) -> Callable[[str], str]:
    """Saves a random model of an architecture, drawn from seed 1."""

    def make(name: str) -> str:
        torch.manual_seed(1)
        made: Any = prepared_model(make_settings(model=random_model(name)))
        made.inner.save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    return make


def loss_by_hand(folder: str, bits: int, tokens: torch.Tensor, targets: torch.Tensor) -> float:
    """What the libraries' documentation has people write, and the loss summed over targets."""
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    four = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.float32}
    config = BitsAndBytesConfig(load_in_4bit=True, **four) if bits == 4 else BitsAndBytesConfig(load_in_8bit=True)
    base = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map={"": "cpu"})
    base = prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
    lora = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")).train()
    logits = lora(input_ids=tokens).logits.flatten(0, 1).float()
    return float(torch.nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum"))


@pytest.mark.parametrize(("name", "bits"), [("llama", 4), ("llama", 8), ("gpt2", 4), ("gpt2", 8)])
def test_the_first_loss_is_that_of_the_libraries_put_together_by_hand(
    name: str, bits: int, make_settings: MakeSettings, make_folder: Callable[[str], str]
) -> None:
    folder = make_folder(name)
    model = {"kind": "hf", "path": folder, "quantize": bits}
    parts = parts_of(make_settings(model=model, **SHORT))
    inputs = split_micro(next(batches(parts, 0)), parts)[0]
    mine = float(parts.model.train()(**inputs))
    assert mine == loss_by_hand(folder, bits, inputs["tokens"], inputs["targets"])
    plain = parts_of(make_settings(model={**model, "quantize": 0}, **SHORT))
    assert 0 < abs(float(plain.model.train()(**inputs)) - mine) < 0.01 * mine


@pytest.mark.parametrize("bits", [4, 8])
def test_adapters_beside_quantised_weights_learn_evaluate_and_go_on_bit_equal(
    bits: int, make_settings: MakeSettings
) -> None:
    changes = {
        **SHORT,
        "train": {"steps": 6},
        "eval": {"every_steps": 2},
        "checkpoint": {"every_steps": 3, "keep": 0},
        "model": random_model("llama", quantize=bits),
    }
    settings = make_settings(**changes)
    parts = parts_of(settings)
    before = {name: each.detach().clone() for name, each in parts.model.named_parameters()}
    done, after = trained(parts), dict(parts.model.named_parameters())
    assert done.result["final_loss"] < 5.3 < 5.4 < done.losses[0]
    changed = {name for name, each in before.items() if not torch.equal(each, after[name])}
    assert changed == set(adapters(parts))
    assert all(each.dtype == torch.float32 for each in adapters(parts).values())
    folder = settings.run_dir / "checkpoints/step-00000003"
    again = parts_of(replace(make_settings(**changes), resume=folder))
    trained(again)
    assert all(torch.equal(each, adapters(again)[name]) for name, each in adapters(parts).items())


@pytest.mark.parametrize("bits", [4, 8])
def test_the_same_weights_give_the_same_model_drawn_or_read(
    bits: int, make_settings: MakeSettings, make_folder: Callable[[str], str]
) -> None:
    read = prepared_model(make_settings(model={"kind": "hf", "path": make_folder("gpt2"), "quantize": bits}))
    torch.manual_seed(1)
    drawn = prepared_model(make_settings(model=random_model("gpt2", quantize=bits)))
    tokens = torch.arange(40)[None]
    assert torch.equal(drawn.eval()(tokens), read.eval()(tokens))
    names = [name for name, each in drawn.named_modules() if is_quantized(each)]
    assert names == [name for name, each in read.named_modules() if is_quantized(each)]
    assert len(names) == 8
    assert all(".h." in name for name in names)  # neither embeddings nor the output layer


def test_packed_weights_count_as_parameters_and_take_their_own_bytes(make_settings: MakeSettings) -> None:
    plain, eight, four = (
        trained(make_settings(model=random_model("llama", quantize=bits), **SHORT)).result for bits in (0, 8, 4)
    )
    names = ("parameters", "frozen_parameters", "flops_per_token")
    assert [plain[name] for name in names] == [eight[name] for name in names] == [four[name] for name in names]
    held = [each["memory"][0]["anatomy"]["parameters"] for each in (plain, eight, four)]
    in_blocks = 2 * (4 * 64 * 64 + 3 * 64 * 96)
    assert held[0] - held[1] == 3 * in_blocks - 4 * 2 * (4 * 64 + 2 * 96 + 64)  # a scale for each row
    constants = held[2] - (held[0] - 4 * in_blocks + in_blocks // 2)
    assert in_blocks / 64 < constants < in_blocks / 64 + 14 * (2 * 16 + 256 + 8) * 4  # with the tables of each layer


def test_an_evaluation_changes_nothing_in_training(make_settings: MakeSettings) -> None:
    model = random_model("llama", quantize=4)
    seldom, often = (
        make_settings(model=model, **{**SHORT, "eval": {"every_steps": every, "batches": 1}}) for every in (0, 1)
    )
    assert trained(seldom).losses == trained(often).losses


@pytest.mark.e2e
@pytest.mark.parametrize("bits", [4, 8])
def test_recomputed_and_compiled_blocks_give_the_same_losses(bits: int, make_settings: MakeSettings) -> None:
    compiled = {"compile": {"enabled": True, "scope": "blocks", "backend": "aot_eager"}}
    found = []
    for efficiency in ({}, {"gradient_checkpointing": True}, compiled):
        settings = make_settings(model=random_model("llama", quantize=bits), efficiency=efficiency, **SHORT)
        found.append(trained(settings).losses)
    assert found[0] == found[1]
    assert found[2] == pytest.approx(found[0], rel=1e-6)


@pytest.mark.parametrize(("name", "bits"), [("llama", 4), ("gpt2", 8)])
def test_export_writes_what_was_trained_without_quantisation(
    name: str,
    bits: int,
    make_settings: MakeSettings,
    make_folder: Callable[[str], str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from transformers import AutoModelForCausalLM

    model = {"kind": "hf", "path": make_folder(name), "quantize": bits}
    settings = make_settings(model=model, checkpoint={"every_steps": 4}, **SHORT)
    parts = parts_of(settings)
    trained(parts)
    checkpoint = settings.run_dir / "checkpoints/step-00000004"
    assert weights_format(settings.recipe) == "bf16"
    export(checkpoint, tmp_path / "merged", dtype="fp32")
    told = capsys.readouterr().err
    assert f"the base model was quantised to {bits} bits: its weights are written dequantised, in fp32" in told
    config = json.loads((tmp_path / "merged/config.json").read_text())
    assert "quantization_config" not in config
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        mine = parts.model.eval()(tokens)
        read = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()(input_ids=tokens).logits
        untrained = AutoModelForCausalLM.from_pretrained(model["path"]).eval()(input_ids=tokens).logits
    torch.testing.assert_close(read, mine, rtol=1e-3, atol=2e-3)
    assert (untrained - mine).abs().max() > 0.05
    export_adapters(checkpoint, tmp_path / "adapters")
    onward = {"kind": "lora", "rank": 4, "path": str(tmp_path / "adapters")}
    again = parts_of(make_settings(model=model, **{**SHORT, "peft": onward}))
    assert torch.equal(again.model.eval()(tokens), mine)


def test_what_bitsandbytes_would_leave_as_it_is_is_refused(make_settings: MakeSettings, tmp_path: Path) -> None:
    sizes = {**SIZES["llama"], "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 256}
    model = {"kind": "hf", "architecture": "mixtral", "config": sizes, "quantize": 4}
    with pytest.raises(TrainingError, match=r"\d+% of the weights in this model's blocks are in linear layers"):
        prepared_model(make_settings(model=model))


def test_a_folder_of_quantised_weights_is_refused(
    make_settings: MakeSettings, make_folder: Callable[[str], str]
) -> None:
    folder = make_folder("llama")
    config = json.loads((Path(folder) / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (Path(folder) / "config.json").write_text(json.dumps(config))
    for bits in (0, 4):
        with pytest.raises(TrainingError, match="are already quantised"):
            prepared_model(make_settings(model={"kind": "hf", "path": folder, "quantize": bits}))


def test_nobody_is_asked_to_run_code_that_lies_beside_weights(
    make_settings: MakeSettings, make_folder: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", asked.append)
    folder = make_folder("gpt2")
    config = json.loads((Path(folder) / "config.json").read_text())
    config["auto_map"] = {"AutoModelForMaskedLM": "mine.Model"}
    (Path(folder) / "config.json").write_text(json.dumps(config))
    for bits in (0, 4):
        with pytest.raises(TrainingError, match="custom code"):
            prepared_model(make_settings(model={"kind": "hf", "path": folder, "task": "masked_lm", "quantize": bits}))
    assert asked == []
