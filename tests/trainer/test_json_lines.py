"""Texts in JSON lines, and instruction data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainkit.errors import TrainingError
from trainkit.recipe.schema import Recipe
from trainkit.trainer.data.dataset import open_source
from trainkit.trainer.data.source import Source
from trainkit.trainer.data.vocabulary import fitting_source
from trainkit.trainer.models.gpt import build_gpt


def source(path: Path | list[str], **settings: Any) -> Source:
    named = path if isinstance(path, list) else str(path)
    data = {"kind": "jsonl", "path": named, "sequence_length": 4, **settings}
    return open_source(Recipe.model_validate({"data": data}), Path())


def written(path: Path, *objects: object) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in objects))
    return path


def shown(targets: Any) -> list[str]:
    return ["".join("." if target < 0 else chr(target) for target in row) for row in targets.tolist()]


def test_packing_joins_texts_and_predicts_no_first_byte(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", {"text": "abcdef"}, {"text": "uvwxyz"}, {"text": "123456"})
    found = source(path)
    batch = found.train[[0, 1]]
    assert shown(batch.inputs["tokens"]) == ["abcd", "efuv"]
    assert shown(batch.inputs["targets"]) == ["bcde", "f.vw"]
    assert batch.counted == 7
    assert found.facts == {"texts": 3, "bytes": 18}
    assert len(found.train) + len(found.validation) == 5


def test_padding_starts_a_sample_with_each_text(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", {"text": "abcdef"}, {"text": "uv"}, {"text": "1"}, {"text": "xyz"})
    found = source(path, packing=False)
    batch = found.train[[0, 1]]
    assert len(found.train) == 2, "a single byte predicts nothing"
    assert shown(batch.inputs["targets"]) == ["bcde", "v..."]
    assert batch.counted == 5
    assert shown(found.validation[[0]].inputs["targets"]) == ["yz.."]


@pytest.mark.parametrize("packing", [True, False])
def test_prompts_are_read_and_only_answers_are_predicted(packing: bool, tmp_path: Path) -> None:
    rows = [{"ask": "2+2=", "say": "4 ok"}, {"ask": "1+1=", "say": "2 ok"}, {"ask": "0+0=", "say": "0 ok"}]
    path = written(tmp_path / "a.jsonl", *rows)
    found = source(path, field="say", prompt_field="ask", packing=packing, sequence_length=8)
    batch = found.train[[0]]
    assert shown(batch.inputs["tokens"])[0].startswith("2+2=4 o")
    assert shown(batch.inputs["targets"])[0].startswith("...4 ok")
    assert batch.counted == 4


def test_prompts_that_leave_no_room_for_an_answer_are_no_data_set(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", *[{"ask": "a long question", "say": "yes"}] * 5)
    with pytest.raises(TrainingError, match=r"fills 0 samples of 8 tokens.*\(5 samples left out: nothing") as caught:
        source(path, field="say", prompt_field="ask", packing=False, sequence_length=8)
    assert caught.value.diagnostics[0].hint == "raise data.sequence_length"


def test_a_sample_that_its_prompt_fills_is_left_out_and_said(tmp_path: Path) -> None:
    short = {"ask": "2+2=", "say": "4 ok"}
    path = written(tmp_path / "a.jsonl", short, {"ask": "a long question", "say": "yes"}, short, short)
    found = source(path, field="say", prompt_field="ask", packing=False, sequence_length=8)
    assert len(found.train) + len(found.validation) == 3
    assert found.description.endswith("(1 sample left out: nothing to predict within data.sequence_length)")
    assert found.facts["samples_left_out"] == 1
    roomy = source(path, field="say", prompt_field="ask", packing=False, sequence_length=32)
    assert "left out" not in roomy.description
    assert "samples_left_out" not in roomy.facts


def test_rows_of_which_a_part_is_empty_are_passed_over_where_the_recipe_says_so(tmp_path: Path) -> None:
    rows = [{"ask": "2+2=", "say": "4 ok"}, {"ask": "", "say": "yes"}, {"ask": "1+1=", "say": None}]
    path = written(tmp_path / "a.jsonl", *rows, {"ask": "0+0=", "say": "0 ok"})
    found = source(path, field="say", prompt_field="ask", packing=False, sequence_length=8, skip_empty=True)
    assert found.facts["rows_passed_over"] == found.facts["texts"] == 2
    nested = written(tmp_path / "b.jsonl", {"en": {"text": ""}}, {"en": {}}, {"en": {"text": "abc"}})
    with pytest.raises(TrainingError, match=r"b\.jsonl:2: field 'en.text' is missing"):
        source(nested, field="en.text", skip_empty=True)


def test_several_files_are_read_in_order(tmp_path: Path) -> None:
    written(tmp_path / "a.jsonl", {"text": "abcdef"})
    (tmp_path / "b.jsonl").write_text('\n{"text": "uvwxyz"}')
    found = source([str(tmp_path / "b.jsonl"), str(tmp_path / "a.jsonl")], packing=False)
    assert shown(found.train[[0]].inputs["tokens"]) == ["uvwx"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "ab"}\n{"text": ', "{path}:2 is not JSON"),
        ('{"text": "ab"}\n[1]\n', "{path}:2 is not an object"),
        ('{"text": "ab"}\n\n{"txt": "ab"}\n', "{path}:3: field 'text' is missing"),
        ('{"text": 7}\n', "{path}:1: field 'text' is no text"),
        ('{"text": ""}\n', "{path}:1: field 'text' is empty"),
        (b'{"text": "\xff"}\n', "{path}:1 is not JSON"),
        ("", "{path} fills 0 samples"),
        ('{"text": "ab"}\n', "{path} fills 1 samples"),
        (None, "{path} cannot be read: No such file"),
    ],
)
def test_a_wrong_line_is_named_before_the_first_step(content: str | bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TrainingError) as caught:
        source(path)
    assert f"data.path: {message.format(path=path)}" in str(caught.value)


def test_bytes_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", {"text": "abcdefghijklm"})
    recipe = {"data": {"kind": "jsonl", "path": str(path), "sequence_length": 4}}
    asked = Recipe.model_validate({**recipe, "model": {"kind": "gpt", "vocab_size": 100}})
    with pytest.raises(TrainingError, match=r"a vocabulary of 100 is too small for token 109 of .*a\.jsonl:1"):
        fitting_source(open_source(asked, Path()), build_gpt(asked), asked)
