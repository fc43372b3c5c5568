"""Rows in files of every format, plain and compressed: all of them, from any position on, and what is torn by name."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from trainkit.data.files import START, ShardPosition, check_shard, chosen_files, columns_of, head_rows, rows_of
from trainkit.data.look import look
from trainkit.errors import TrainingError
from trainkit.hub.splits import RowSelection
from trainkit.recipe.schema import Recipe

pytestmark = pytest.mark.torch  # pyarrow and zstandard come with the libraries around torch
ROWS: list[dict[str, Any]] = [
    {"text": f'row {number}, with "quotes", a comma\nand a second line, Ünïcode \U0001f600', "label": str(number % 3)}
    for number in range(300)
]


def json_lines(rows: Sequence[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def json_array(rows: Sequence[Mapping[str, Any]]) -> bytes:
    return json.dumps(rows, indent=1).encode()


def cells(delimiter: str) -> Callable[[Sequence[Mapping[str, Any]]], bytes]:
    def written(rows: Sequence[Mapping[str, Any]]) -> bytes:
        file = io.StringIO(newline="")
        writer = csv.DictWriter(file, [*rows[0]], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
        return file.getvalue().encode()

    return written


def zstd(content: bytes) -> bytes:
    zstandard = pytest.importorskip("zstandard")
    # Frame after frame, as tools that append write them.
    half = len(content) // 2
    return b"".join(zstandard.ZstdCompressor().compress(part) for part in (content[:half], content[half:]))


WRITERS: Mapping[str, Callable[[Sequence[Mapping[str, Any]]], bytes]] = {
    "jsonl": json_lines, "ndjson": json_lines, "json": json_array, "csv": cells(","), "tsv": cells("\t"),
}  # fmt: skip
PACKERS: Mapping[str, Callable[[bytes], bytes]] = {
    "": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd,
}  # fmt: skip


def table(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    pyarrow, files = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    whole = pyarrow.Table.from_pylist(list(rows))
    if path.suffix == ".parquet":
        files.write_table(whole, path, row_group_size=70)
    else:
        with pyarrow.ipc.new_stream(path, whole.schema) as writer:
            writer.write_table(whole, max_chunksize=70)
    return path


def read(path: Path, start: ShardPosition = START) -> list[dict[str, Any]]:
    return [raw.row().fields for raw in rows_of(path, (), start)]


def written(folder: Path, name: str, content: bytes) -> Path:
    (folder / name).write_bytes(content)
    return folder / name


def refused(path: Path) -> TrainingError:
    with pytest.raises(TrainingError) as caught:
        check_shard(path)
        read(path)
    assert str(path) in str(caught.value)
    assert len(caught.value.diagnostics) == 1
    return caught.value


def seen(path: Path) -> Any:
    return look(Recipe.model_validate({"data": {"kind": "dataset", "path": str(path)}}), str, {})


@pytest.mark.parametrize("packed", PACKERS)
@pytest.mark.parametrize("ending", WRITERS)
def test_every_format_is_read_whole_and_from_any_position(ending: str, packed: str, tmp_path: Path) -> None:
    path = written(tmp_path, f"a.{ending}{packed}", PACKERS[packed](WRITERS[ending](ROWS)))
    assert read(path) == ROWS
    assert columns_of(path) == ("text", "label")
    positions = [raw.position for raw in rows_of(path, ())]
    assert [each.row for each in positions] == [*range(len(ROWS))]
    for number in (0, 1, 127, 128, 299):
        assert read(path, positions[number]) == ROWS[number:]
        assert read(path, ShardPosition(0, positions[number].row, positions[number].offset))[0] == ROWS[number]
    assert seen(path).form.name == "text" if packed in ("", ".gz") else seen(path).form is None
    assert seen(path).fault is None


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_tables_are_read_whole_and_from_any_position(ending: str, tmp_path: Path) -> None:
    path = table(tmp_path / f"a.{ending}", ROWS)
    assert read(path) == ROWS
    assert columns_of(path) == ("text", "label")
    positions = [raw.position for raw in rows_of(path, ())]
    for number in (0, 69, 70, 71, 128, 299):
        assert read(path, positions[number]) == ROWS[number:]
    assert [raw.row().fields for raw in rows_of(path, ("label",))] == [{"label": row["label"]} for row in ROWS]
    assert (seen(path).form, seen(path).fault) == (None, None), "decided before the ranks start, with pyarrow"


def test_an_arrow_file_for_random_access_is_read_as_a_stream_is(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    whole = pyarrow.Table.from_pylist(ROWS)
    with pyarrow.ipc.new_file(tmp_path / "a.arrow", whole.schema) as writer:
        writer.write_table(whole, max_chunksize=70)
    assert read(tmp_path / "a.arrow") == ROWS
    assert read(tmp_path / "a.arrow", ShardPosition(0, 128)) == ROWS[128:]
    assert columns_of(tmp_path / "a.arrow") == ("text", "label")


def test_a_column_that_a_table_does_not_have_is_read_where_others_have_it(tmp_path: Path) -> None:
    for ending in ("parquet", "arrow"):
        for number, more in enumerate(({}, {"system": "Be brief."})):
            path = table(tmp_path / f"{number}.{ending}", [{"text": "a", "other": 1, **more}])
            assert [raw.row().fields for raw in rows_of(path, ("text", "system"))] == [{"text": "a", **more}]


def test_a_compressed_file_is_told_by_its_first_bytes_whatever_its_name(tmp_path: Path) -> None:
    for number, pack in enumerate(PACKERS.values()):
        assert read(written(tmp_path, f"{number}.jsonl", pack(json_lines(ROWS)))) == ROWS


def test_byte_order_marks_windows_lines_and_empty_lines_are_no_part_of_rows(tmp_path: Path) -> None:
    rows = [{"text": "one", "label": "0"}, {"text": "two", "label": "1"}]
    for ending, write in WRITERS.items():
        content = write(rows).replace(b"\r\n", b"\n")
        marked = written(tmp_path, f"marked.{ending}", b"\xef\xbb\xbf" + content)
        windows = written(tmp_path, f"windows.{ending}", content.replace(b"\n", b"\r\n"))
        empty = written(tmp_path, f"empty.{ending}", b"\n" + content.replace(b"\n", b"\n\n"))
        unended = written(tmp_path, f"unended.{ending}", content.rstrip(b"\n"))
        for path in (marked, windows, empty, unended):
            assert read(path) == rows, path.name
            assert seen(path).fault is None, path.name


def test_lines_and_rows_of_cells_are_named_as_editors_count_them(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl", b'{"text": "a"}\n\n\n{"text": 7}\n')
    assert [raw.place for raw in rows_of(path, ())] == [f"{path}:1", f"{path}:4"]
    sheet = written(tmp_path, "a.csv", b'text,label\n"a\nb",0\nc,1\n\nd,2\n')
    assert [raw.place for raw in rows_of(sheet, ())] == [f"{sheet}:3", f"{sheet}:4", f"{sheet}:6"]  # where each ends


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_the_delimiter_of_cells_is_the_one_of_their_head(delimiter: str, tmp_path: Path) -> None:
    assert read(written(tmp_path, "a.csv", cells(delimiter)(ROWS))) == ROWS
    assert read(written(tmp_path, "B.CSV", cells(delimiter)(ROWS))) == ROWS


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"text,label\na,0\nb,1,2\n", r"a\.csv:3: 3 cells, and its first line names 2 columns"),
        ("a.csv", b"text,label\na,0\nb\n", r"a\.csv:3: 1 cells"),
        ("a.csv", b'text,label\n"a,0\nb,1\n', r"a\.csv:3: unexpected end of data"),
        ("a.csv", b"text,text\na,0\n", r"a\.csv: its first line must name the columns, each once: text, text"),
        ("a.csv", b"text,\na,0\n", r"must name the columns"),
        ("a.csv", b"text,label\na,0\n\xff,0\n", r"a\.csv:3 is not UTF-8 text"),
        ("a.csv", b"t\xffxt,label\na,0\n", r"a\.csv:1 is not UTF-8 text"),
        ("a.csv", b"\n\ntext,label\na,0\nb\n", r"a\.csv:5: 1 cells"),
        ("a.jsonl", '{"text": "a"}\n'.encode("utf-16"), r"a\.jsonl is text in UTF-16"),
        ("a.csv", "text,label\na,0\n".encode("utf-16"), r"a\.csv is text in UTF-16"),
        ("a.jsonl", b"PAR1" + bytes(20), r"a\.jsonl is a parquet file"),
        ("a.jsonl", b"PK\x03\x04" + bytes(20), r"a\.jsonl is a zip archive"),
        ("a.jsonl", b'{"text": "a"}\n{"text": ', r"a\.jsonl:2 is not JSON"),
        ("a.jsonl", b'{"text": "a"}\n["b"]\n', r"a\.jsonl:2 is not a JSON object"),
        ("a.jsonl", b'{"text": "\xff"}\n', r"a\.jsonl:1 is not JSON"),
        ("a.jsonl", b"[" * 100_000, "is not JSON"),
        ("a.json", b'[{"text": "a"}, {"text": "b"', r"a\.json: row 1 is not JSON"),
        ("a.json", b'[{"text": "a"}, {"text": "b"}', r"a\.json ends, or goes on with no comma, behind row 1"),
        ("a.json", b'[{"text": "a"} {"text": "b"}]', r"goes on with no comma, behind row 0"),
        ("a.json", b'[{"text": "a"}, ', r"a\.json: row 1 is not JSON"),
        ("a.json", b'[{"text": "a"}, 7]', r"a\.json: row 1 is not a JSON object"),
        ("a.json", b'[{"text": "a"},\n{"text": "\xff"}]', r"a\.json:2 is not UTF-8 text"),
        (
            "a.json",
            b'[{"text": "a"}]\n[{"text": "b"}]\n',
            r"a\.json goes on behind its list of rows, which ends with row 0",
        ),
        ("a.json", b'[{"text": "a"}] and more', r"a\.json goes on behind its list"),
        ("a.parquet", b"PAR1 and no more", r"a\.parquet is not a valid parquet file"),
        ("a.arrow", b"nothing", r"a\.arrow is not a valid Arrow file"),
    ],
)
def test_what_cannot_be_read_is_one_message_with_file_and_row(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:

    found = refused(written(tmp_path, name, content))
    assert re.search(message, str(found)), str(found)
    if name.endswith((".parquet", ".arrow")):
        return
    fault = seen(tmp_path / name).fault
    assert fault is not None and re.search(message, fault[0]), fault


@pytest.mark.parametrize("packed", [each for each in PACKERS if each])
def test_a_truncated_archive_is_one_message_that_names_it(packed: str, tmp_path: Path) -> None:
    content = PACKERS[packed](json_lines(ROWS * 20))
    for cut in (len(content) // 3, len(content) - 3):
        path = written(tmp_path, f"a.jsonl{packed}", content[:cut])
        assert f"{path} cannot be unpacked" in str(refused(path))
        assert seen(path).fault is None, "found when it is prepared"


def test_a_zstandard_file_without_its_package_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, "a.jsonl.zst", zstd(json_lines(ROWS)))
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    found = refused(path)
    assert "needs the package zstandard" in str(found)
    assert "-m pip install" in found.diagnostics[0].hint


@pytest.mark.parametrize("ending", WRITERS)
def test_the_head_of_a_file_gives_the_rows_that_are_whole_in_it(ending: str) -> None:
    content = WRITERS[ending](ROWS)
    for end in range(40, 3000, 11):  # within quotes, escapes and letters of several bytes too
        found = head_rows(f"a.{ending}", content[:end], whole=False)
        assert [row.fields for row in found] == ROWS[: len(found)]
        assert len(found) >= end // 130 - 2
    packed = gzip.compress(WRITERS[ending](ROWS * 50))
    found = head_rows(f"a.{ending}.gz", packed[: len(packed) // 2], whole=False)
    assert len(found) > 100
    assert [row.fields for row in found[:300]] == ROWS
    assert head_rows("a.jsonl", b'{"text": "longer than', whole=False) == []


def test_a_damaged_archive_is_refused_by_a_plan_that_sees_it(tmp_path: Path) -> None:
    packed = gzip.compress(json_lines(ROWS))
    for content in (b"\x1f\x8bnothing", packed[:-8] + b"12345678", packed[:99] + b"\0" * 200 + packed[99:]):
        path = written(tmp_path, "a.jsonl.gz", content)
        assert "a.jsonl.gz cannot be unpacked" in seen(path).fault[0]
        assert "cannot be unpacked" in str(refused(path))


def test_a_plan_names_the_row_among_the_first_that_cannot_be_learned_from(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl", json_lines([*ROWS[:7], {"text": 7}, *ROWS]))
    assert "a.jsonl:8: field 'text' is no text but a number" in seen(path).fault[0]
    other = written(tmp_path, "b.jsonl", json_lines([{"question": "a", "answer": "b"}]))
    what, hint = seen(other).fault
    assert "b.jsonl:1 has question, answer; expected messages" in what
    assert "data.columns: {prompt: question, completion: answer}" in hint
    asked = {"role": "user", "content": "2+2="}
    for chat, said in (
        ([asked], "c.jsonl:1: it has no message of role assistant to learn from, but of user"),
        (
            [asked, {"role": "assistant", "text": "4"}],
            "c.jsonl:1: message 2 of role assistant has no content, but text",
        ),
    ):
        assert said in seen(written(tmp_path, "c.jsonl", json_lines([{"messages": chat}]))).fault[0]


def test_a_folder_has_its_splits_by_names_in_one_format_alone(tmp_path: Path) -> None:
    for name in ("train-0.csv.gz", "train-1.csv", "dev.csv", "test.csv", "notes.json", "readme.txt"):
        content = cells(",")(ROWS[:3])
        written(tmp_path, name, gzip.compress(content) if name.endswith(".gz") else content)
    files, held_out = chosen_files(tmp_path, RowSelection())
    assert [file.name for file in files] == ["train-0.csv.gz", "train-1.csv"]
    assert [file.name for file in held_out] == ["dev.csv"]
    files, held_out = chosen_files(tmp_path, RowSelection(split="test"))
    assert [file.name for file in files] == ["test.csv"]
    with pytest.raises(TrainingError, match=r"data\.split: .* has no split 'other'"):
        chosen_files(tmp_path, RowSelection(split="other"))
    written(tmp_path, "train.jsonl", json_lines(ROWS))
    assert [file.name for file in chosen_files(tmp_path, RowSelection(split="train"))[0]] == ["train.jsonl"]


@pytest.mark.parametrize("ending", [f"{ending}{packed}" for ending in ("jsonl", "csv", "json") for packed in PACKERS])
def test_a_folder_of_files_of_every_format_is_a_data_set(ending: str, tmp_path: Path) -> None:
    kind, _, packed = ending.partition(".")
    for name in ("train", "validation"):
        written(tmp_path, f"{name}.{ending}", PACKERS[f".{packed}" if packed else ""](WRITERS[kind](ROWS)))
    files, held_out = chosen_files(tmp_path, RowSelection())
    assert (len(files), len(held_out)) == (1, 1)
    assert read(files[0]) == ROWS
