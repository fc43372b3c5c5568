"""Rows that are read while they are trained on: their order, where a run goes on, and what they take of memory."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import pickle
import random
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.sources import BERT, TINY, lines, parquet, shown
from tests.trainer.sources import opened as opened_in_memory
from tests.trainer.training import MakeSettings, parts_of, trained
from trainkit.data.files import split_files
from trainkit.data.look import look
from trainkit.errors import TrainingError
from trainkit.launch_plan.model import SolvedBatch
from trainkit.recipe.schema import Recipe
from trainkit.trainer.checkpoint.resuming import resume
from trainkit.trainer.data.loader import training_batches
from trainkit.trainer.data.sampler import SampleOrder
from trainkit.trainer.data.source import Batch, Source
from trainkit.trainer.data.vocabulary import fitting_source
from trainkit.trainer.models.gpt import build_gpt

LENGTH, GLOBAL = 16, 16
STREAMED = SampleOrder(0, None, GLOBAL)
PACKED = pytest.mark.parametrize("packing", ["dense", "isolated", "none"])
opened = partial(opened_in_memory, sequence_length=LENGTH, streaming=True)


def texts(count: int, seed: object = 0) -> list[dict[str, Any]]:
    """Rows that are each something to predict."""
    chance = random.Random(str(seed))
    return [{"text": "".join(chance.choices("abcdef ", k=chance.randint(2, 60))), "seed": seed} for _ in range(count)]


def short(count: int, seed: object = 0) -> list[dict[str, Any]]:
    """Rows that are a sample each: the rest of one that is longer is another, and in a stream cut off."""
    return [{**each, "text": each["text"][: LENGTH + 1]} for each in texts(count, seed)]


def resumed(source: Source, loader_state: str, number: int) -> Source:
    """The source, begun where a loader_state says, before a sample."""
    assert source.stream is not None
    assert source.stream.go_on(loader_state, number)
    return source


def mixed(*sources: tuple[Path, float], **settings: Any) -> Source:
    mix = [{"path": str(path), "weight": float(weight)} for path, weight in sources]
    return opened("dataset", mix=mix, validation_rows=3, **settings)


def steps(
    source: Source, chosen: range, order: SampleOrder = STREAMED, start: int = 0, stop: int = GLOBAL
) -> list[Batch]:
    return [source.train[order.indices(step, start, stop)] for step in chosen]


def same(one: Sequence[Batch], other: Sequence[Batch]) -> bool:
    return [each.counted for each in one] == [each.counted for each in other] and all(
        torch.equal(first.inputs[name], second.inputs[name])
        for first, second in zip(one, other, strict=True)
        for name in {*first.inputs, *second.inputs}
    )


def names_of(source: Source, chosen: range) -> list[str]:
    """The texts of some steps' samples."""
    return [text for batch in steps(source, chosen) for text in shown(batch.inputs["tokens"])]


@pytest.mark.parametrize("packing", ["dense", "none"])  # isolated, a stream has other bins
@pytest.mark.parametrize("form", ["parquet", "jsonl", "save_to_disk"])
def test_data_that_one_buffer_holds_has_the_samples_and_the_order_of_data_that_is_not_streamed(
    form: str, packing: str, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    if form == "save_to_disk":
        datasets = pytest.importorskip("datasets")
        splits = {"train": short(150), "validation": short(40, 1)}
        datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in splits.items()}).save_to_disk(
            str(folder)
        )
    else:
        folder.mkdir()
        write = parquet if form == "parquet" else lines
        write(folder / "train-0.x".replace("x", form), short(150))
        write(folder / "validation-0.x".replace("x", form), short(40, 1))
    settings: dict[str, Any] = {"packing": packing, "shuffle_buffer": 10_000}
    whole = opened("dataset", folder, packing=packing, streaming=False)
    streamed = opened("dataset", folder, **settings)
    order, twice = SampleOrder(0, len(whole.train), GLOBAL), range(2 * len(whole.train) // GLOBAL + 2)
    assert same(steps(streamed, twice), steps(whole, twice, order))
    every = range(len(whole.validation))
    assert len(streamed.validation) == len(every)
    assert same([streamed.validation[every]], [whole.validation[every]])


def pieces_in(batch: Batch) -> list[str]:
    """The texts, or pieces of them, in samples of several."""
    found = []
    for ids, positions in zip(batch.inputs["tokens"].tolist(), batch.inputs["position_ids"].tolist(), strict=True):
        begins = [place for place, position in enumerate(positions) if position == 0]
        parts = (ids[one:other] for one, other in zip(begins, [*begins[1:], len(ids)], strict=True))
        found += [bytes(part).decode() for part in parts if any(part)]
    return found


def test_isolated_a_stream_has_all_of_every_text_as_other_data_has(tmp_path: Path) -> None:
    for name in ("train", "validation"):
        lines(tmp_path / "data" / f"{name}.jsonl", texts(80, name))
    whole = opened("dataset", tmp_path / "data", streaming=False)
    streamed = opened("dataset", tmp_path / "data", shuffle_buffer=10_000)
    expected = pieces_in(whole.train[range(len(whole.train))])
    found: list[str] = []
    for number in range(len(whole.train)):
        found += pieces_in(streamed.train[[number]]) if len(found) < len(expected) else []
    assert sorted(found) == sorted(expected)
    assert max(map(len, expected)) == LENGTH < max(len(row["text"]) for row in texts(80, "train"))
    held_out = [pieces_in(each.validation[range(len(each.validation))]) for each in (whole, streamed)]
    assert sorted(held_out[0]) == sorted(held_out[1])


def test_losses_of_streamed_and_of_other_data_are_equal(make_settings: MakeSettings, tmp_path: Path) -> None:
    for name in ("train", "validation"):
        parquet(tmp_path / "data" / f"{name}.parquet", texts(80, name))
    data = {"kind": "dataset", "path": str(tmp_path / "data"), "sequence_length": 32, "packing": "dense"}
    curves = [
        trained(make_settings(train={"steps": 6}, data={**data, **more})).losses for more in ({}, {"streaming": True})
    ]
    assert curves[0] == curves[1]
    assert len(curves[0]) == 6


def test_a_masked_model_learns_the_same_of_streamed_texts(make_settings: MakeSettings, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    for name in ("train", "validation"):
        parquet(tmp_path / "data" / f"{name}.parquet", texts(60, name))
    model = {**BERT, "task": "masked_lm", "mask_token": 3, "config": {**TINY, "vocab_size": 300}}
    data = {"kind": "dataset", "path": str(tmp_path / "data"), "sequence_length": 16}
    curves = [
        trained(make_settings(train={"steps": 3}, model=model, data={**data, **more})).losses
        for more in ({}, {"streaming": True})
    ]
    assert curves[0] == curves[1]


def test_samples_are_shuffled_in_the_buffer_and_anew_in_each_epoch(tmp_path: Path) -> None:
    rows = [{"text": f"{number:03}"} for number in range(103)]
    path = lines(tmp_path / "a.jsonl", rows)
    settings: dict[str, Any] = {"packing": "none", "validation_rows": 3}
    plain = opened("dataset", path, shuffle_buffer=0, **settings)
    names = names_of(plain, range(13))
    assert [name[:2] for name in names[:4]] == ["00", "00", "00", "00"]
    first = [f"{number:03}"[:2] for number in range(3, 103)]
    assert [name[:2] for name in names[:200]] == first * 2
    shuffled = opened("dataset", path, shuffle_buffer=10, **settings)
    found = [int(batch.inputs["targets"][row, 1] - 48) + 10 * int(batch.inputs["targets"][row, 0] - 48)
             for batch in steps(shuffled, range(13)) for row in range(GLOBAL)]  # fmt: skip
    for start in range(0, 100, 10):  # the last two digits of a window's rows
        assert sorted(found[start : start + 10]) == sorted(number % 100 for number in range(start + 3, start + 13))
    assert sorted(found[100:200]) == sorted(found[:100])
    assert found[100:200] != found[:100]
    assert found[:10] != list(range(3, 13))


def test_files_come_in_an_order_of_their_own_in_each_epoch(tmp_path: Path) -> None:
    paths = [str(lines(tmp_path / f"{name}.jsonl", [{"text": name * 3}] * 4)) for name in "abcdefgh"]
    orders = {}
    for shuffled in (True, False):
        found = opened("dataset", path=None, mix=[{"path": paths}], packing="none", validation_rows=1,
                       shuffle_files=shuffled, shuffle_buffer=0)  # fmt: skip
        names = [row[0] for row in names_of(found, range(6))][:93]
        orders[shuffled] = ["".join(dict.fromkeys(names[start : start + 31])) for start in (0, 31, 62)]
    assert orders[False] == ["abcdefgh"] * 3
    assert len(set(orders[True])) == 3
    assert {"".join(sorted(each)) for each in orders[True]} == {"abcdefgh"}


@PACKED
def test_the_same_samples_come_on_any_number_of_ranks_and_loader_processes(packing: str, tmp_path: Path) -> None:
    parquet(tmp_path / "a" / "0.parquet", texts(70, "a"))
    mix = [
        {"path": str(tmp_path / "a"), "weight": 3.0},
        {"path": str(lines(tmp_path / "b.jsonl", texts(70, "b"))), "weight": 1.0},
    ]
    settings: dict[str, Any] = {"mix": mix, "packing": packing, "shuffle_buffer": 20, "validation_rows": 3}
    whole = steps(opened("dataset", **settings), range(20))
    for ranks, workers in ((1, 2), (2, 0), (4, 1)):
        batch = SolvedBatch(GLOBAL, 4, GLOBAL // 4 // ranks, ranks, 4)
        shares = []
        for rank in range(ranks):
            source = opened("dataset", **settings, workers=workers)
            data = Recipe.model_validate({"data": {"kind": "text", "workers": workers}}).data
            shares.append(
                list(training_batches(source.train, STREAMED, batch, rank, steps=range(20), data=data, pin=False))
            )
        joined = [
            Batch({name: torch.cat([each.inputs[name] for each in parts]) for name in parts[0].inputs},
                  sum(each.counted for each in parts))
            for parts in zip(*shares, strict=True)
        ]  # fmt: skip
        assert same(joined, whole), (ranks, workers)


@PACKED
def test_from_any_bookmark_the_stream_goes_on_bit_equal(packing: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        parquet(tmp_path / "p" / f"{name}.parquet", texts(60, name), group=7)
    lines(tmp_path / "c.jsonl", texts(50, "c"))
    (tmp_path / "j").mkdir()
    (tmp_path / "c.jsonl").rename(tmp_path / "j" / "c.jsonl")
    mix = [{"path": str(tmp_path / name), "weight": weight} for name, weight in (("p", 0.7), ("j", 0.3))]

    def fresh() -> Source:
        return opened("dataset", mix=mix, packing=packing, shuffle_buffer=13, validation_rows=5)

    whole = steps(fresh(), range(40))
    for step in (0, 1, 5, 17, 38):
        source = resumed(fresh(), whole[step].loader_state, GLOBAL * (step + 1))
        again = pickle.loads(pickle.dumps(source))
        assert same(steps(source, range(step + 1, 40)), whole[step + 1 :])
        assert same(steps(again, range(step + 1, 40)), whole[step + 1 :])
    assert same(steps(source, range(3)), whole[:3]), "what is before a loader_state is read again"


@PACKED
@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_empty_rows_are_passed_over_where_the_recipe_says_so(form: str, packing: str, tmp_path: Path) -> None:
    write = parquet if form == "parquet" else lines
    filled = texts(90)
    empty = [{"text": text, "seed": 0} for text in ("", None)]
    both = [row for number, each in enumerate(filled) for row in ([*empty, each] if number % 4 == 0 else [each])]
    for name, rows in (("clean", filled), ("with", [*both, *empty])):
        (tmp_path / name).mkdir()
        write(tmp_path / name / f"train.{form}", rows)
    streamed: dict[str, Any] = {"packing": packing, "shuffle_buffer": 13, "validation_rows": 5}

    def fresh() -> Source:
        return opened("dataset", tmp_path / "with", skip_empty=True, **streamed)

    clean = steps(opened("dataset", tmp_path / "clean", **streamed), range(20))
    whole = steps(fresh(), range(20))
    assert same(whole, clean)
    assert same(steps(resumed(fresh(), whole[8].loader_state, GLOBAL * 9), range(9, 20)), whole[9:])
    one = opened("dataset", tmp_path / "clean", packing=packing, streaming=False)
    other = opened("dataset", tmp_path / "with", packing=packing, streaming=False, skip_empty=True)
    assert "(48 empty rows skipped)" in other.description
    assert other.facts["rows_passed_over"] == 48
    for name in ("texts", "bytes", "learned"):
        assert other.facts[name] == one.facts[name]
    for kept in ({"streaming": False, "packing": packing}, streamed):
        with pytest.raises(TrainingError, match="field 'text' is empty") as caught:
            steps(opened("dataset", tmp_path / "with", **kept), range(20))
        assert caught.value.diagnostics[0].hint == "data.skip_empty=true skips such rows"


@PACKED
@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_of_each_streamed_source_so_many_rows_are_read(form: str, packing: str, tmp_path: Path) -> None:
    write = parquet if form == "parquet" else lines
    rows = texts(90)
    paths = [write(tmp_path / "all" / f"{place}.{form}", rows[place : place + 30]) for place in (0, 30, 60)]
    few = [paths[0], write(tmp_path / f"part.{form}", rows[30:40])]
    other = lines(tmp_path / "other.jsonl", texts(40, "other"))
    streamed: dict[str, Any] = {"packing": packing, "shuffle_buffer": 13, "validation_rows": 5}

    def fresh(paths: Sequence[Path], other: Path, **more: Any) -> Source:
        mix = [{"path": [str(each) for each in paths]}, {"path": str(other)}]
        return opened("dataset", mix=mix, **streamed, **more)

    expected = fresh(few, other)
    found = fresh(paths, other, max_rows=40)
    whole = steps(found, range(20))
    assert same(whole, steps(expected, range(20)))
    assert same([found.validation[range(len(found.validation))]], [expected.validation[range(len(found.validation))]])
    assert same(steps(resumed(fresh(paths, other, max_rows=40), whole[8].loader_state, GLOBAL * 9), range(9, 20)),
                whole[9:])  # fmt: skip
    assert found.description.endswith(", at most the first 40 rows of each")
    assert found.facts["files"] == 3
    with pytest.raises(TrainingError, match="has no row to train on beside the 5 rows held out") as caught:
        fresh(paths, other, max_rows=5)
    assert caught.value.diagnostics[0].hint == "set data.validation_rows lower, or data.max_rows higher"


@PACKED
def test_what_is_before_a_bookmark_is_not_read_again(packing: str, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", texts(400))
    settings: dict[str, Any] = {"packing": packing, "shuffle_buffer": 20, "validation_rows": 2}
    whole = steps(opened("dataset", path, **settings), range(20))
    offset = json.loads(whole[10].loader_state)["windows"][0][5]
    content = path.read_bytes()
    kept = sum(map(len, content.splitlines(keepends=True)[:2]))  # held out
    assert offset > kept + 1000
    source = opened("dataset", path, **settings)
    path.write_bytes(content[:kept] + b"x" * (offset - kept) + content[offset:])
    assert same(steps(resumed(source, whole[10].loader_state, 11 * GLOBAL), range(11, 20)), whole[11:])
    with pytest.raises(TrainingError, match=r"a\.jsonl:3 is not JSON"):
        steps(opened("dataset", path, **settings), range(1))


def test_a_bookmark_of_another_stream_or_of_later_samples_is_not_taken(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", texts(90))
    plain: dict[str, Any] = {"shuffle_buffer": 20, "validation_rows": 9}
    loader_state = steps(opened("dataset", path, **plain), range(3))[2].loader_state

    def taken(number: int, text: str = loader_state, **settings: Any) -> bool:
        stream = opened("dataset", path, **{**plain, **settings}).stream
        assert stream is not None
        return stream.go_on(text, number)

    assert taken(2 * GLOBAL)
    assert not taken(2 * GLOBAL - 1)
    assert not taken(99, shuffle_buffer=21)
    assert taken(99, workers=2)
    damaged = json.loads(loader_state)
    for key, value in (("counts", [1, 2]), ("windows", [[0] * 6 + [-1]]), ("counts", [1.5])):
        with pytest.raises(TrainingError, match="position in the data stream is damaged"):
            taken(99, json.dumps({**damaged, key: value}))
    content = path.read_bytes()
    path.write_bytes(b"".join(reversed(content.splitlines(keepends=True))))
    assert not taken(99), "written anew, and as long as before"
    path.write_bytes(content + b'{"text": "more"}\n')
    assert not taken(99)


def test_sources_come_by_their_weights_and_begin_again_at_their_end(tmp_path: Path) -> None:
    paths = [lines(tmp_path / f"{name}.jsonl", [{"text": name * 9}] * 12) for name in "abc"]
    found = mixed((paths[0], 6), (paths[1], 0), (paths[2], 2), packing="none")
    names = "".join(row[0] for row in names_of(found, range(100)))
    assert set(names) == {"a", "c"}
    assert 0.7 < names.count("a") / len(names) < 0.8
    assert len({names[start : start + 8] for start in range(0, 400, 8)}) > 3, "drawn, not in turn"
    assert found.description.startswith("a stream of 75.0% a.jsonl (1 file,")


def test_a_source_of_a_mixture_may_name_its_own_field(tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl", [{"text": "aaaa"}] * 9)
    lines(tmp_path / "b.jsonl", [{"content": "bbbb"}] * 9)
    mix = [{"path": str(tmp_path / "a.jsonl")}, {"path": str(tmp_path / "b.jsonl"), "columns": {"text": "content"}}]
    found = opened("dataset", mix=mix, packing="none", validation_rows=1)
    assert {row[0] for row in names_of(found, range(4))} == {"a", "b"}


def test_the_first_rows_are_held_out_and_never_trained_on(tmp_path: Path) -> None:
    paths = [str(lines(tmp_path / f"{name}.jsonl", [{"text": name * 20}] * 3)) for name in "abcd"]
    found = opened("dataset", mix=[{"path": paths}], packing="none", validation_rows=4)
    assert [row[0] for row in shown(found.validation[range(4)].inputs["tokens"])] == ["a", "a", "a", "b"]
    names = "".join(row[0] for row in names_of(found, range(2)))
    assert sorted(names[:8]) == sorted("bbcccddd")


def test_no_row_that_is_held_out_is_trained_on_where_its_file_is_named_again(tmp_path: Path) -> None:
    a, b = (
        str(lines(tmp_path / f"{name}.jsonl", [{"text": f"{name}{number}."} for number in range(6)])) for name in "ab"
    )
    for mix, names in ([{"path": [a, a]}], "a"), ([{"path": [b, a]}, {"path": a}], "ab"):
        found = opened("dataset", mix=mix, packing="none", validation_rows=2)
        held_out = {row[:2] for row in shown(found.validation[range(len(found.validation))].inputs["tokens"])}
        seen = {row[:2] for row in names_of(found, range(9))}
        assert held_out == {f"{name}{number}" for name in names for number in range(2)}
        assert not seen & held_out
        assert {f"a{number}" for number in range(2, 6)} <= seen


@pytest.mark.parametrize("streaming", [True, False])
def test_token_ids_lie_in_a_mapping_of_lists(streaming: bool, tmp_path: Path) -> None:
    rows = [{"made": {"ids": [97, 98, 99], "kinds": [0] * number}} for number in range(1, 9)]
    parquet(tmp_path / "data" / "a.parquet", rows)
    settings: dict[str, Any] = {"validation_rows": 1} if streaming else {}
    found = opened(
        "dataset",
        tmp_path / "data",
        columns={"input_ids": "made.ids"},
        packing="none",
        streaming=streaming,
        **settings,
    )
    assert found.train[[0]].inputs["targets"][0, :3].tolist() == [98, 99, -100]


@pytest.mark.parametrize("streaming", [True, False])
def test_a_text_that_gives_no_token_is_named(streaming: bool, tmp_path: Path) -> None:
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(tmp_path / "words")
    path = lines(tmp_path / "a.jsonl", [*[{"text": "a b a b"}] * 4, {"text": " "}])
    settings: dict[str, Any] = {"validation_rows": 1} if streaming else {}
    with pytest.raises(TrainingError, match=r"a\.jsonl:5: field 'text' gives no token"):
        steps(opened("dataset", path, tokenizer=str(tmp_path / "words"), streaming=streaming, **settings), range(1))


def test_labels_of_a_stream_are_numbers_or_named_in_the_recipe(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [{"text": "abc", "mood": mood} for mood in ("good", "bad", "bad")])
    found = opened("dataset", path, BERT, columns={"label": "mood"}, labels=["bad", "good"], validation_rows=1)
    assert found.validation[[0]].inputs["labels"].tolist() == [1]
    assert found.train[[0, 1]].inputs["labels"].tolist() == [0, 0]
    with pytest.raises(TrainingError, match=r"a\.jsonl:1: label 'good' is a name, and data.labels is empty"):
        opened("dataset", path, BERT, columns={"label": "mood"}, validation_rows=1)
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"text": datasets.Value("string"), "mood": datasets.ClassLabel(names=["bad", "good"])})
    (tmp_path / "p").mkdir()
    rows = [{"text": "abc", "mood": number} for number in (0, 1, 1)]
    datasets.Dataset.from_list(rows, features=features).to_parquet(str(tmp_path / "p" / "a.parquet"))
    named = opened("dataset", tmp_path / "p", BERT, columns={"label": "mood"}, validation_rows=1)
    assert named.labels is not None
    assert named.labels.names == ("bad", "good")
    assert named.train[[0, 1]].inputs["labels"].tolist() == [1, 1]


DATA: dict[str, Any] = {"kind": "dataset", "path": "data"}
DAMAGED: Sequence[tuple[str, Mapping[str, Any], dict[str, Any], str]] = [
    # name, files with their rows or content, settings, message
    ("torn", {"a.jsonl": ("".join(json.dumps(row) + "\n" for row in texts(30)) + '{"text": "torn').encode()}, {},
     r"a\.jsonl:31 is not JSON: Unterminated string"),
    ("without a field", {"a.jsonl": [*texts(30), {"txt": "b"}, *texts(5)]}, {},
     r"a\.jsonl:31: field 'text' is missing"),
    ("without rows", {"a.jsonl": []}, {}, r"a\.jsonl has no row$"),
    ("all held out", {"a.jsonl": texts(5)}, {"validation_rows": 7},
     r"a\.jsonl has no row to train on beside the 5 rows held out for evaluation"),
    ("single bytes", {"a.jsonl": [*texts(5), {"text": "a"}]}, {"validation_rows": 5},
     r"the rows from .*a\.jsonl on do not fill a sample of 16 tokens"),
    ("filled by prompts", {"a.jsonl": [{"ask": "a" * (LENGTH + 1), "text": "b"}] * 9},
     {"columns": {"prompt": "ask", "completion": "text"}, "packing": "none"},
     r"3 rows held out of .* have no target to predict within 16 tokens"),
    ("nothing to evaluate on", {"data/validation.jsonl": [], "data/train.jsonl": texts(9)}, DATA,
     r"data \(1 file, .* has no row to evaluate on"),
    ("without a column", {"data/0.parquet": texts(9), "data/1.parquet": [{"texts": "a"}]}, DATA,
     r"data/1\.parquet has no column 'text'.*did you mean texts\?"),
    ("parquet as lines", {"a.jsonl": b"PAR1"}, {}, r"a\.jsonl is a parquet file"),
    ("a torn archive", {"a.jsonl": gzip.compress(b'{"text": "abc"}' * 900)[:-20]}, {},
     r"a\.jsonl cannot be unpacked"),
    ("half an array", {"a.jsonl": json.dumps(texts(9)).encode()[:-20]}, {}, r"a\.jsonl: row 8 is not JSON"),
    ("no rows at all", {"a.jsonl": b"\x90\x91"}, {}, r"a\.jsonl:1 is not JSON"),
    ("a null among ids", {"data/0.parquet": [*[{"ids": [7, 8]}] * 6, {"ids": [7, None, 8]}]},
     {**DATA, "columns": {"input_ids": "ids"}},
     r"data/0\.parquet: row 6: field 'ids' holds None: expected whole numbers"),
    ("an unknown split", {"data/train.parquet": texts(9)}, {**DATA, "split": "tran"},
     r"data.split: .*/data has no split 'tran'"),
    ("a subset of a file", {"train.parquet": texts(9)}, {"kind": "dataset", "path": "train.parquet", "subset": "en"},
     r"data.subset: .*/train.parquet has no subset 'en'"),
    ("without its second source", {"a.jsonl": texts(9)},
     {"path": None, "mix": [{"path": "a.jsonl"}, {"path": "b.jsonl"}], "validation_rows": 1},
     r"b\.jsonl does not exist"),
]  # fmt: skip


def refused(message: str, **settings: Any) -> None:
    """Opens a stream and reads on until it is refused."""
    with pytest.raises(TrainingError) as caught:
        steps(
            opened(**{"kind": "dataset", "path": "a.jsonl", "validation_rows": 3, "shuffle_buffer": 8, **settings}),
            range(200),
        )
    whole = f"{caught.value} {caught.value.diagnostics[0].hint}" if "did you" in message else str(caught.value)
    assert re.search(message, whole), whole


@pytest.mark.parametrize(
    ("files", "settings", "message"), [each[1:] for each in DAMAGED], ids=[each[0] for each in DAMAGED]
)
def test_bad_input_is_one_message_that_names_file_and_row(
    files: Mapping[str, Any], settings: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            (parquet if path.suffix == ".parquet" else lines)(path, content)
    refused(message, **settings)


@pytest.mark.parametrize("streaming", [True, False])
def test_a_pipe_of_rows_is_refused(streaming: bool, tmp_path: Path) -> None:
    pipe = tmp_path / "a.jsonl"
    os.mkfifo(pipe)
    message = r"a\.jsonl is a device or a pipe, and rows are read more than once"
    with pytest.raises(TrainingError, match=message) as caught:
        opened("dataset", pipe, streaming=streaming)
    assert caught.value.diagnostics[0].hint == "write its rows to a file"
    recipe = Recipe.model_validate({"data": {"kind": "dataset", "path": str(pipe)}})
    fault = look(recipe, str, {}).fault
    assert fault is not None and "is a device or a pipe" in fault[0]


def test_damaged_tables_are_named_with_the_row(tmp_path: Path) -> None:
    data: dict[str, Any] = {"kind": "dataset", "path": tmp_path / "data"}
    paths = [parquet(tmp_path / "data" / f"{number}.parquet", texts(300, number), 150) for number in range(4)]
    whole = paths[2].read_bytes()
    middle = len(whole) // 2
    paths[2].write_bytes(whole[: middle - 900] + b"\xff" * 800 + whole[middle - 100 :])
    refused(r"data/2\.parquet: row \d+ cannot be read", **data)
    paths[2].write_bytes(whole[:-40])
    refused(r"data/2\.parquet is not a valid parquet file", **data)
    arrow = pytest.importorskip("pyarrow")
    found = arrow.array([b"abc"] * 25 + [b"\xff"] + [b"abc"] * 9, arrow.binary())
    column = arrow.StringArray.from_buffers(len(found), *found.buffers()[1:])
    for path in paths:
        pytest.importorskip("pyarrow.parquet").write_table(arrow.table({"text": column}), path)
    refused(r"data/\d\.parquet: row 25 cannot be read: 'utf-8'", **data)


@pytest.mark.parametrize(("packing", "row"), [("dense", 9), ("none", 10)])  # dense, it begins in the row before
def test_a_token_that_the_model_does_not_know_is_named_by_its_row(packing: str, row: int, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [*[{"text": "a" * 40}] * 9, {"text": "z" * 40}, {"text": "a" * 40}])
    recipe = Recipe.model_validate({"model": {"kind": "gpt", "vocab_size": 120, "layers": 1}})
    source = opened("dataset", path, packing=packing, validation_rows=2, shuffle_buffer=0)
    fitting = fitting_source(source, build_gpt(recipe), recipe)
    with pytest.raises(TrainingError, match=rf"sample \d+, from .*a\.jsonl:{row} on, has tokens of 122"):
        steps(fitting, range(3))


def test_a_folder_may_be_named_for_a_split(tmp_path: Path) -> None:
    names = ("train/0.jsonl", "validation/0.jsonl", "test/train-0.jsonl", "more.jsonl", "dev-0.jsonl")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        lines(tmp_path / name, texts(1))
    found = {
        split: [str(file.relative_to(tmp_path)) for file in files] for split, files in split_files(tmp_path).items()
    }
    assert found == {
        "train": ["more.jsonl", "test/train-0.jsonl", "train/0.jsonl"],
        "validation": ["dev-0.jsonl", "validation/0.jsonl"],
    }


def test_folders_behind_links_are_read_and_hidden_files_are_not(tmp_path: Path) -> None:
    for name in ("there/0.jsonl", "data/.ipynb_checkpoints/train-checkpoint.jsonl", "data/__MACOSX/a.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        lines(tmp_path / name, texts(1))
    lines(tmp_path / "data" / "._train.jsonl", texts(1))
    (tmp_path / "data" / "train").symlink_to(tmp_path / "there")
    (tmp_path / "there" / "round").symlink_to(tmp_path / "there")
    (tmp_path / "data" / "again").symlink_to(tmp_path / "data")
    assert split_files(tmp_path / "data") == {"train": [tmp_path / "data" / "train" / "0.jsonl"]}


_READ_THROUGH = """
import json, resource, sys
from pathlib import Path
from trainkit.recipe.schema import Recipe
from trainkit.trainer.data import SOURCES
from trainkit.trainer.metrics.memory_breakdown import status_bytes
data, room, samples = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
if data["path"].endswith("l"):
    most = status_bytes("VmData")["VmData"] + room
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
source = SOURCES[data["kind"]](Recipe.model_validate({"data": data}), Path())
source.train[range(16)]
Path("/proc/self/clear_refs").write_text("5")  # libraries are there: from here on is the peak
before = status_bytes("VmHWM")["VmHWM"]
for number in range(0, samples, 16):
    source.train[range(number, number + 16)]
windows = json.loads(source.train[[samples]].loader_state)["windows"]
print(windows[0][0], status_bytes("VmHWM")["VmHWM"] - before < room)
"""


@pytest.mark.e2e
# Arrow's allocator takes address space far ahead of what it uses, so that its peak is measured and not limited.
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_stream_much_larger_than_the_memory_is_read_in_it(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    rows = [{"text": f"{number} are said again and again " * 150} for number in range(7_000)]
    write = lines if kind == "jsonl" else partial(parquet, group=len(rows), compression="none", use_dictionary=False)
    path = write(tmp_path / ("a.jsonl" if kind == "jsonl" else "a.parquet"), rows)
    size, room, length = path.stat().st_size, 15_000_000, 4096
    assert size > 2 * room
    data = {"kind": "dataset", "path": str(path), "sequence_length": length, "packing": "dense"}

    words = [json.dumps({**data, "streaming": True, "shuffle_buffer": 100}), str(room), str(size // length)]
    streamed = subprocess.run(
        [sys.executable, "-c", _READ_THROUGH, *words], capture_output=True, text=True, check=False, timeout=120
    )
    assert streamed.stdout.endswith(" True\n"), (streamed.stdout, streamed.stderr)


def test_another_foot_of_a_parquet_file_is_another_stream(tmp_path: Path) -> None:
    rows = [{"text": f"{number % 1000:03}" * 30} for number in range(20_000)]
    (tmp_path / "data").mkdir()
    path, settings = tmp_path / "data" / "a.parquet", {"compression": "none", "use_dictionary": False}
    parquet(path, rows, 200, **settings)
    before, size = opened("dataset", path.parent).facts["stream"], path.stat().st_size
    rows[5000]["text"] = "999" * 30  # the highest of its group
    parquet(path, rows, 200, **settings)
    assert path.stat().st_size == size
    assert opened("dataset", path.parent).facts["stream"] != before


def test_a_resumed_run_says_which_files_are_newer_than_its_checkpoint(
    make_settings: MakeSettings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = lines(tmp_path / "a.jsonl", texts(60))
    data = {"kind": "dataset", "streaming": True, "sequence_length": 16, "path": str(path), "validation_rows": 5}
    settings = make_settings(data=data, train={"steps": 2}, checkpoint={"every_steps": 2})
    trained(settings)
    again = dataclasses.replace(settings, resume=settings.run_dir / "checkpoints/step-00000002")
    assert resume(parts_of(again), restarted=False) == 2
    assert "written after" not in caplog.text
    os.utime(path, (2**32, 2**32))
    assert resume(parts_of(again), restarted=False) == 2
    assert f"{path} was written after the checkpoint" in caplog.text


def test_samples_of_which_nothing_is_predicted_are_told_of(
    make_settings: MakeSettings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    short, long = {"ask": "2+2=", "text": "4"}, {"ask": "a" * 40, "text": "4"}
    path = lines(tmp_path / "a.jsonl", [short, short, long, *[short] * 14])
    data: dict[str, Any] = {"kind": "dataset", "path": str(path), "packing": "none", "sequence_length": 16}
    data["columns"] = {"prompt": "ask", "completion": "text"}
    trained(make_settings(data={**data, "streaming": True, "validation_rows": 1}, train={"steps": 3}))
    assert "1 sample of step 1 without a target to predict" in caplog.text
    assert "3 of 48 samples had no target to predict: set data.sequence_length higher" in caplog.text


@pytest.mark.parametrize("packing", ["none", "isolated"])
def test_texts_of_a_stream_that_are_cut_or_left_out_are_counted(
    packing: str, make_settings: MakeSettings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = (("2", "4"), ("2", "4" * 40), ("2" * 40, "4"))
    short, long_answer, long_prompt = ({"ask": ask, "text": answer} for ask, answer in asked)
    path = lines(tmp_path / "a.jsonl", [short, long_answer, long_prompt, long_prompt, *[short] * 13])
    data: dict[str, Any] = {"kind": "dataset", "path": str(path), "packing": packing, "sequence_length": 16}
    data |= {"columns": {"prompt": "ask", "completion": "text"}, "streaming": True, "validation_rows": 1}
    done = trained(make_settings(data=data, train={"steps": 1})).progress
    if packing == "none":  # 16 samples are all rows
        assert done.lost() == {"cut": 3, "targetless": 2}
        assert "3 texts in 16 samples were cut: set data.sequence_length higher" in caplog.text
    else:  # several epochs
        assert done.lost() == {"cut": done.cut, "left_out": 2 * done.cut} and done.cut
        assert f"{2 * done.cut} texts beside 16 samples were left out" in caplog.text


def test_a_run_of_several_sources_says_them_and_saves_its_place(make_settings: MakeSettings, tmp_path: Path) -> None:
    mix = [{"path": str(lines(tmp_path / f"{name}.jsonl", texts(60, name))), "weight": 1.0} for name in "ab"]
    data = {"kind": "dataset", "streaming": True, "sequence_length": 16, "mix": mix, "validation_rows": 5}
    settings = make_settings(data=data, train={"steps": 4}, checkpoint={"every_steps": 2}, eval={"every_steps": 2})
    parts = parts_of(settings)
    assert (parts.steps, len(parts.source.train)) == (4, 0)
    assert all(key in parts.source.facts for key in ("files", "file_bytes", "stream"))
    records = trained(settings).lines
    assert [each["step"] for each in records if "eval_loss" in each] == [2, 4]
    manifest = json.loads((settings.run_dir / "checkpoints/step-00000002/manifest.json").read_text())
    assert json.loads(manifest["stream"])["number"] == GLOBAL, "of the second batch"
