"""`trainkit data`: what rows are, how they are divided, what of them is learned; a run finds them ready."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Trainkit
from tests.trainer.tiny_llama import save_llama

CHATS = [
    [{"role": "user", "content": f"the cat {number}"}, {"role": "assistant", "content": f"sat {number}"}]
    for number in range(40)
]


@pytest.fixture
def tuned(tmp_path: Path, trainkit: Trainkit) -> Callable[..., object]:
    """`trainkit WORDS` for chats and a small model."""
    save_llama(tmp_path / "model")
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))
    (tmp_path / "r.yaml").write_text("model: {path: model}\ndata: {path: chats.jsonl}\ntrain: {steps: 1}\n")
    return trainkit


@pytest.mark.e2e
def test_rows_are_shown_with_what_is_learned_in_brackets(tuned: Trainkit, tmp_path: Path) -> None:
    done = tuned("data", "r.yaml", "--rows", "1")
    assert done.returncode == 0, done.stderr
    for told in (
        "chats (messages: a list of {role, content})", "38 train, 2 evaluate", "several whole texts in each",
        "Lengths in tokens", "of 64 tokens", "⟦sat ", "<|im_end|>⟧",
    ):  # fmt: skip
        assert told in done.stdout, told
    found = json.loads(tuned("data", "r.yaml", "--json", "--rows", "2").stdout)
    assert (found["format"], found["rows"], found["view"]["train"]["rows"]) == ("messages", 40, 38)
    learned = ["".join(text for text, is_learned in each if is_learned) for each in found["texts"]]
    assert all(text.startswith("sat ") and text.endswith("<|im_end|>") for text in learned)
    assert tuned("data", "r.yaml", "--prepare", "--json", "--rows", "2").returncode == 0


@pytest.mark.e2e
def test_a_run_finds_ready_what_was_prepared(tuned: Trainkit, tmp_path: Path) -> None:
    os.utime(tmp_path / "chats.jsonl", (1e9, 1e9))  # of a file that was just written the next change may go unseen
    assert "decided before the ranks start" in " ".join(tuned("plan", "r.yaml").stdout.split())
    assert tuned("data", "r.yaml", "--prepare").returncode == 0
    assert "samples of 64 tokens, by the lengths of the rows" in " ".join(tuned("plan", "r.yaml").stdout.split())
    cache = tmp_path / "home/.cache/trainkit/prepared"
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*.bin")}
    assert before
    done = tuned("run", "r.yaml", "batch.micro=2")
    assert done.returncode == 0, done.stderr
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.bin")} == before
    assert "Trained  model (llama, " in done.stdout + done.stderr
    assert "Use it   trainkit generate " in done.stdout + done.stderr
    (checkpoint,) = tmp_path.glob("runs/*/*/checkpoints/step-*")
    assert json.loads((checkpoint / "manifest.json").read_text())["data"]["sequence_length"] == 64


def test_what_has_no_rows_is_said(trainkit: Trainkit, tmp_path: Path) -> None:
    done = trainkit("data", "quickstart")
    assert (done.returncode, "data.kind is text" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("row", "told", "hint"),
    [
        ({"question": "a", "answer": "b"}, "has question, answer; expected messages", "{prompt: question, completion:"),
        ({"chosen": [], "rejected": []}, "pairs of which one answer is preferred", "TRL"),
        ({"messages": "hello"}, "field 'messages' is no list", "the row has messages"),
    ],
)
def test_rows_that_cannot_be_learned_from_are_refused_by_every_command(
    row: dict[str, object], told: str, hint: str, tuned: Trainkit, tmp_path: Path
) -> None:
    (tmp_path / "chats.jsonl").write_text(json.dumps(row) + "\n")
    for command in ("check", "plan", "data", "run"):
        done = tuned(command, "r.yaml")
        assert done.returncode == 2, command
        assert told in done.stderr, command
        assert hint in done.stderr, command
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists(), "nothing was started"
