"""Texts and chats through a Hugging Face tokenizer from a local folder."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.sources import lines, opened
from tests.trainer.tiny_tokenizer import CHATML
from tests.trainer.training import MakeSettings, parts_of
from trainkit.data.encode import IGNORE_INDEX
from trainkit.data.tokenizer import open_encoder
from trainkit.errors import TrainingError
from trainkit.recipe.described import has_template
from trainkit.recipe.schema import Recipe
from trainkit.trainer.checkpoint.resuming import load
from trainkit.trainer.data import text
from trainkit.trainer.data.source import Source
from trainkit.trainer.settings import World
from trainkit.trainer.setup import Parts

MakeTokenizer = Callable[..., Path]
CHAT = [
    {"role": "user", "content": "what is the sum"},
    {"role": "assistant", "content": "the cat"},
    {"role": "user", "content": "of two"},
    {"role": "assistant", "content": "the mat"},
]
MARKED = CHATML.replace(
    "{{ message['content'] }}<|im_end|>",
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>{% endif %}",
)
# Of earlier turns only the last two messages are written out, so that nothing is the beginning of what follows it.
FORGETFUL = CHATML.replace("in messages", "in messages[-2:]")
UNUSED_MARKS = "{% if false %}{% generation %}{% endgeneration %}{% endif %}"
# No invitation to answer, and a word without an end of its own.
BARE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def source(path: Path, tokenizer: Path | None, **settings: Any) -> Source:
    data = {"sequence_length": 64, "packing": "none", **settings}
    return opened("dataset", path, {"kind": "gpt", "vocab_size": 400}, tokenizer=tokenizer and str(tokenizer), **data)


def learned(found: Source, tokenizer: Path, row: int = 0) -> str:
    """The predicted tokens of a sample as text, special ones too."""
    from transformers import AutoTokenizer

    targets = found.train[[row]].inputs["targets"][0]
    return str(AutoTokenizer.from_pretrained(tokenizer).decode(targets[targets != IGNORE_INDEX].tolist()))


def test_a_text_is_cut_by_the_tokenizer_and_its_end_is_learned(make_tokenizer: MakeTokenizer, tmp_path: Path) -> None:
    folder = make_tokenizer()
    found = source(lines(tmp_path / "a.jsonl", [{"text": "the cat sat"}] * 3), folder)
    encoder = open_encoder(str(folder))
    ids = [*encoder.plain("the cat sat"), 0]
    assert len(ids) < 8, "words are tokens, not bytes"
    assert found.train[[0]].inputs["tokens"][0, : len(ids) - 1].tolist() == ids[:-1]
    assert learned(found, folder).endswith(" cat sat<|end|>")
    assert found.facts["tokenizer"] == encoder.fingerprint


def test_only_the_answer_to_a_prompt_is_learned(make_tokenizer: MakeTokenizer, tmp_path: Path) -> None:
    rows = [{"text": " the mat", "ask": "the cat sat on"}] * 3
    folder = make_tokenizer()
    columns = {"prompt": "ask", "completion": "text"}
    found = source(lines(tmp_path / "a.jsonl", rows), folder, columns=columns, chat_template="none")
    assert learned(found, folder) == " the mat<|end|>"
    chats = source(tmp_path / "a.jsonl", folder, columns=columns)  # for a model of chats they are chats of one turn
    assert learned(chats, folder) == " the mat<|im_end|>"
    plain = source(tmp_path / "a.jsonl", make_tokenizer(template=None), columns=columns)
    assert learned(plain, folder) == " the mat<|end|>"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, "the cat<|im_end|>the mat<|im_end|>"),
        (MARKED, "the cat<|im_end|>the mat<|im_end|>"),
        (BARE, "the catthe mat"),
    ],
    ids=["prefixes", "marks", "bare"],
)
@pytest.mark.parametrize("packing", ["none", "isolated", "dense"])
def test_of_a_chat_only_the_answers_of_every_turn_are_learned(
    template: str, expected: str, packing: str, make_tokenizer: MakeTokenizer, tmp_path: Path
) -> None:
    folder = make_tokenizer(template=template)
    path = lines(tmp_path / "a.jsonl", [{"messages": CHAT}] * 6)
    found = source(path, folder, packing=packing, sequence_length=64)
    shown = learned(found, folder)
    assert shown == expected if packing == "none" else shown.startswith(expected)


def test_a_template_that_writes_earlier_answers_otherwise_makes_several_texts_of_a_chat(
    make_tokenizer: MakeTokenizer, tmp_path: Path
) -> None:
    folder = make_tokenizer(template=FORGETFUL)
    path = lines(tmp_path / "a.jsonl", [{"messages": CHAT}] * 6)
    found = source(path, folder)
    assert (found.facts["rows"], found.facts["texts"]) == (6, 12)
    answers = {learned(found, folder, row) for row in range(len(found.train))}
    assert answers == {"the cat<|im_end|>", "the mat<|im_end|>"}


@pytest.mark.parametrize(
    ("template", "chat", "message"),
    [
        (CHATML, CHAT[:1], "it has no message of role assistant"),
        (CHATML, [{"content": "hello"}], "field 'messages' is not a chat: message 1 is no"),
        (CHATML, [], "field 'messages' is empty"),
        (CHATML, "hello", "field 'messages' is no list"),
        ("{{ raise_exception('roles must take turns') }}", CHAT, "the chat template fails: .*roles must take turns"),
        (CHATML + UNUSED_MARKS, CHAT, "marks no part of it as the assistant's"),
    ],
)
def test_a_chat_whose_answers_cannot_be_told_is_refused_with_its_line(
    template: str | None, chat: object, message: str, make_tokenizer: MakeTokenizer, tmp_path: Path
) -> None:
    path = lines(tmp_path / "a.jsonl", [{"messages": chat}])
    with pytest.raises(TrainingError, match=rf"a\.jsonl:1: .*{message}"):
        source(path, make_tokenizer(template=template))


def test_chats_without_a_template_are_refused_with_those_that_are_built_in(
    make_tokenizer: MakeTokenizer, tmp_path: Path
) -> None:
    path = lines(tmp_path / "a.jsonl", [{"messages": CHAT}] * 3)
    message = "chats .*: the tokenizer has no chat template: set data.chat_template to .*chatml"
    with pytest.raises(TrainingError, match=message):
        source(path, make_tokenizer(template=None))
    with pytest.raises(TrainingError, match="chats need a tokenizer"):
        source(path, None)
    folder = make_tokenizer(template=None)
    assert learned(source(path, folder, chat_template="chatml"), folder) == "the cat<|im_end|>the mat<|im_end|>"
    (tmp_path / "own.jinja").write_text(BARE)
    own = source(path, folder, chat_template=str(tmp_path / "own.jinja"))
    assert learned(own, folder) == "the catthe mat"


@pytest.mark.parametrize("form", ["jinja", "settings", "several", "none"])
def test_the_plan_knows_of_a_template_where_transformers_finds_one(
    form: str, make_tokenizer: MakeTokenizer, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(make_tokenizer(template=None if form == "none" else CHATML))
    if form == "several":
        tokenizer.chat_template = {"default": CHATML, "tool_use": CHATML}
    tokenizer.save_pretrained(tmp_path / "saved", save_jinja_files=form != "settings")
    names = {each.name for each in (tmp_path / "saved").iterdir()}
    assert ("chat_template.jinja" in names) == (form in ("jinja", "several"))
    found = has_template(
        str(tmp_path / "saved"), lambda path: Path(path).read_bytes(), lambda path: Path(path).exists()
    )
    read = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert found == (read.chat_template is not None) == (form != "none")


def test_text_files_are_cut_once_and_again_when_the_tokenizer_changes(
    make_tokenizer: MakeTokenizer, tmp_path: Path
) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("the cat sat on the mat " * 20)
    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(make_tokenizer(), tokenizer)
    data = {
        "kind": "text",
        "path": str(tmp_path / "text"),
        "include": "*.txt",
        "cache": str(tmp_path / "cache"),
        "sequence_length": 8,
    }
    recipe = Recipe.model_validate({"data": {**data, "tokenizer": str(tokenizer)}})
    first = text.open_source(recipe, tmp_path)
    encoder = open_encoder(str(tokenizer))
    assert first.facts["tokens"] == len(encoder.plain("the cat sat on the mat " * 20)) + 1
    assert first.train[[0]].inputs["tokens"][0].tolist() == encoder.plain("the cat sat on the mat " * 20)[:8]
    assert text.open_source(recipe, tmp_path).facts == first.facts
    assert len(list((tmp_path / "cache").glob("*/meta.json"))) == 1
    (tokenizer / "vocab.txt").write_text("another")
    assert text.open_source(recipe, tmp_path).facts["tokenizer"] != first.facts["tokenizer"]
    assert len(list((tmp_path / "cache").glob("*/meta.json"))) == 2
    (tmp_path / "text" / "b.txt").write_bytes(b"caf\xe9")
    with pytest.raises(TrainingError, match=r"b\.txt is not UTF-8 text \(byte 3\)"):
        text.open_source(recipe, tmp_path)


def test_resuming_with_another_tokenizer_is_warned_of(
    make_tokenizer: MakeTokenizer,
    make_settings: MakeSettings,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = lines(tmp_path / "a.jsonl", [{"text": "the cat sat"}] * 3)
    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(make_tokenizer(), tokenizer)
    data = {"kind": "dataset", "path": str(path), "tokenizer": str(tokenizer), "sequence_length": 8}

    def made() -> Parts:
        model = {"layers": 1, "heads": 1, "hidden_size": 8, "vocab_size": 400}
        return parts_of(make_settings(data=data, model=model))

    first = made()
    first.checkpoints.save(1, first.strategy)
    first.checkpoints.wait()
    saved = next(first.settings.run_dir.glob("checkpoints/step-*"))
    load(saved, first.checkpoints.identity, first.strategy, World())
    assert "another tokenizer" not in caplog.text
    (tokenizer / "vocab.txt").write_text("another")
    other = made()
    load(saved, other.checkpoints.identity, other.strategy, World())
    assert "was saved with another tokenizer" in caplog.text


def test_texts_end_to_end_see_those_before_in_their_sample_and_others_do_not(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    config = {"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 8, "intermediate_size": 8}
    model = {"kind": "hf", "architecture": "llama", "config": {**config, "vocab_size": 256}}
    held_out = lines(tmp_path / "b.jsonl", [{"text": "5678"}])
    made = {}
    for packing in ("dense", "isolated", "none"):
        for first in ("abcd", "wxyz"):
            path = lines(tmp_path / "a.jsonl", [{"text": first}, {"text": "1234"}])
            files = {"path": str(path), "validation_path": str(held_out)}
            data = {"kind": "dataset", **files, "sequence_length": 8, "packing": packing}
            parts = parts_of(make_settings(model=model, data=data))
            inputs = parts.source.train[[1] if packing == "none" else [0]].inputs
            begin = bytes(inputs["tokens"][0].tolist()).index(b"123")
            seen = {name: each for name, each in inputs.items() if name != "targets"}
            with torch.no_grad():
                made[packing, first] = parts.model(**seen)[0, begin : begin + 3]
    assert not torch.equal(made["dense", "abcd"], made["dense", "wxyz"])
    torch.testing.assert_close(made["isolated", "abcd"], made["none", "abcd"])
    torch.testing.assert_close(made["isolated", "wxyz"], made["none", "abcd"])
    assert torch.equal(made["none", "abcd"], made["none", "wxyz"])


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [{"text": "ab"}])
    with pytest.raises(TrainingError, match=r"data\.tokenizer: .*/nowhere is not a folder"):
        source(path, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TrainingError, match=r"data\.tokenizer: transformers cannot load a tokenizer from .*/empty"):
        source(path, tmp_path / "empty")
    (tmp_path / "empty" / "tokenizer.json").write_text("{")
    with pytest.raises(TrainingError, match=r"data\.tokenizer: transformers cannot load a tokenizer from .*/empty"):
        source(path, tmp_path / "empty")


def test_a_folder_that_a_library_would_never_come_back_from_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(TrainingError, match=r"data.tokenizer: .*tokenizer.json is not a regular file"):
        open_encoder(str(tmp_path))
    (tmp_path / "tokenizer.json").unlink()
    with (tmp_path / "tokenizer_config.json").open("wb") as file:
        file.truncate(2**30)
    with pytest.raises(TrainingError, match=r"tokenizer_config.json is larger than any settings"):
        open_encoder(str(tmp_path))


def test_code_beside_a_tokenizer_is_never_run(
    make_tokenizer: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, mark = make_tokenizer(), tmp_path / "ran"
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": ["custom.Custom", None]}, "tokenizer_class": "Custom"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "custom.py").write_text(f"open({str(mark)!r}, 'w')\nclass Custom: pass\n")
    monkeypatch.setattr("builtins.input", lambda _: "y")  # transformers asks where nothing was said
    with contextlib.suppress(TrainingError):
        open_encoder(str(folder))
    assert not mark.exists()


def test_a_tokenizer_that_its_library_panics_over_is_refused(make_tokenizer: Callable[..., Path]) -> None:
    folder = make_tokenizer()
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["continuing_subword_prefix"] = "x" * 31  # longer than what is merged
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(TrainingError, match=r"cannot load a tokenizer from .*: PanicException: "):
        open_encoder(str(folder))
