"""From a file of one's own to a model that answers, in a clean folder with an empty home: each way as one types it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_models import save_model

from tests.conftest import Trainkit
from tests.hub_server.server import Hub

ANSWER = "the cat sat on the mat"
QUESTIONS = ("what is the sum of two and two", "what is on the mat", "the cat", "what is two and two")


def write_rows(path: Path, rows: Sequence[object]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.fixture
def ok(trainkit: Trainkit) -> Any:
    """Call `trainkit WORDS…`, which succeeds; what it printed."""

    def call(*words: str, **more: Any) -> str:
        done = trainkit(*words, **more)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    return call


def recipe_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


def test_chats_and_a_model_of_the_hub_become_one_that_answers(ok: Any, tmp_path: Path, hub: Hub) -> None:
    hub.add("somebody/tiny-chat", save_model(tmp_path / "model", "llama"))
    rows = [{"conversations": [{"from": "human", "value": each}, {"from": "gpt", "value": ANSWER}]}
            for each in QUESTIONS * 3]  # fmt: skip
    (tmp_path / "chats.json").write_text(json.dumps(rows))
    given = ("model.path=somebody/tiny-chat", "data.path=chats.json", "peft.kind=lora", "peft.rank=16",
             "optimizer.lr=2e-2", "train.epochs=20", "batch.global=4")  # fmt: skip
    ok("config", "--defaults", *(word for each in given for word in ("--set", each)), "--output", "chat.yaml")
    ok("check", "chat.yaml")
    shown = ok("run", "chat.yaml", environ=hub.environment)
    assert "34,816 of 155,968 parameters training" in shown
    asked = (QUESTIONS[0], "--temperature", "0", "--max-new-tokens", "20")
    assert ok("generate", "chat", *asked, environ=hub.environment).strip() == ANSWER
    ok("export", "chat", "OUT", environ=hub.environment)
    assert ok("generate", "OUT", *asked).strip() == ANSWER  # without the Hub


def test_a_table_becomes_a_classifier(ok: Any, tmp_path: Path) -> None:
    save_model(tmp_path / "bert", "bert")
    lines = [f"{text},{label}" for text, label in ((ANSWER, "story"), ("what is the sum of two and two", "sum"))]
    (tmp_path / "labels.csv").write_text("\n".join(["text,label", *lines * 20, ""]))
    ok("config", "--defaults", "--set", "model.path=bert", "--set", "data.path=labels.csv", "--output", "sorter.yaml")
    assert recipe_of(tmp_path / "sorter.yaml")["model"]["task"] == "sequence_classification"
    ok("run", "sorter.yaml", "optimizer.lr=1e-3", "train.epochs=8")
    ok("export", "sorter", "OUT")
    for model in ("sorter", "OUT"):
        assert ok("generate", model, "the cat sat on").split()[0] == "story"
        assert ok("generate", model, "what is two").split()[0] == "sum"


def test_instructions_teach_an_encoder_decoder(ok: Any, tmp_path: Path) -> None:
    save_model(tmp_path / "t5", "t5")
    rows = [{"instruction": each, "input": "", "output": ANSWER} for each in QUESTIONS * 5]
    write_rows(tmp_path / "alpaca.jsonl", rows)
    ok("config", "--defaults", "--set", "model.path=t5", "--set", "data.path=alpaca.jsonl", "--output", "writer.yaml")
    assert recipe_of(tmp_path / "writer.yaml")["model"]["task"] == "seq2seq_lm"
    ok("run", "writer.yaml", "optimizer.lr=1e-2", "train.epochs=40")
    asked = (QUESTIONS[0], "--temperature", "0", "--max-new-tokens", "20")
    assert ok("generate", "writer", *asked).strip() == ANSWER
    ok("export", "writer", "OUT")
    assert ok("generate", "OUT", *asked).strip() == ANSWER


def test_text_of_ones_own_becomes_a_small_gpt(ok: Any, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text(f"{ANSWER}.\n" * 2000)
    small = ("model.hidden_size=64", "model.layers=2", "data.sequence_length=32", "optimizer.lr=3e-3")
    given = ("data.path=corpus.txt", "train.steps=60", *small)
    ok("config", "--defaults", *(word for each in given for word in ("--set", each)), "--output", "text.yaml")
    assert "model" in recipe_of(tmp_path / "text.yaml")
    ok("run", "text.yaml")
    asked = ("the cat sat on", "--temperature", "0", "--max-new-tokens", "8")
    assert "the mat" in ok("generate", "text", *asked)
    ok("export", "text", "OUT")
    assert "the mat" in ok("generate", "OUT", *asked)
