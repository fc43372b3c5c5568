"""`trainkit generate`: prompts from everywhere, a chat in a terminal, and one diagnostic for each that is none."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pexpect
import pytest

from tests.trainer.tiny_llama import save_llama

Trainkit = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize(
    ("words", "told", "hint"),
    [
        (("gone", "hi"), "gone is neither a run directory nor a run in runs", "`trainkit runs list`"),
        (("gone", "hi", "--file", "p.txt"), "a PROMPT and --file are given", "leave one of them out"),
        (("gone", "--file", "p.txt"), "--file p.txt cannot be read: No such file", "name a file of prompts"),
        (("gone", "--file", "empty.txt"), "--file empty.txt has no prompts", "write one on each line"),
        (("gone", "--file", "latin.txt"), "--file latin.txt is not UTF-8: byte 3 is 0xe9", "iconv"),
        (("gone",), "there is no prompt", "give a PROMPT, --file FILE"),
        (("gone", "hi", "--output", "empty.txt"), "empty.txt exists", "add --force"),
        (("gone", "hi", "--output", "empty.txt/a.jsonl"), "empty.txt/a.jsonl cannot be written", "name another file"),
        (("model", "hi", "--checkpoint", "3"), "model is a folder with a model", "name the run"),
        (("gone", "hi", "--temperature", "-1"), "invalid value for '--temperature'", "generate --help"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_what_cannot_be_answered_is_said_before_torch_is_loaded(
    words: tuple[str, ...], told: str, hint: str, trainkit: Trainkit, tmp_path: Path
) -> None:
    (tmp_path / "empty.txt").write_text("\n\n")
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    done = trainkit("generate", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"error: {told}" in done.stderr
    assert hint in done.stderr


def test_every_line_that_is_no_prompt_is_named(trainkit: Trainkit, tmp_path: Path) -> None:
    rows = ['{"prompt": "a"}', "{", "[1]", '{"text": "a"}', "", '{"prompt": 3}', '{"messages": [{"content": "a"}]}']
    (tmp_path / "p.jsonl").write_text("\n".join([*rows, '{"prompt": "a", "messages": []}']))
    done = trainkit("generate", "gone", "--file", "p.jsonl")
    assert done.returncode == 2
    places = [line.partition(" error: ")[0] for line in done.stderr.splitlines() if " error: " in line]
    assert places == [f"p.jsonl:{number}:1:" for number in (2, 3, 4, 6, 7, 8)]
    for told in (
        *("the line is no JSON", "the line is list, and no object", "neither prompt nor messages", "prompt is no text"),
        *("messages is no list of messages with a role", "the line has prompt and messages"),
    ):
        assert told in done.stderr


@pytest.mark.torch
def test_answers_to_a_file_are_written_as_json_lines(trainkit: Trainkit, tmp_path: Path) -> None:
    save_llama(tmp_path / "model")
    greedy = ("--temperature", "0", "--max-new-tokens", "8", "--device", "cpu")
    chat = {"messages": [{"role": "user", "content": "the cat"}]}
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "the cat"}) + "\n" + json.dumps(chat) + "\n")
    done = trainkit("generate", "model", "--file", "p.jsonl", *greedy, "--output", "new/answers.jsonl")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    one, two = map(json.loads, (tmp_path / "new/answers.jsonl").read_text().splitlines())
    assert (one["prompt"], two["messages"], one["tokens"]) == ("the cat", chat["messages"], 8)
    assert one["text"] == two["text"], "a prompt is a chat of one message"


@pytest.mark.e2e
def test_standard_input_is_a_prompt_and_what_only_the_model_can_refuse_is_named_by_its_line(
    trainkit: Trainkit, tmp_path: Path
) -> None:
    save_llama(tmp_path / "model")
    words = ("--temperature", "0", "--max-new-tokens", "8", "--device", "cpu")
    (tmp_path / "p.txt").write_text("the cat\n\n")
    read = trainkit("generate", "model", *words, stdin="the cat\n")
    assert read.returncode == 0, read.stderr
    assert trainkit("generate", "model", *words, "--file", "p.txt").stdout == read.stdout
    (tmp_path / "p.jsonl").write_text(json.dumps({"messages": [{"role": "assistant", "content": "a"}]}))
    ended = trainkit("generate", "model", "--file", "p.jsonl", *words)
    assert ended.returncode == 2
    assert "p.jsonl:1:1: error: the chat ends with an answer of the assistant\n" in ended.stderr


@pytest.mark.e2e
def test_a_chat_streams_is_interrupted_started_over_and_left(tmp_path: Path, clean_environment: dict[str, str]) -> None:
    save_llama(tmp_path / "model", max_position_embeddings=100_000)
    words = ("-m", "trainkit", "generate", "model", "--device", "cpu", "--temperature", "0", "--system", "be kind")
    environ = {**clean_environment, "TERM": "dumb"}
    options = {"env": environ, "cwd": str(tmp_path), "timeout": 60, "encoding": "utf-8"}

    child = pexpect.spawn(sys.executable, [*words, "--max-new-tokens", "90000"], **options)
    child.expect("/reset starts over, Ctrl-C ends an answer, Ctrl-D leaves")
    child.expect("> ")
    child.sendline("the cat")
    child.expect("the cat\r\n.{20}")  # it streams: the whole would take minutes
    child.sendintr()
    child.expect("\r\n> ")
    child.sendeof()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0

    child = pexpect.spawn(sys.executable, [*words, "--max-new-tokens", "12"], **options)
    answers = []
    for line in ("the cat", "two", "/reset", "the cat"):
        child.expect("> ")
        child.sendline(line)
        if not line.startswith("/"):
            child.expect(rf"{line}\r\n(.*)\r\n")
            answers.append(child.match.group(1))
    child.expect("> ")
    child.sendintr()  # at the prompt it only begins a new line
    child.expect("> ")
    child.sendeof()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    assert answers[0] == answers[2] != answers[1]
