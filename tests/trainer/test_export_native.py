"""The exported native GPT is what transformers loads as GPT-2, with a tokenizer of bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.training import MakeSettings, trained
from trainkit.trainer.checkpoint.export import export
from trainkit.trainer.data.source import sample_length

transformers = pytest.importorskip("transformers")
SHORT: dict[str, Any] = {"train": {"steps": 2}, "optimizer": {"lr": 1e-2}, "checkpoint": {"every_steps": 2}}
GPT: dict[str, Any] = {"kind": "gpt", "layers": 3, "heads": 4, "hidden_size": 32}
TEXT = "def f(ä):\n\n    return '€😀'\x00\t  it's <|endoftext|> 1,000  "


@pytest.mark.parametrize(("attention", "peft"), [("sdpa", {"kind": "lora", "rank": 2}), ("eager", {})])
def test_logits_are_those_of_the_trained_model(
    attention: str, peft: dict[str, Any], make_settings: MakeSettings, tmp_path: Path
) -> None:
    model = {**GPT, "dropout": 0.1}
    settings = make_settings(model=model, efficiency={"attention": attention}, peft=peft, **SHORT)
    parts = trained(settings).parts
    export(settings.run_dir / "checkpoints/step-00000002", tmp_path / "out")
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(read).__name__ == "GPT2LMHeadModel"
    tokens = torch.randint(0, 256, (2, sample_length(settings.recipe)))
    with torch.no_grad():
        torch.testing.assert_close(read(input_ids=tokens).logits, parts.model.eval()(tokens), rtol=0, atol=1e-5)
    assert not any("lm_head" in name for name in load_file(tmp_path / "out/model.safetensors")), "tied, so written once"


def test_a_pipeline_reads_bytes_and_ends_within_the_models_places(make_settings: MakeSettings, tmp_path: Path) -> None:
    settings = make_settings(model=GPT, **SHORT)
    parts = trained(settings).parts
    export(settings.run_dir / "checkpoints/step-00000002", tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer(TEXT)["input_ids"] == list(TEXT.encode())
    assert tokenizer.decode(list(TEXT.encode())) == TEXT
    generate = transformers.pipeline("text-generation", str(tmp_path / "out"))
    (found,) = generate("the quick", do_sample=False)
    ids = list(b"the quick")
    while len(ids) < sample_length(settings.recipe):
        with torch.no_grad():
            ids.append(int(parts.model.eval()(torch.tensor([ids]))[0, -1].argmax()))
    assert found["generated_text"] == bytes(ids).decode("utf-8", "replace")


def test_the_end_of_texts_is_the_tokenizers(
    make_settings: MakeSettings, make_tokenizer: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_tokenizer()
    data = {"tokenizer": str(folder)}
    settings = make_settings(model={**GPT, "vocab_size": 300}, data=data, **SHORT)
    trained(settings)
    export(settings.run_dir / "checkpoints/step-00000002", tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / name).read_text())["eos_token_id"] == tokenizer.eos_token_id
    for path in folder.iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


def test_experts_which_transformers_cannot_express_keep_a_format_of_our_own(
    make_settings: MakeSettings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = make_settings(model={**GPT, "moe": {"experts": 2}}, **SHORT)
    parts = trained(settings).parts
    export(settings.run_dir / "checkpoints/step-00000002", tmp_path / "out")
    assert "transformers has no class for a native GPT with experts" in capsys.readouterr().err
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["model_type"], config["model"]["moe"]["experts"]) == ("trainkit-gpt", 2)
    written = load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(tensor, written[name]) for name, tensor in parts.model.state_dict().items())
