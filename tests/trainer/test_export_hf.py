"""Exported models of transformers are what `from_pretrained` reads."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.trainer.sources import lines
from tests.trainer.tiny_llama import save_llama
from tests.trainer.tiny_tokenizer import NAMES
from tests.trainer.training import MakeSettings, trained
from trainkit.trainer.checkpoint.export import export, export_adapters
from trainkit.trainer.generate import Sampling, open_folder
from trainkit.trainer.metrics.predictions import write_result
from trainkit.trainer.settings import Settings

GPT2: dict[str, Any] = {  # its output layer shares the embedding's weights
    "kind": "hf",
    "architecture": "gpt2",
    "config": {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 256, "n_positions": 32},
}


def test_from_pretrained_reads_what_was_trained(make_settings: MakeSettings) -> None:
    transformers = pytest.importorskip("transformers")
    settings = make_settings(model=GPT2, train={"steps": 2}, checkpoint={"every_steps": 2})
    parts = trained(settings).parts
    export(settings.run_dir / "checkpoints/step-00000002", settings.run_dir / "out")
    read = transformers.AutoModelForCausalLM.from_pretrained(settings.run_dir / "out").eval()
    tokens = torch.arange(32).reshape(1, 32)
    with torch.no_grad():
        expected = parts.strategy.model.eval()(tokens)
        assert torch.equal(read(input_ids=tokens).logits, expected)
    assert (settings.run_dir / "out/model.safetensors").exists()


@pytest.mark.e2e
@pytest.mark.skipif(sys.platform != "linux", reason="needs limits on a process's files")
def test_nothing_but_a_failure_is_said_and_a_full_disk_leaves_nothing(make_settings: MakeSettings) -> None:
    import resource

    settings = make_settings(model=GPT2, train={"steps": 1}, checkpoint={"every_steps": 1})
    trained(settings)
    out = settings.run_dir / "out"

    free = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}

    def exported(limit: int) -> tuple[int, str, str]:
        words = ["--checkpoint", str(settings.run_dir / "checkpoints/step-00000001"), "--destination", str(out)]
        done = subprocess.run(
            [sys.executable, "-m", "trainkit.trainer.checkpoint", *words],
            env={**free, "PYTHONPATH": str(Path(__file__).parents[2])},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    code, said, trouble = exported(10_000)
    assert (code, said) == (1, "")
    [line] = trouble.splitlines()
    assert line.startswith(f"error: {out} cannot be written: ")
    assert "File too large" in line
    assert not any("out" in path.name for path in settings.run_dir.iterdir())
    assert exported(-1) == (0, "", "")


CHATS = [
    {"messages": [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on the mat"}]},
    {"messages": [{"role": "user", "content": "two and two"}, {"role": "assistant", "content": "the sum"}]},
] * 10


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_llama(tmp_path / "base", dtype="bfloat16")


def chatting(make_settings: MakeSettings, base: Path, **changes: Any) -> Settings:
    """Settings of LoRA on chats, whose checkpoint is made."""
    data = {"kind": "dataset", "path": str(lines(base.parent / "chats.jsonl", CHATS))}
    settings = make_settings(
        model={"kind": "hf", "path": str(base)},
        data={**data, "tokenizer": str(base), "sequence_length": 32},
        peft={"kind": "lora", "rank": 4},
        optimizer={"lr": 1e-2},
        train={"steps": 3},
        eval={"every_steps": 1},
        checkpoint={"every_steps": 3},
        **changes,
    )
    trained(settings)
    return settings


def test_the_folder_is_the_bases_with_what_was_learned(make_settings: MakeSettings, base: Path, tmp_path: Path) -> None:
    settings = chatting(make_settings, base)
    checkpoint, out = settings.run_dir / "checkpoints/step-00000003", tmp_path / "out"
    old = os.umask(0o027)
    try:
        export(checkpoint, out)
    finally:
        os.umask(old)
    assert {path.name for path in out.iterdir()} == {"README.md", *(path.name for path in base.iterdir())}
    for path in base.iterdir():
        if path.name not in ("config.json", "generation_config.json", "model.safetensors"):
            assert (out / path.name).read_bytes() == path.read_bytes()
    assert {stat.S_IMODE(path.stat().st_mode) for path in out.iterdir()} == {0o640}
    assert stat.S_IMODE(out.stat().st_mode) == 0o750
    weights = load_file(out / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert size_of(out) <= 1.01 * size_of(base) + 4096  # the card
    # A chat ends with another token than the base's texts, and what else the base says of generation stays.
    generation = json.loads((out / "generation_config.json").read_text())
    ends = [NAMES.index("<|end|>"), NAMES.index("<|im_end|>")]
    assert (generation["eos_token_id"], generation["temperature"]) == (ends, 0.6)
    export(checkpoint, tmp_path / "wide", dtype="fp32")
    assert {each.dtype for each in load_file(tmp_path / "wide/model.safetensors").values()} == {torch.float32}


def test_a_generation_config_that_transformers_would_not_write_stays_as_it_is(
    make_settings: MakeSettings, base: Path, tmp_path: Path
) -> None:
    content = '{"temperature":0.9, "eos_token_id":0}'  # without do_sample, as that of Llama 2
    (base / "generation_config.json").write_text(content)
    data = {"tokenizer": str(base)}
    settings = make_settings(
        model={"kind": "hf", "path": str(base)}, data=data, train={"steps": 1}, checkpoint={"every_steps": 1}
    )
    trained(settings)
    export(settings.run_dir / "checkpoints/step-00000001", tmp_path / "out")
    assert (tmp_path / "out/generation_config.json").read_text() == content
    model = open_folder(tmp_path / "out", torch.device("cpu"))
    assert model.answer(model.ids({"prompt": "the cat"}), Sampling(3)).text


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*"))


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # as peft calls it
def test_a_pipeline_writes_token_by_token_what_base_and_adapters_write(
    make_settings: MakeSettings, base: Path, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

    settings = chatting(make_settings, base)
    checkpoint = settings.run_dir / "checkpoints/step-00000003"
    export(checkpoint, tmp_path / "out", dtype="fp32")
    export_adapters(checkpoint, tmp_path / "adapters")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "adapters")  # which the adapters bring along
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(plain, tmp_path / "adapters").eval()
    chat = CHATS[0]["messages"][:1]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
    ends = {"eos_token_id": [0, 2]}
    prompt = {name: prompt[name] for name in ("input_ids", "attention_mask")}
    expected = adapted.generate(**prompt, **options, **ends)[0, prompt["input_ids"].shape[1] :].tolist()
    made = pipeline("text-generation", str(tmp_path / "out"))(chat, return_tensors=True, **options)
    assert made[0]["generated_token_ids"][prompt["input_ids"].shape[1] :] == expected


def test_the_model_card_says_what_was_trained_on_what_and_no_path_of_this_machine(
    make_settings: MakeSettings, base: Path, tmp_path: Path
) -> None:
    settings = chatting(make_settings, base)
    write_result(settings.run_dir / "result.json", {"data": "20 chats of 1,234 tokens (1 a|b)", "corpus": {"chats": 1}})
    export(settings.run_dir / "checkpoints/step-00000003", tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- trainkit\n---\n")
    assert r"| Data | chats.jsonl; 20 chats of 1,234 tokens (1 a\|b) |" in card
    assert "| Method | LoRA, rank 4, alpha 16 |" in card
    assert re.search(r"\| Evaluation loss \| \d\.\d{4} \(step 1\) → \d\.\d{4} \(step 3\) \|", card)
    assert f"torch {torch.__version__}" in card
    recipe = card.partition("```yaml\n")[2].partition("```")[0]
    assert yaml.safe_load(recipe)["model"] == {"kind": "hf", "path": "base"}
    assert str(tmp_path) not in card
    assert tmp_path.name not in card
