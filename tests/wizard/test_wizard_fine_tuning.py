"""The first question, and what follows where a model of others is to learn from data of one's own."""

from __future__ import annotations

import gzip
import json
import struct
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from tests.wizard.conftest import Machine, Start, answered, machine_of, taken
from tests.wizard.test_wizard_questions import WRITE, refused, to, words
from trainkit.recipe.merge import Merge
from trainkit.recipe.resolved import Resolved
from trainkit.recipe.schema import StrategyKind
from trainkit.tasks import CAUSAL
from trainkit.wizard.fine_tuning import MODELS
from trainkit.wizard.question import resolve_text
from trainkit.wizard.session import Session, completed, compose, finish

CHAT = {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
ROWS: dict[str, list[dict[str, Any]]] = {
    "chats.jsonl": [CHAT] * 3,
    "sharegpt.json": [{"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]}],
    "alpaca.jsonl": [{"instruction": "2 + 2?", "input": "", "output": "4"}] * 2,
    "questions.jsonl": [{"question": "2 + 2?", "reply": "4"}],
    "preferences.jsonl": [{"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}],
    "pairs.jsonl": [{"source": "4", "target": "four"}],
    "texts.jsonl": [{"text": "two and two"}],
}
FINETUNE = {"program": "finetune", "rows": "chats.jsonl", "model": "llama"}


def save_model(folder: Path, *, kind: str = "llama", values: int = 1000, template: bool = True, **more: Any) -> None:
    """What a plan reads of a model's folder: config, the head of the weights, and the tokenizer's settings."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": kind, "vocab_size": 1000, **more}))
    head = json.dumps({"weight": {"dtype": "BF16", "shape": [values], "data_offsets": [0, 2 * values]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head)
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    settings = {"chat_template": "{{ messages }}"} if template else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(autouse=True)
def files(tmp_path: Path) -> None:
    for name, rows in ROWS.items():
        text = json.dumps(rows) if name.endswith(".json") else "".join(f"{json.dumps(row)}\n" for row in rows)
        (tmp_path / name).write_text(text)
    (tmp_path / "reviews.csv").write_text("text,label\nfine,good\nmeh,bad\n")
    (tmp_path / "prose.txt").write_text("Two and two are four.\n")
    (tmp_path / "letter.docx").write_bytes(b"PK\3\4\xff\0")
    (tmp_path / "broken.jsonl").write_text('{"text": "never closed')
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/a.jsonl").write_text(json.dumps(CHAT))
    save_model(tmp_path / "llama")
    save_model(tmp_path / "base", template=False)
    save_model(tmp_path / "large", values=4_000_000_000)
    save_model(tmp_path / "bert", kind="bert", template=False)
    save_model(tmp_path / "t5", kind="t5", template=False, is_encoder_decoder=True)


def written(session: Session, folder: Path) -> tuple[dict[str, Any], Resolved]:
    text = compose(session.view, str(folder / "mine.yaml"))
    assert finish(session.view, str(folder / "mine.yaml"), Merge()).text == text
    return yaml.safe_load(text), resolve_text(session.view, text, "mine.yaml")


@pytest.mark.parametrize("cards", [0, 1])
def test_chats_become_a_recipe_in_eight_questions(machine: Machine, start: Start, tmp_path: Path, cards: int) -> None:
    session, topics = answered(start(machine(cards)), **FINETUNE)
    assert topics == ["program", "rows", "model", "method", "where", "length", "output"]
    assert len(topics) + WRITE <= 8
    tree, resolved = written(session, tmp_path)
    assert tree["model"] == {"kind": "hf", "path": "llama"}
    assert tree["data"] == {"kind": "dataset", "path": "chats.jsonl"}
    assert tree["train"] == {"epochs": 3}
    assert tree["eval"] == {"every_steps": 50}
    assert tree["batch"] == {"global": 1}  # of three rows
    recipe = resolved.recipe
    assert (recipe.data.tokenizer, recipe.data.sequence_length) == ("llama", "auto")  # type: ignore[union-attr]
    assert (recipe.optimizer.lr, recipe.optimizer.weight_decay, recipe.precision.dtype) == (1e-5, 0.0, "auto")
    assert recipe.checkpoint.at_end


def test_what_was_recognised_is_shown_and_stands_in_the_recipe(machine: Machine, start: Start, tmp_path: Path) -> None:
    session, _ = to(start(machine()), "rows", program="finetune")
    found = {name: taken(session, name).view.answers[-1].reason for name in ("chats.jsonl", "sharegpt.json", "folder")}
    assert found["chats.jsonl"] == "3 rows of chats (messages: a list of {role, content})"
    assert found["sharegpt.json"] == "1 row of chats (conversations: a list of {from, value})"
    assert found["folder"] == "1 row of chats (messages: a list of {role, content})"
    session, _ = answered(start(machine()), **FINETUNE)
    assert "# 3 rows of chats (messages: a list of {role, content})" in compose(session.view, str(tmp_path / "a.yaml"))


@pytest.mark.parametrize("ending", ["txt", "md", "tsv", "ndjson", "csv.gz"])
def test_files_and_folders_are_read_as_what_they_hold(
    machine: Machine, start: Start, tmp_path: Path, ending: str
) -> None:
    (tmp_path / "mine").mkdir()
    content = b"text\nfine\n" if ending != "ndjson" else b'{"text": "fine"}\n'
    (tmp_path / f"mine/a.{ending}").write_bytes(gzip.compress(content) if ending.endswith("gz") else content)
    session, _ = to(start(machine()), "rows", program="finetune")
    if ending in ("txt", "md"):
        assert "mine is a folder" in refused(session, "mine")
        assert taken(session, f"mine/a.{ending}").view.get("data.kind") == "text"
    else:
        assert taken(session, "mine").view.answers[-1].reason == "1 row of texts (text)"


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("", "an answer is required"),
        ("gone.jsonl", "there is no file gone.jsonl"),
        ("broken.jsonl", "broken.jsonl:1 is not JSON"),
        ("letter.docx", "letter.docx is not UTF-8 text (byte 4)"),
        ("questions.jsonl", "has question, reply; expected messages"),
        ("questions.jsonl prompt=question completion=answer", "there is no column 'answer' for completion"),
        ("preferences.jsonl", "pairs of which one answer is preferred"),
    ],
)
def test_data_that_cannot_be_learned_from_is_not_taken(machine: Machine, start: Start, typed: str, says: str) -> None:
    session, _ = to(start(machine()), "rows", program="finetune")
    assert says in refused(session, typed)


def test_columns_with_other_names_are_named_behind_the_path(machine: Machine, start: Start, tmp_path: Path) -> None:
    named = "questions.jsonl prompt=question completion=reply"
    session, _ = answered(start(machine()), **{**FINETUNE, "rows": named})
    tree, _ = written(session, tmp_path)
    assert tree["data"]["columns"] == {"prompt": "question", "completion": "reply"}


@pytest.mark.parametrize(
    ("rows", "model", "task"),
    [
        ("reviews.csv", "bert", "sequence_classification"),
        ("alpaca.jsonl", "t5", "seq2seq_lm"),
        ("pairs.jsonl", "t5", "seq2seq_lm"),
        ("alpaca.jsonl", "llama", CAUSAL),
        ("texts.jsonl", "bert", "masked_lm"),
        ("prose.txt", "bert", "masked_lm"),
        ("prose.txt", "llama", CAUSAL),
        ("somebody/rows", "llama", CAUSAL),
        ("somebody/rows", "", CAUSAL),
        ("somebody/rows", "bert", "sequence_classification"),
        ("somebody/rows", "distilbert/distilbert-base-uncased", "sequence_classification"),
        ("somebody/rows", "google-t5/t5-small", "seq2seq_lm"),
    ],
)
def test_the_task_follows_from_rows_and_model(
    machine: Machine, start: Start, tmp_path: Path, rows: str, model: str, task: str
) -> None:
    session, _ = answered(start(machine(1)), program="finetune", rows=rows, model=model)
    _, resolved = written(session, tmp_path)
    assert getattr(resolved.recipe.model, "task", None) == task


@pytest.mark.parametrize(
    ("given", "task"),
    [
        ({"model.path": "bert", "data.path": "reviews.csv"}, "sequence_classification"),
        ({"model.path": "bert"}, "sequence_classification"),
        ({"data.path": "reviews.csv"}, "sequence_classification"),
        ({"model.path": "bert", "data.path": "texts.jsonl"}, "masked_lm"),
        ({"model.path": "bert", "data.path": "prose.txt"}, "masked_lm"),
        ({"model.path": "t5", "data.path": "alpaca.jsonl"}, "seq2seq_lm"),
        ({"model.path": "t5"}, "seq2seq_lm"),
        ({"model.path": "llama", "data.path": "alpaca.jsonl"}, CAUSAL),
        ({"model.path": "llama", "data.path": "somebody/rows"}, CAUSAL),
    ],
    ids=str,
)
def test_the_task_follows_from_what_is_given_too(
    machine: Machine, start: Start, tmp_path: Path, given: dict[str, str], task: str
) -> None:
    asked = {"rows": "reviews.csv" if task != "seq2seq_lm" else "pairs.jsonl", "model": "bert"}
    keys = {"rows": "data.path", "model": "model.path"}
    asked = {topic: word for topic, word in asked.items() if keys[topic] not in given}
    session, _ = answered(Session(completed(start(machine(1), given).view)), program="finetune", **asked)
    assert getattr(written(session, tmp_path)[1].recipe.model, "task", None) == task


@pytest.mark.parametrize(
    ("path", "kind"), [("folder", "dataset"), ("somebody/rows", "dataset"), ("prose.txt", "text"), ("notes", "text")]
)
def test_a_path_that_is_given_means_what_it_means_as_an_answer(
    machine: Machine, start: Start, tmp_path: Path, path: str, kind: str
) -> None:
    (tmp_path / "notes").mkdir()
    given = {"model.path": "base", "data.path": path}
    session, _ = answered(Session(completed(start(machine(1), given).view)), program="finetune")
    assert written(session, tmp_path)[1].recipe.data.kind == kind


def test_a_template_is_asked_for_where_the_tokenizer_has_none(machine: Machine, start: Start, tmp_path: Path) -> None:
    session, topics = answered(start(machine()), **{**FINETUNE, "model": "base"})
    assert topics[3] == "template"
    tree, _ = written(session, tmp_path)
    assert tree["data"]["chat_template"] == "chatml"
    _, question = to(start(machine()), "template", program="finetune", rows="alpaca.jsonl", model="base")
    assert (question.default, set(words(question))) == ("alpaca", {"chatml", "llama3", "alpaca"})
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    session, _ = answered(start(machine()), **{**FINETUNE, "model": "base", "template": "own.jinja"})
    assert written(session, tmp_path)[0]["data"]["chat_template"] == "own.jinja"
    _, topics = answered(start(machine()), **{**FINETUNE, "rows": "pairs.jsonl", "model": "base"})
    assert "template" not in topics


@pytest.mark.parametrize(
    ("facts", "largest", "proposed"),
    [
        (machine_of(), "Qwen/Qwen2.5-7B-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        (machine_of(1, "1660"), "Qwen/Qwen2.5-0.5B-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        (machine_of(1, "T4"), "Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct"),
        (machine_of(2, "A100"), "Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen3-4B-Instruct-2507"),
    ],
)
def test_models_that_fit_the_machine_are_offered(start: Start, facts: Any, largest: str, proposed: str) -> None:
    _, question = to(start(facts), "model", program="finetune", rows="chats.jsonl")
    assert (question.choices[-1].word, question.default) == (largest, proposed)
    assert all(words(question).values())
    _, question = to(start(facts), "model", program="finetune", rows="reviews.csv")
    assert {*words(question)} <= {each.name for each in MODELS if each.task == "sequence_classification"}
    _, question = to(start(facts), "model", program="finetune", rows="somebody/rows")  # of a format yet unknown
    assert (question.default, len({each.task for each in MODELS if each.name in words(question)})) == (proposed, 3)


@pytest.mark.parametrize("typed", ["./nowhere", "two words", "a/b/c"])
def test_what_is_neither_a_folder_nor_a_name_is_no_model(machine: Machine, start: Start, typed: str) -> None:
    session, _ = to(start(machine()), "model", program="finetune", rows="chats.jsonl")
    assert "the Hub has no such names" in refused(session, typed)
    assert "there is no" in refused(session, "folder")  # config.json in it


@pytest.mark.parametrize(
    ("model", "default"),
    [("llama", "full"), ("large", "lora"), ("somebody/model", "full"), ("meta-llama/Llama-3.1-8B", "lora")],
)
def test_adapters_are_proposed_for_large_models(machine: Machine, start: Start, model: str, default: str) -> None:
    _, question = to(start(machine(1)), "method", program="finetune", rows="chats.jsonl", model=model)
    assert question.default == default


def test_adapters_have_a_learning_rate_of_their_own(machine: Machine, start: Start, tmp_path: Path) -> None:
    session, _ = answered(start(machine(1)), **FINETUNE, method="lora", length="40/20", output="/big/runs")
    tree, resolved = written(session, tmp_path)
    assert resolved.recipe.optimizer.lr == 2e-4
    assert (tree["train"], tree["checkpoint"]) == ({"steps": 40}, {"every_steps": 20})
    assert tree["output"] == {"root": "/big/runs"}


@pytest.mark.parametrize("strategy", [each for each in get_args(StrategyKind)[1:] if each != "zero0"])
@pytest.mark.parametrize("where", ["all", "nodes", "cpu-2"])
def test_several_processes_take_at_most_twelve_questions(
    machine: Machine, start: Start, where: str, strategy: str
) -> None:
    typed = {**FINETUNE, "model": "base", "where": where, "strategy": strategy}
    _, topics = answered(start(machine(2)), **typed)
    assert len(topics) + WRITE <= 12, topics


def test_what_is_given_makes_a_right_fine_tuning_without_a_question(
    machine: Machine, start: Start, tmp_path: Path
) -> None:
    session = start(machine(), {"model.path": "llama", "data.path": "chats.jsonl"})
    asked = []
    while (question := session.question) is not None:
        asked.append((question.topic, question.default))
        session = taken(session, "")
    assert asked[0] == ("program", "finetune")
    tree, resolved = written(session, tmp_path)
    recipe = resolved.recipe
    assert (recipe.model.kind, recipe.data.kind, recipe.peft.kind) == ("hf", "dataset", "none")
    assert (tree["train"], tree["eval"]) == ({"epochs": 3}, {"every_steps": 50})


def test_what_nobody_is_asked_about_is_as_usual_unless_it_is_given(
    machine: Machine, start: Start, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"model.path": "llama", "data.path": "chats.jsonl", "peft.kind": "lora", "train.epochs": 9}
    # Of two ranks: ten steps in an epoch, where there are few rows.
    sizes = ((3, {"global": 2}), (50, {"global": 4, "micro": "auto"}), (1000, {"global": 16, "micro": "auto"}))
    for rows, batch in sizes:
        (tmp_path / "chats.jsonl").write_text(f"{json.dumps(CHAT)}\n" * rows)
        tree, _ = written(answered(start(machine(2), given), program="finetune")[0], tmp_path)
        assert (tree["eval"], tree["batch"]) == ({"every_steps": 50}, batch)
    given |= {"eval.every_steps": 0, "batch.micro": 5}
    tree, _ = written(answered(start(machine(2), given), program="finetune")[0], tmp_path)
    assert ("eval" in tree, tree["batch"]) == (False, {"micro": 5})


def test_a_setting_that_is_given_is_never_dropped_in_silence(machine: Machine, start: Start) -> None:
    session = start(machine(), {"model.layers": 3, "data.path": "chats.jsonl"})
    assert "has no setting 'layers'" in refused(session, "finetune")


def test_trying_asks_where_and_how_long(machine: Machine, start: Start, tmp_path: Path) -> None:
    session, topics = answered(start(machine(1)), program="try")
    assert topics == ["program", "where", "length"]
    tree, _ = written(session, tmp_path)
    assert tree["precision"] == "auto"
    assert session.view.get("data.path") == "python-stdlib"


ON_TRAINER = """
from transformers import HfArgumentParser, Trainer, TrainingArguments
Trainer(args=HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()[0])
"""


@pytest.mark.parametrize(
    ("source", "kind"),
    [(ON_TRAINER, "hf"), ("import accelerate\naccelerate.Accelerator()", "accelerate"), ("import torch", "torch")],
    ids=["hf", "accelerate", "torch"],
)
def test_the_kind_of_a_script_is_read_from_its_source(
    machine: Machine, start: Start, tmp_path: Path, source: str, kind: str
) -> None:
    session, _ = to(start(machine(1)), "command", program="script")
    (tmp_path / "train.py").write_text(source)
    session = taken(session, "train.py")
    assert session.view.get("program.kind") == kind
    assert f"of kind {kind}" in session.view.answers[-1].reason
    session, _ = to(start(machine(1)), "command", program="torch")
    assert taken(session, "train.py").view.get("program.kind") == "torch"
