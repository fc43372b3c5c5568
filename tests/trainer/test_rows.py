"""Rows in JSON lines and in Hugging Face data sets: texts, prompts with answers, chats, token ids, labels."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.sources import BERT, TINY, lines, opened, recipe_of, shown
from tests.trainer.tiny_tokenizer import CHATML, save_tokenizer
from tests.trainer.training import MakeSettings, parts_of
from trainkit.data.look import look
from trainkit.errors import TrainingError
from trainkit.recipe.schema import Recipe
from trainkit.trainer.data.source import Source
from trainkit.trainer.data.vocabulary import fitting_source
from trainkit.trainer.models.gpt import build_gpt
from trainkit.trainer.setup import prepared_model

ASKED: dict[str, Any] = {"columns": {"prompt": "ask", "completion": "say"}, "packing": "none", "sequence_length": 8}
ANSWER = {"ask": "2+2=", "say": "4 ok"}
TOO_LONG = {"ask": "a long question", "say": "yes"}


Read = Callable[..., Source]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Opens rows, which a file of JSON lines holds; the last is evaluated on."""

    def read(*rows: object, **settings: Any) -> Source:
        held_out = lines(tmp_path / "held-out.jsonl", rows[-1:])
        asked = {"sequence_length": 4, "validation_path": str(held_out), **settings}
        return opened("dataset", lines(tmp_path / "a.jsonl", rows[:-1]), **asked)

    return read


def labelled(path: Path, **settings: Any) -> Source:
    """For a classifier of moods."""
    return opened("dataset", path, BERT, **{"columns": {"label": "mood"}, "sequence_length": 8, **settings})


def moods(*pairs: tuple[str, object]) -> list[dict[str, object]]:
    return [{"text": text, "mood": mood} for text, mood in pairs]


def test_dense_packing_joins_texts_and_predicts_no_first_byte(read: Read) -> None:
    found = read({"text": "abcdef"}, {"text": "uvwxyz"}, {"text": "123456"}, packing="dense")
    batch = found.train[[0, 1]]
    assert shown(batch.inputs["tokens"]) == ["abcd", "efuv"]
    assert shown(batch.inputs["targets"]) == ["bcde", "f.vw"]
    assert batch.counted == 7
    known = {"rows": 3, "validation_rows": 1, "texts": 3, "bytes": 18, "format": "text", "packing": "dense"}
    assert known.items() <= found.facts.items()
    assert len(found.train) + len(found.validation) == 5


def test_padding_starts_a_sample_with_each_text(read: Read) -> None:
    found = read({"text": "abcdef"}, {"text": "uv"}, {"text": "1"}, {"text": "xyz"}, packing="none")
    assert len(found.train) == 3, "a single byte predicts nothing, and a long text is several samples"
    batch = found.train[[0, 1, 2]]
    assert shown(batch.inputs["targets"]) == ["bcde", "f...", "v..."]
    assert batch.counted == 6
    assert shown(found.validation[[0]].inputs["targets"]) == ["yz.."]
    assert (found.facts["in_pieces"], found.facts["left_out"]) == (1, 1)
    assert "(1 in pieces)" in found.description


def test_isolated_packing_joins_whole_texts_whose_positions_begin_anew(read: Read) -> None:
    found = read({"text": "abcd"}, {"text": "uvw"}, {"text": "12"}, {"text": "xy"}, sequence_length=7)
    assert found.facts["packing"] == "isolated"
    assert len(found.train) == 1
    inputs = found.train[[0]].inputs
    [tokens], [targets] = shown(inputs["tokens"]), shown(inputs["targets"])
    texts = [*zip("abc", "bcd", range(3), strict=True), *zip("uv", "vw", range(2), strict=True), ("1", "2", 0)]
    found_places = zip(tokens, targets, inputs["position_ids"][0].tolist(), strict=True)
    assert sorted(found_places) == sorted([*texts, ("\0", ".", 0)])
    assert found.draws


@pytest.mark.parametrize("packing", ["isolated", "dense", "none"])
def test_prompts_are_read_and_only_answers_are_predicted(packing: str, read: Read) -> None:
    rows = [ANSWER, {"ask": "1+1=", "say": "2 ok"}, {"ask": "0+0=", "say": "0 ok"}]
    batch = read(*rows, **{**ASKED, "packing": packing}).train[[0]]
    first = shown(batch.inputs["tokens"])[0][:7]
    assert first in ("2+2=4 o", "1+1=2 o")
    assert shown(batch.inputs["targets"])[0].startswith("...4 ok" if first[0] == "2" else "...2 ok")
    assert batch.counted == 4


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("packing", ["isolated", "dense", "none"])
def test_prompts_are_learned_too_where_the_recipe_says_so(packing: str, streaming: bool, tmp_path: Path) -> None:
    path, own = lines(tmp_path / "a.jsonl", [ANSWER]), lines(tmp_path / "b.jsonl", [ANSWER])
    asked = {**ASKED, "packing": packing, "validation_path": str(own), "streaming": streaming}
    found = opened("dataset", path, **asked, train_on_prompts=True)
    for side in (found.train, found.validation):
        batch = side[[0]]
        assert shown(batch.inputs["targets"]) == ["+2=4 ok."]
        assert batch.counted == 7
    if not streaming:
        assert found.description.startswith("2 prompts with answers of 16 bytes, all of them learned")
        assert found.facts["learned"] == 16


def test_a_chat_is_learned_with_all_of_its_template_where_the_recipe_says_so(tmp_path: Path) -> None:
    tokenizer = str(save_tokenizer(tmp_path / "tokenizer", template=CHATML))
    said = [("system", "the cat"), ("user", "sat"), ("assistant", "on"), ("user", "the"), ("assistant", "mat")]
    chat = {"messages": [{"role": role, "content": content} for role, content in said]}
    alone = {"messages": chat["messages"][:2]}
    path = lines(tmp_path / "a.jsonl", [chat, alone, chat])
    asked: dict[str, Any] = {"tokenizer": tokenizer, "packing": "none", "sequence_length": 64}
    found = opened("dataset", path, **asked, train_on_prompts=True)
    for number in range(len(found.train)):
        inputs = found.train[[number]].inputs
        tokens, targets = inputs["tokens"][0].tolist(), inputs["targets"][0].tolist()
        learned = targets[: targets.index(-100)]
        assert tokens[1 : len(learned)] == learned[:-1], "all but the first token is a target"
        assert len(learned) > 4
    assert len(found.train) + len(found.validation) == 3, "one without an answer too"
    weighted = {"messages": [{**chat["messages"][2], "weight": 0}, *chat["messages"][3:]]}
    lines(path, [chat, weighted])
    with pytest.raises(
        TrainingError, match=r"a\.jsonl:2: message 1 says that it is not learned, and data.train_on_pro"
    ):
        opened("dataset", path, **asked, train_on_prompts=True)
    seen = look(recipe_of("dataset", path, **asked, train_on_prompts=True), str, {})
    assert seen.fault is not None and "a.jsonl:2: message 1 says that it is not learned" in seen.fault[0]


def test_rows_that_say_themselves_what_is_learned_are_refused_beside_learned_prompts(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}] * 3)
    with pytest.raises(TrainingError, match=r"data\.train_on_prompts learns all of a row, and the labels of these"):
        opened("dataset", path, train_on_prompts=True)


def test_prompts_that_leave_no_room_for_an_answer_are_no_data_set(read: Read) -> None:
    message = r"nothing is left to train on: 6 rows in .*a\.jsonl, 5 of them with nothing to learn within 8 tokens"
    with pytest.raises(TrainingError, match=message) as caught:
        read(*[TOO_LONG] * 6, **ASKED)
    assert caught.value.diagnostics[0].hint.startswith("raise data.sequence_length")


def test_a_sample_that_its_prompt_fills_is_left_out_and_said(read: Read) -> None:
    rows = [ANSWER, TOO_LONG, ANSWER, {"ask": "3+3=", "say": "6 ok"}]
    found = read(*rows, **ASKED)
    assert len(found.train) + len(found.validation) == 3
    assert found.description.endswith("(1 left out: nothing to learn within 8 tokens)")
    assert found.facts["left_out"] == 1
    assert any(each.startswith("25.0% of the texts is left out") for each in found.remarks)
    roomy = read(*rows, **{**ASKED, "sequence_length": 32})
    assert "left out" not in roomy.description and "left_out" not in roomy.facts and not roomy.remarks


def test_rows_of_which_a_part_is_empty_are_passed_over_where_the_recipe_says_so(read: Read) -> None:
    rows = [ANSWER, {"ask": "", "say": "yes"}, {"ask": "1+1=", "say": None}, {"ask": "0+0=", "say": "0 ok"}]
    found = read(*rows, **ASKED, skip_empty=True)
    assert found.facts["rows_passed_over"] == found.facts["texts"] == 2
    assert found.facts["rows"] == 4
    with pytest.raises(TrainingError, match=r"a\.jsonl:2: field 'en.text' is missing"):
        rows = [{"en": {"text": ""}}, {"en": {}}, {"en": {"text": "abc"}}]
        read(*rows, columns={"text": "en.text"}, skip_empty=True)


def test_several_files_are_read_in_order(tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl", [{"text": "abcd"}])
    (tmp_path / "b.jsonl").write_text('\n{"text": "uvwx"}')
    more: dict[str, Any] = {"validation_path": str(tmp_path / "a.jsonl"), "packing": "none", "sequence_length": 4}
    found = opened("dataset", [tmp_path / "b.jsonl", tmp_path / "a.jsonl"], **more)
    assert [each[:3] for each in shown(found.train[[0, 1]].inputs["tokens"])] == ["uvw", "abc"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "ab"}\n{"text": ', "{path}:2 is not JSON"),
        ('{"text": "ab"}\n[1]\n', "{path}:2 is not a JSON object"),
        ('{"text": "ab"}\n\n{"txt": "ab"}\n', "{path}:3: field 'text' is missing"),
        ('{"text": 7}\n', "{path}:1: field 'text' is no text"),
        ('{"text": ""}\n', "{path}:1: field 'text' is empty"),
        (b'{"text": "\xff"}\n', "{path}:1 is not JSON"),
        ("", "{path} has no row"),
        ('{"text": "ab"}\n', "nothing is left to evaluate on: 1 row in {path}"),
        ('{"text": "a"}\n' * 2, "nothing is left to train on: 2 rows in {path}"),
        (None, "{path} does not exist"),
    ],
)
def test_a_wrong_line_is_named_before_the_first_step(content: str | bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TrainingError) as caught:
        opened("dataset", path, sequence_length=4)
    assert f"data.path: {message.format(path=path)}" in str(caught.value)


def test_bytes_outside_the_vocabulary_are_refused(read: Read) -> None:
    asked = Recipe.model_validate({"model": {"kind": "gpt", "vocab_size": 100}})
    with pytest.raises(TrainingError, match=r"a vocabulary of 100 is too small for token 109 of .*a\.jsonl:1"):
        fitting_source(read({"text": "abcdefghijklm"}, {"text": "ab"}), build_gpt(asked), asked)


def test_labels_by_name_are_numbered_in_order_and_said(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", moods(("abc", "pos"), ("defghijklmn", "neg"), ("x", "pos")))
    held_out = {"validation_path": str(lines(tmp_path / "b.jsonl", moods(("y", "neutral"))))}
    found = labelled(path, **held_out)
    batch = found.train[[1, 0]]
    assert batch.inputs["labels"].tolist() == [0, 2]
    assert batch.inputs["input_ids"].tolist() == [list(b"defghijk"), [*b"abc", 0, 0, 0, 0, 0]]
    assert batch.inputs["attention_mask"].tolist() == [[1] * 8, [1, 1, 1, 0, 0, 0, 0, 0]]
    assert batch.counted == 2
    assert found.validation[[0]].inputs["labels"].tolist() == [1]
    assert found.facts["labels"] == "0 neg, 1 neutral, 2 pos"
    assert found.description.endswith("with 3 labels (0 neg, 1 neutral, 2 pos) (1 cut at 8 tokens)")
    named = labelled(path, labels=["pos", "neutral", "neg"], **held_out)
    assert named.train[[0, 1]].inputs["labels"].tolist() == [0, 2]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"text": "b", "mood": "so-so"}, r"a\.jsonl:2: label 'so-so' is not in data.labels: pos, neg"),
        ({"text": "b", "mood": -1}, r"a\.jsonl:2: field 'mood' has label -1"),
        (
            {"text": "b", "mood": 10**25},
            r"a\.jsonl:2: field 'mood' has label 1000000+, and no label is above 1,048,575",
        ),
        ({"text": "b", "mood": 0.5}, r"a\.jsonl:2: field 'mood' is not a label"),
        ({"text": "b", "mood": None}, r"a\.jsonl:2: field 'mood' is not a label"),
        ({"text": "b"}, r"a\.jsonl:2: field 'mood' is missing"),
        ({"text": "b", "mood": 1}, r"a\.jsonl:2: label 1 is a number, but the label of .*a\.jsonl:1 is a name"),
    ],
)
def test_a_label_that_cannot_be_is_named_by_line(second: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=message):
        labelled(lines(tmp_path / "a.jsonl", [*moods(("a", "pos")), second]), labels=["pos", "neg"])


@pytest.mark.parametrize(
    ("config", "message", "hint"),
    [
        ({"num_labels": 2}, r"a\.jsonl:2: label 4 is too high: the model has 2, from 0", "num_labels to 5"),
        ({"num_labels": 5, "pad_token_id": None}, "pad_token_id is not set", "set it to 0"),
        ({"num_labels": 5, "pad_token_id": 7}, "pad_token_id is 7, and texts are padded with 0", "pad_token_id to 0"),
    ],
)
def test_labels_and_padding_must_be_those_of_the_model(
    config: dict[str, Any], message: str, hint: str, make_settings: MakeSettings, tmp_path: Path
) -> None:
    path = lines(tmp_path / "a.jsonl", moods(("a", 0), ("b", 4), ("c", 1)))
    data = {"kind": "dataset", "path": str(path), "columns": {"label": "mood"}, "sequence_length": 8}
    with pytest.raises(TrainingError, match=message) as caught:
        parts_of(make_settings(data=data, model={**BERT, "config": {**TINY, **config}}))
    assert re.search(hint, caught.value.diagnostics[0].hint)


def test_more_labels_than_a_trained_classifier_has_are_not_asked_of_its_config(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    import transformers

    config = transformers.BertConfig(**TINY, num_labels=2, pad_token_id=0)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "model")
    path = lines(tmp_path / "a.jsonl", moods(("a", 0), ("b", 2), ("c", 1)))
    data = {"kind": "dataset", "path": str(path), "columns": {"label": "mood"}, "sequence_length": 8}
    model = {"kind": "hf", "path": str(tmp_path / "model"), "task": "sequence_classification"}
    with pytest.raises(TrainingError, match=r"a\.jsonl:2: label 2 is too high: the model has 2") as caught:
        parts_of(make_settings(data=data, model=model))
    assert "num_labels" not in caught.value.diagnostics[0].hint, "with which the head would be of another size"


@pytest.mark.parametrize("streaming", [False, True])
def test_a_number_beyond_the_names_of_the_labels_is_refused(streaming: bool, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", moods(("a", 1), ("b", 2), ("c", 0), ("d", 1)))
    settings = {"streaming": True, "validation_rows": 2} if streaming else {}
    with pytest.raises(TrainingError, match=r"a\.jsonl:2: label 2 is not in data.labels: pos, neg"):
        labelled(path, labels=["pos", "neg"], **settings)


def test_a_saved_data_set_gives_texts_with_its_own_validation_split(tmp_path: Path) -> None:
    from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

    kinds = Features({"text": Value("string"), "mood": ClassLabel(names=["bad", "good"])})
    train = Dataset.from_dict({"text": ["abc", "def", "ghi"], "mood": [1, 0, 1]}, features=kinds)
    held_out = Dataset.from_dict({"text": ["xyz"], "mood": [0]}, features=kinds)
    DatasetDict({"train": train, "validation": held_out, "test": held_out}).save_to_disk(tmp_path / "set")
    texts: dict[str, Any] = {"columns": {"text": "text"}, "packing": "none", "sequence_length": 8}
    found = opened("dataset", tmp_path / "set", **texts)
    assert found.train[[2]].inputs["tokens"].tolist() == [[*b"gh", 0, 0, 0, 0, 0, 0]]
    assert (len(found.train), len(found.validation)) == (3, 1)
    saved = labelled(tmp_path / "set")
    assert saved.facts["labels"] == "0 bad, 1 good"
    assert saved.validation[[0]].inputs["labels"].tolist() == [0]
    train.save_to_disk(tmp_path / "plain")
    plain = opened("dataset", tmp_path / "plain", **texts, validation_fraction=0.4)
    assert len(plain.validation) == 1
    train.to_parquet(tmp_path / "files" / "train-00000-of-00001.parquet")
    held_out.to_parquet(tmp_path / "files" / "val.parquet")
    again = labelled(tmp_path / "files")
    assert {**again.facts, "content": saved.facts["content"]} == saved.facts
    assert again.train[[0, 1, 2]].inputs["input_ids"].equal(saved.train[[0, 1, 2]].inputs["input_ids"])
    lines(tmp_path / "lines" / "rows.jsonl", [{"text": text} for text in ("abc", "def", "ghi")])
    assert len(opened("dataset", tmp_path / "lines", **texts).train) == 2


def test_files_that_name_their_labels_differently_need_names_in_the_recipe(tmp_path: Path) -> None:
    from datasets import ClassLabel, Dataset, Features, Value

    for number, names in enumerate((["bad", "good"], ["good", "bad"])):
        kinds = Features({"text": Value("string"), "mood": ClassLabel(names=names)})
        rows = Dataset.from_dict({"text": ["abc", "def"], "mood": [1, 0]}, features=kinds)
        rows.to_parquet(tmp_path / "set" / f"train-0000{number}-of-00002.parquet")
    with pytest.raises(TrainingError, match="give labels different names") as caught:
        labelled(tmp_path / "set")
    assert caught.value.diagnostics[0].hint == "set data.labels"
    assert labelled(tmp_path / "set", labels=["bad", "good"]).facts["labels"] == "0 bad, 1 good"


def test_chats_and_ready_tokens_of_a_data_set_are_read(make_tokenizer: Callable[..., Path], tmp_path: Path) -> None:
    from datasets import Dataset

    chat = [{"role": "user", "content": "two"}, {"role": "assistant", "content": "the cat"}]
    held = {"chat": [chat] * 3, "ids": [[5, 6, 7, 8]] * 3, "goals": [[-100, -100, 7, 8]] * 3}
    Dataset.from_dict(held).save_to_disk(tmp_path / "set")
    asked = {"packing": "none", "tokenizer": str(make_tokenizer(template=CHATML)), "sequence_length": 32}
    model = {"kind": "gpt", "vocab_size": 400}
    found = opened("dataset", tmp_path / "set", model, columns={"messages": "chat"}, **asked)
    assert found.encoder.decode([t for t in found.train[[0]].inputs["targets"][0].tolist() if t >= 0]) == "the cat"
    columns = {"input_ids": "ids", "labels": "goals"}
    ready = opened("dataset", tmp_path / "set", packing="none", columns=columns, sequence_length=8)
    assert "12 tokens" in ready.description  # nobody cut them into bytes
    assert ready.train[[0]].inputs["tokens"][0, :3].tolist() == [5, 6, 7]
    assert ready.train[[0]].inputs["targets"][0].tolist() == [-100, 7, 8, *[-100] * 5]


@pytest.mark.parametrize(
    ("settings", "message", "hint"),
    [
        ({"columns": {"text": "txt"}}, r"data-.*\.arrow: its first row has text, ids, mood", "did you mean text?"),
        ({"columns": {"text": "nothing"}}, r"no column 'nothing' for text", "name a column that there is"),
        ({"subset": "en"}, r"data.subset: .*set has no subset 'en'", "leave data.subset out"),
        ({"split": "test"}, r"data.split: .*set has no split 'test'", "it has train"),
        ({"validation_split": "dev"}, r"data.validation_split: .*set has no split 'dev'", "it has train"),
        ({"columns": {"text": "ids"}}, r"\.arrow: row 0: field 'ids' is no text", ""),
        ({"columns": {"input_ids": "text"}}, r"\.arrow: row 0: field 'text' is no list", ""),
        ({"columns": {"input_ids": "ids", "labels": "goals"}}, r"no column 'goals'", ""),
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

    def refused(name: str, message: str) -> None:
        with pytest.raises(TrainingError, match=message):
            opened("dataset", tmp_path / name)

    refused("gone", r"data\.path: .*/gone does not exist")
    (tmp_path / "empty").mkdir()
    refused("empty", r"data\.path: .*/empty holds no rows")
    (tmp_path / "empty" / "a.parquet").write_bytes(b"PAR1 but no more")
    refused("empty", r"a\.parquet is not a valid parquet file")
    Dataset.from_dict({"text": ["a" * 100] * 9}).save_to_disk(tmp_path / "torn")
    arrow = next((tmp_path / "torn").glob("*.arrow"))
    arrow.write_bytes(arrow.read_bytes()[:300])
    refused("torn", rf"data\.path: {arrow}")
    (tmp_path / "torn" / "state.json").write_text("{")
    refused("torn", r"data\.path: .*/torn is not a valid data set")
    lines(tmp_path / "nothing" / "train.jsonl", [])
    refused("nothing", r"train\.jsonl has no row")


def test_a_text_without_the_token_at_which_its_label_is_read_is_an_error(make_settings: MakeSettings) -> None:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 32}
    model = prepared_model(make_settings(model={**BERT, "architecture": "t5", "config": sizes}))
    tokens, labels = torch.full((2, 4), 5), torch.zeros(2, dtype=torch.long)
    with pytest.raises(TrainingError, match=r"t5 reads the label at token 1 \(model.config.eos_token_id\)"):
        model(tokens, labels)
    tokens[:, -1] = 1
    assert model(tokens, labels).isfinite()
    assert any("decoders begin with the padding token" in text for _, text in model.remarks)
