"""Labelled rows, and Hugging Face data sets in local folders."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.tiny_tokenizer import CHATML
from trainkit.errors import TrainingError
from trainkit.recipe.schema import Recipe
from trainkit.trainer.data import SOURCES
from trainkit.trainer.data.source import Source
from trainkit.trainer.settings import Settings, World
from trainkit.trainer.setup import assemble, prepared_model

TINY = {"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 8, "intermediate_size": 8, "vocab_size": 256}
BERT: dict[str, Any] = {"kind": "hf", "architecture": "bert", "task": "sequence_classification", "config": TINY}


def opened(kind: str, path: Path, model: Mapping[str, Any] | None = None, **settings: Any) -> Source:
    data = {"kind": kind, "path": str(path), "sequence_length": 8, "packing": False, **settings}
    return SOURCES[kind](Recipe.model_validate({"data": data, **({"model": model} if model else {})}), Path())


def lines(path: Path, *objects: object) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in objects))
    return path


def test_labels_by_name_are_numbered_in_order_and_said(tmp_path: Path) -> None:
    words = [("abc", "pos"), ("defghijklmn", "neg"), ("x", "pos"), ("y", "neutral")]
    path = lines(tmp_path / "a.jsonl", *({"text": text, "mood": mood} for text, mood in words))
    found = opened("jsonl", path, BERT, label_field="mood", validation_fraction=0.25)
    batch = found.train[[1, 0]]
    assert batch.inputs["labels"].tolist() == [0, 2]
    assert batch.inputs["input_ids"].tolist() == [list(b"defghijk"), [*b"abc", 0, 0, 0, 0, 0]]
    assert batch.inputs["attention_mask"].tolist() == [[1] * 8, [1, 1, 1, 0, 0, 0, 0, 0]]
    assert batch.counted == 2
    assert found.validation[[0]].inputs["labels"].tolist() == [1]
    assert found.facts["labels"] == "0 neg, 1 neutral, 2 pos"
    assert found.description.endswith("with 3 labels (0 neg, 1 neutral, 2 pos)")
    named = opened("jsonl", path, BERT, label_field="mood", labels=["pos", "neutral", "neg"])
    assert named.train[[0, 1]].inputs["labels"].tolist() == [0, 2]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"text": "b", "mood": "so-so"}, r"a\.jsonl:2: label 'so-so' is none of data.labels: pos, neg"),
        ({"text": "b", "mood": -1}, r"a\.jsonl:2: field 'mood' has label -1"),
        ({"text": "b", "mood": 0.5}, r"a\.jsonl:2: field 'mood' is no label"),
        ({"text": "b", "mood": None}, r"a\.jsonl:2: field 'mood' is no label"),
        ({"text": "b"}, r"a\.jsonl:2: field 'mood' is missing"),
        ({"text": "b", "mood": 1}, r"a\.jsonl:2: label 1 is a number, and that of .*a\.jsonl:1 is a name"),
    ],
)
def test_a_label_that_cannot_be_is_named_by_line(second: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"text": "a", "mood": "pos"}, second)
    with pytest.raises(TrainingError, match=message):
        opened("jsonl", path, BERT, label_field="mood", labels=["pos", "neg"])


@pytest.mark.parametrize(
    ("config", "message", "hint"),
    [
        ({}, r"a\.jsonl:2: label 4 is too high: the model has 2, from 0", "num_labels to 5"),
        ({"num_labels": 5, "pad_token_id": None}, "pad_token_id is not set", "set it to 0"),
        (
            {"num_labels": 5, "pad_token_id": 7},
            "pad_token_id is 7, and texts are padded with 0",
            "pad_token_id to 0",
        ),
    ],
)
def test_labels_and_padding_must_be_those_of_the_model(
    config: dict[str, Any], message: str, hint: str, make_settings: Callable[..., Settings], tmp_path: Path
) -> None:
    path = lines(tmp_path / "a.jsonl", *({"text": "a", "mood": mood} for mood in (0, 4, 1)))
    data = {"kind": "jsonl", "path": str(path), "label_field": "mood", "sequence_length": 8}
    settings = make_settings(data=data, model={**BERT, "config": {**TINY, **config}})
    with pytest.raises(TrainingError, match=message) as caught:
        assemble(settings, World(), torch.device("cpu"))
    assert re.search(hint, caught.value.diagnostics[0].hint)


def test_a_saved_data_set_gives_texts_with_its_own_validation_split(tmp_path: Path) -> None:
    from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

    kinds = Features({"text": Value("string"), "mood": ClassLabel(names=["bad", "good"])})
    train = Dataset.from_dict({"text": ["abc", "def", "ghi"], "mood": [1, 0, 1]}, features=kinds)
    held_out = Dataset.from_dict({"text": ["xyz"], "mood": [0]}, features=kinds)
    DatasetDict({"train": train, "validation": held_out, "test": held_out}).save_to_disk(tmp_path / "set")
    found = opened("dataset", tmp_path / "set")
    assert found.train[[2]].inputs["tokens"].tolist() == [[*b"gh", 0, 0, 0, 0, 0, 0]]
    assert (len(found.train), len(found.validation)) == (3, 1)
    labelled = opened("dataset", tmp_path / "set", BERT, label_field="mood")
    assert labelled.facts["labels"] == "0 bad, 1 good"
    assert labelled.validation[[0]].inputs["labels"].tolist() == [0]
    train.save_to_disk(tmp_path / "plain")
    assert len(opened("dataset", tmp_path / "plain", validation_fraction=0.4).validation) == 1
    train.to_parquet(tmp_path / "files" / "train-00000-of-00001.parquet")
    held_out.to_parquet(tmp_path / "files" / "val.parquet")
    again = opened("dataset", tmp_path / "files", BERT, label_field="mood")
    assert again.facts == labelled.facts
    assert again.train[[0, 1, 2]].inputs["input_ids"].equal(labelled.train[[0, 1, 2]].inputs["input_ids"])
    (tmp_path / "lines").mkdir()
    lines(tmp_path / "lines" / "rows.jsonl", *({"text": text} for text in ("abc", "def", "ghi")))
    assert len(opened("dataset", tmp_path / "lines").train) == 2


def test_chats_and_ready_tokens_of_a_data_set_are_read(make_tokenizer: Callable[..., Path], tmp_path: Path) -> None:
    from datasets import Dataset

    chat = [{"role": "user", "content": "two"}, {"role": "assistant", "content": "the cat"}]
    columns = {"chat": [chat] * 3, "ids": [[5, 6, 7, 8]] * 3, "goals": [[-100, -100, 7, 8]] * 3}
    Dataset.from_dict(columns).save_to_disk(tmp_path / "set")
    folder = str(make_tokenizer(template=CHATML))
    found = opened("dataset", tmp_path / "set", {"kind": "gpt", "vocab_size": 400}, messages_field="chat",
                   tokenizer=folder, sequence_length=32)  # fmt: skip
    assert found.encoder.decode([t for t in found.train[[0]].inputs["targets"][0].tolist() if t >= 0]) == "the cat\n"
    ready = opened("dataset", tmp_path / "set", tokens_field="ids", targets_field="goals")
    assert ready.description.endswith(" tokens")  # nobody cut them into bytes
    assert ready.train[[0]].inputs["tokens"][0, :3].tolist() == [5, 6, 7]
    assert ready.train[[0]].inputs["targets"][0].tolist() == [-100, 7, 8, *[-100] * 5]


@pytest.mark.parametrize(
    ("settings", "message", "hint"),
    [
        (
            {"field": "txt"},
            r"set/data-.*\.arrow has no column 'txt'",
            "did you mean text? it has text, ids, mood",
        ),
        ({"field": "nothing"}, r"has no column 'nothing'", "it has text, ids, mood"),
        ({"subset": "en"}, r"data.subset: .*set has no subset 'en'", "leave data.subset out"),
        ({"split": "test"}, r"data.split: .*set has no split 'test'", "it has train"),
        ({"validation_split": "dev"}, r"data.validation_split: .*set has no split 'dev'", "it has train"),
        ({"field": "ids"}, r"\.arrow: row 0: field 'ids' is no text", ""),
        ({"tokens_field": "text"}, r"\.arrow: row 0: field 'text' is no list", ""),
        ({"tokens_field": "ids", "targets_field": "goals"}, r"no column 'goals'", ""),
    ],
)
def test_what_a_data_set_does_not_have_is_named(
    settings: dict[str, Any], message: str, hint: str, tmp_path: Path
) -> None:
    from datasets import Dataset

    Dataset.from_dict({"text": ["a", "b"], "ids": [[1], [2]], "mood": [0, 1]}).save_to_disk(tmp_path / "set")
    with pytest.raises(TrainingError, match=message) as caught:
        opened("dataset", tmp_path / "set", **settings)
    assert hint in caught.value.diagnostics[0].hint


def test_a_folder_that_is_no_data_set_is_named(tmp_path: Path) -> None:
    from datasets import Dataset

    with pytest.raises(TrainingError, match=r"data\.path: .*/gone does not exist"):
        opened("dataset", tmp_path / "gone")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TrainingError, match=r"data\.path: .*/empty holds no data set"):
        opened("dataset", tmp_path / "empty")
    (tmp_path / "empty" / "a.parquet").write_bytes(b"PAR1 but no more")
    with pytest.raises(TrainingError, match=r"a\.parquet is no sound parquet file"):
        opened("dataset", tmp_path / "empty")
    Dataset.from_dict({"text": ["a" * 100] * 9}).save_to_disk(tmp_path / "torn")
    arrow = next((tmp_path / "torn").glob("*.arrow"))
    arrow.write_bytes(arrow.read_bytes()[:300])
    with pytest.raises(TrainingError, match=r"data\.path: .*/torn/.*\.arrow: row \d+ cannot be read"):
        opened("dataset", tmp_path / "torn")
    (tmp_path / "nothing").mkdir()
    (tmp_path / "nothing" / "train.jsonl").touch()
    with pytest.raises(TrainingError, match="fills 0 samples"):
        opened("dataset", tmp_path / "nothing")


def test_a_text_without_the_token_at_which_its_label_is_read_is_an_error(
    make_settings: Callable[..., Settings],
) -> None:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 32}
    asked = {"kind": "hf", "architecture": "t5", "task": "sequence_classification", "config": sizes}
    model = prepared_model(make_settings(model=asked))
    tokens, labels = torch.full((2, 4), 5), torch.zeros(2, dtype=torch.long)
    with pytest.raises(TrainingError, match=r"t5 reads the label at token 1 \(model.config.eos_token_id\)"):
        model(tokens, labels)
    tokens[:, -1] = 1
    assert model(tokens, labels).isfinite()
    assert any("decoders begin with the padding token" in text for _, text in model.remarks)
