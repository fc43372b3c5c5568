"""Every task, and models of the user's own, lose the same on any number of ranks, and resume to the same bits."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from strategy_runs import Case, Curve, write_corpus

from tests.warm_ranks import run_case

PROGRAM = """
from torch import nn
from torch.nn import functional

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(256, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(16, 256)
    def forward(self, tokens, targets):
        x = self.tokens(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return (functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten()),)
"""
CONFIG = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
BERT: dict[str, Any] = {"kind": "hf", "architecture": "bert", "task": "masked_lm", "mask_token": 256}
BERT["config"] = {**CONFIG, "vocab_size": 257}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS: dict[str, dict[str, Any]] = {
    "masked": {**BERT, "config": {**CONFIG, **NO_DROPOUT, "vocab_size": 257}},
    "own": {"kind": "target", "target": "small_model:Small"},
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "small_model.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "code"))
    write_corpus(tmp_path / "corpus")
    return tmp_path


@pytest.mark.e2e
@pytest.mark.parametrize("model", MODELS)
def test_a_task_loses_the_same_on_one_rank_and_sharded_over_two(model: str, here: Path) -> None:
    curves = []
    for strategy, ranks in (("single", 1), ("fsdp", 2)):
        case = Case({"kind": strategy}, ranks=ranks).changed(
            model=MODELS[model], train={"steps": 5}, eval={"every_steps": 5, "batches": 3}
        )
        curves.append(run_case(here / strategy, case, here / "corpus"))
    assert list(curves[1].losses.values()) == pytest.approx(list(curves[0].losses.values()), rel=2e-6)
    assert list(curves[1].eval_losses.values()) == pytest.approx(list(curves[0].eval_losses.values()), rel=2e-6)


@pytest.mark.e2e
def test_a_masked_model_with_workers_resumes_to_the_same_bits(here: Path) -> None:
    case = Case({"kind": "single"}, ranks=1).changed(
        model=BERT, data={"workers": 1, "sequence_length": 32, "include": "*.txt", "kind": "text",
                          "path": str(here / "corpus"), "cache": str(here / "cache")},
        train={"steps": 6}, checkpoint={"every_steps": 3}, eval={"every_steps": 0},
    )  # fmt: skip
    whole = run_case(here / "whole", case, here / "corpus")
    checkpoint = next((here / "whole" / "checkpoints").glob("step-*3"))
    again = run_case(here / "again", case, here / "corpus", resume=checkpoint)
    assert again.losses == {step: loss for step, loss in whole.losses.items() if step > 3}


SMALL = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 256}
T5: dict[str, Any] = {"kind": "hf", "architecture": "t5", "task": "seq2seq_lm", "config": {**SMALL, "dropout_rate": 0}}


@pytest.fixture
def pairs(here: Path) -> dict[str, Any]:
    """Sources with targets of very different lengths, so that ranks have batches of different sizes."""
    chance, path = random.Random(0), here / "pairs.jsonl"
    lengths = [(chance.randint(1, 40), chance.randint(1, 20)) for _ in range(120)]
    rows = (
        {"ask": "".join(chance.choices("abcdef", k=n)), "say": "".join(chance.choices("ghij", k=m))} for n, m in lengths
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {"source": "ask", "target": "say"}
    data = {"kind": "dataset", "path": str(path), "columns": columns, "prompt_prefix": "do: "}
    return {**data, "sequence_length": 32, "target_length": 16}


@pytest.fixture
def alone(here: Path, pairs: dict[str, Any]) -> tuple[Case, Curve]:
    changes: dict[str, Any] = {
        "model": T5,
        "data": pairs,
        "train": {"steps": 5},
        "eval": {"every_steps": 5, "batches": 3},
    }
    case = Case({"kind": "single"}, ranks=1).changed(**changes)
    return case, run_case(here / "single", case, here / "corpus")


@pytest.mark.e2e
def test_an_encoder_decoder_loses_the_same_under_every_strategy(alone: tuple[Case, Curve], here: Path) -> None:
    case, expected = alone
    for strategy in ("ddp", "fsdp", "zero3"):
        found = run_case(here / strategy, replace(case, strategy={"kind": strategy}, ranks=2), here / "corpus")
        assert list(found.losses.values()) == pytest.approx(list(expected.losses.values()), rel=2e-6), strategy
        assert list(found.norms.values()) == pytest.approx(list(expected.norms.values()), rel=2e-5), strategy
        assert list(found.eval_losses.values()) == pytest.approx(list(expected.eval_losses.values()), rel=2e-6), (
            strategy
        )
