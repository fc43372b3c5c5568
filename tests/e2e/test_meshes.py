"""Copies, shards, experts, parts of matrices and of samples on several ranks: the losses of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from strategy_runs import Case, Curve, largest_difference, write_corpus

from tests.conftest import Trainkit
from tests.warm_ranks import run_case

pytestmark = pytest.mark.needs("torch>=2.7")  # before, FSDP2 has no CPU
DOUBLE = (str(Path(__file__).parent / "programs" / "double.py"),)
SETTINGS: dict[str, Any] = {
    "model": {"layers": 2, "heads": 4, "hidden_size": 32, "moe": {"experts": 4, "top_k": 2, "every": 2}},
    "train": {"steps": 8},
    "eval": {"every_steps": 8},
    "checkpoint": {"every_steps": 4, "keep": 0},
}
HYBRID: dict[str, Any] = {"sharding": "hybrid_shard", "replicate": 2}


def case(ranks: int, experts: int = 1, **strategy: Any) -> Case:
    """A case of fsdp; experts: over how many ranks they are shared out."""
    model = {**SETTINGS["model"], "moe": {**SETTINGS["model"]["moe"], "parallel": experts}}
    return Case({"kind": "fsdp", **strategy}, ranks, {**SETTINGS, "model": model})


CASES = {
    "single": Case({"kind": "single"}, 1, SETTINGS),
    "copies of shards": case(4, **HYBRID),
    "matrices": case(2, tensor=2),
    "matrices and shards": case(4, tensor=2),
    "experts": case(2, experts=2),
    "experts and shards": case(4, experts=2, sharding="shard_grad_op", prefetch=2).changed(
        efficiency={"gradient_checkpointing": {"every": 1, "selective": True}}
    ),
    "experts by size": case(2, experts=2, auto_wrap="size", min_params=1000, prefetch=2).changed(
        efficiency={"gradient_checkpointing": True}
    ),
    "matrices in four": case(4, tensor=4, auto_wrap="none"),
    "all": case(8, experts=2, tensor=2, **HYBRID),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text") / "corpus"
    write_corpus(folder)
    return folder


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Curve]]:
    """An uninterrupted run of each case, in 64 bits, with a checkpoint after step 4."""
    folders = {name: tmp_path_factory.mktemp("runs") / "run" for name in CASES}
    return {name: (folder, run_case(folder, CASES[name], corpus, program=DOUBLE)) for name, folder in folders.items()}


@pytest.mark.parametrize("name", [name for name in CASES if name != "single"])
def test_losses_are_those_of_one_process(name: str, whole: dict[str, tuple[Path, Curve]]) -> None:
    one, spread = whole["single"][1], whole[name][1]
    assert len(one.losses) == 8
    assert largest_difference(one.losses, spread.losses) < 1e-9
    assert largest_difference(one.norms, spread.norms) < 1e-9
    assert largest_difference(one.eval_losses, spread.eval_losses) < 1e-6  # which are summed in 32 bits


DENSE: dict[str, Any] = {**SETTINGS, "model": {"layers": 2, "heads": 4, "hidden_size": 32}}
ODD: dict[str, Any] = {"data": {"sequence_length": 31}}  # which no number of parts divides
CHECKPOINTED: dict[str, Any] = {"efficiency": {"gradient_checkpointing": True}}
LLAMA: dict[str, Any] = {
    "kind": "hf",
    "architecture": "llama",
    "config": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 300,
    },
}


def write_rows(folder: Path) -> dict[str, Any]:
    """Rows of short texts, several of which make a sample; the data section that reads them."""
    texts = ("ab" * (number % 9 + 1) + "c" * (number % 5 + 1) for number in range(300))
    (folder / "rows.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    path = str(folder / "rows.jsonl")
    return {"kind": "dataset", "path": path, "packing": "isolated", "sequence_length": 30, "validation_path": path}


@pytest.mark.parametrize("name", ["gpt", "gpt of several texts", "llama", "llama of several texts"])
def test_samples_in_parts_have_the_losses_of_whole_ones(name: str, corpus: Path, tmp_path: Path) -> None:
    model = {"model": LLAMA} if name.startswith("llama") else {}
    data = {"data": write_rows(tmp_path)} if "several" in name else ODD
    changes = {**DENSE, **CHECKPOINTED, **model, **data, "checkpoint": {"every_steps": 0, "at_end": False}}
    one = run_case(tmp_path / "one", Case({"kind": "single"}, 1, changes), corpus, program=DOUBLE)
    cases = {"parts": (2, {"context": 2}), "parts and shards": (4, {"context": 2, "prefetch": 2})}
    if data is ODD:
        cases["parts of matrices, too"] = (4, {"context": 2, "tensor": 2})
    for place, (ranks, strategy) in cases.items():
        spread = run_case(tmp_path / place, Case({"kind": "fsdp", **strategy}, ranks, changes), corpus, program=DOUBLE)
        assert largest_difference(one.losses, spread.losses) < 1e-9
        assert largest_difference(one.norms, spread.norms) < 1e-9
        assert largest_difference(one.eval_losses, spread.eval_losses) < 1e-6


def test_in_32_bits_they_are_within_its_digits(corpus: Path, tmp_path: Path) -> None:
    one, spread = (run_case(tmp_path / name, CASES[name], corpus) for name in ("single", "all"))
    assert largest_difference(one.losses, spread.losses) < 1e-5


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        *(("single", "all"), ("all", "single"), ("matrices and shards", "experts and shards")),
        *(("experts", "matrices in four"), ("copies of shards", "matrices"), ("all", "copies of shards")),
    ],
)
def test_a_checkpoint_goes_on_in_another_mesh(
    writer: str, reader: str, whole: dict[str, tuple[Path, Curve]], corpus: Path, tmp_path: Path
) -> None:
    folder, curve = whole[writer]
    checkpoint = folder / "checkpoints/step-00000004"
    resumed = run_case(tmp_path / "run", CASES[reader], corpus, resume=checkpoint, program=DOUBLE)
    rest = {step: loss for step, loss in curve.losses.items() if step > 4}
    assert largest_difference(rest, resumed.losses) < 1e-9


def test_the_export_is_that_of_one_process(
    whole: dict[str, tuple[Path, Curve]], trainkit: Trainkit, tmp_path: Path
) -> None:
    tensors: list[dict[str, torch.Tensor]] = []
    for name in ("single", "all"):
        out = tmp_path / name
        done = trainkit("export", str(whole[name][0] / "checkpoints/step-00000008"), str(out))
        assert done.returncode == 0, done.stderr
        with safe_open(next(out.glob("*.safetensors")), "pt") as file:
            tensors.append({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118
    one, spread = tensors
    assert one.keys() == spread.keys()
    for key, values in one.items():
        torch.testing.assert_close(spread[key], values, rtol=1e-6, atol=1e-9)


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 16},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8},
    "granite": {},
    "olmo": {},
    "phi": {"qk_layernorm": True},
    "smollm3": {},
    "starcoder2": {},
}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_models_of_transformers_in_parts_of_matrices_and_of_samples(
    architecture: str, corpus: Path, tmp_path: Path
) -> None:
    config = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 300,
        "pad_token_id": 0,
        **FAMILIES[architecture],
    }
    changes: dict[str, Any] = {
        "model": {"kind": "hf", "architecture": architecture, "config": config},
        "train": {"steps": 3},
        "eval": {"every_steps": 0},
    }
    strategies: dict[str, dict[str, Any]] = {"tensor": {"tensor": 2}}
    if architecture not in ("mistral", "gemma2", "gemma3_text"):  # which have windows here
        strategies["context"] = {"context": 2}
    one = run_case(tmp_path / "one", Case({"kind": "single"}, 1, changes), corpus, program=DOUBLE)
    for name, strategy in strategies.items():
        spread = run_case(tmp_path / name, Case({"kind": "fsdp", **strategy}, 2, changes), corpus, program=DOUBLE)
        assert largest_difference(one.losses, spread.losses) < 1e-9
        assert largest_difference(one.norms, spread.norms) < 1e-9
