"""Tables of token ids that others have made: read as whole columns, and no other than row by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainer.sources import parquet
from trainkit.data import prepare as module
from trainkit.data.prepare import prepare, prepared_already
from trainkit.data.ready import token_ids
from trainkit.errors import TrainingError
from trainkit.files import read_json, write_json
from trainkit.recipe.schema import Recipe

pytestmark = pytest.mark.torch  # pyarrow comes with the libraries around torch

pyarrow = pytest.importorskip("pyarrow")

KINDS = {
    "list of int64": pyarrow.list_(pyarrow.int64()),
    "large list of int32": pyarrow.large_list(pyarrow.int32()),
    "list of uint16": pyarrow.list_(pyarrow.uint16()),
    "list of uint32": pyarrow.list_(pyarrow.uint32()),
    "list of three": pyarrow.list_(pyarrow.int32(), 3),
}
SEED = np.random.default_rng(7)
ROWS = [SEED.integers(0, 60000, size).tolist() for size in SEED.integers(1, 40, 400)]


def arrow(path: Path, columns: dict[str, Any], types: dict[str, Any] | None = None, batch: int = 150) -> Path:
    """A stream of record batches, as `datasets` writes."""
    table = pyarrow.table({name: pyarrow.array(rows, (types or {}).get(name)) for name, rows in columns.items()})
    with pyarrow.ipc.new_stream(str(path), table.schema) as out:
        out.write_table(table, max_chunksize=batch)
    return path


def made(path: Path, cache: Path, **settings: Any) -> dict[str, Any]:
    """What becomes of a file."""
    data = {"kind": "dataset", "path": str(path), "cache": str(cache), "tokenizer": "bytes", **settings}
    folder = prepare(Recipe.model_validate({"data": data}), path.parent)[0].tokens.folder
    return {each.name: each.read_bytes() for each in folder.glob("*.bin")} | read_json(folder / "meta.json")


def both(path: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """By columns, and row by row."""
    fast = made(path, path.parent / "fast", **settings)
    with monkeypatch.context() as patch:
        patch.setattr(module, "token_ids", lambda *_, **__: None)
        return fast, made(path, path.parent / "slow", **settings)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("labelled", [False, True])
def test_columns_become_the_ids_that_rows_would(
    kind: str, labelled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [(row * 3)[:3] for row in ROWS] if "three" in kind else ROWS
    columns: dict[str, Any] = {"input_ids": rows, "other": ["x"] * len(rows)}
    if labelled:
        columns["labels"] = [[-100 if place % 3 == 1 else each for place, each in enumerate(row)] for row in rows]
    path = arrow(tmp_path / "a.arrow", columns, {"input_ids": KINDS[kind]})
    fast, slow = both(path, monkeypatch)
    assert fast == slow
    assert np.frombuffer(fast["ids.bin"], np.uint32).tolist() == [each for row in rows for each in row]


def test_a_table_of_several_row_groups_is_read_alike_and_empty_rows_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [None if number % 7 == 3 else [] if number % 11 == 5 else row for number, row in enumerate(ROWS)]
    path = parquet(tmp_path / "a.parquet", [{"input_ids": row} for row in rows], group=170)
    read: list[Any] = []

    def seen(*given: Any, **named: Any) -> Any:
        read.append(token_ids(*given, **named))
        return read[-1]

    monkeypatch.setattr(module, "token_ids", seen)
    fast, slow = both(path, monkeypatch, skip_empty=True)
    assert fast == slow
    assert fast["skipped"] == sum(not row for row in rows)
    assert len(read) > 2
    assert None not in read


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("input_ids", [1, None, 3], "row 200: field 'input_ids' holds None: expected whole numbers"),
        ("input_ids", [1, -5, 3], "row 200: field 'input_ids' holds -5, which is not a token id"),
        ("input_ids", [1, 2**32, 3], "row 200: field 'input_ids' holds 4294967296, which is not a token id"),
        ("input_ids", [], "row 200: field 'input_ids' is empty"),
        ("input_ids", None, "row 200: field 'input_ids' is no list but null"),
        ("labels", [1, 4, 3], "row 200: target 1 in 'labels' is 4, neither the token id there (2) nor -100"),
        ("labels", [1, None, 3], "row 200: field 'labels' holds None: expected whole numbers"),
        ("labels", [1, 2], "row 200: 2 targets in 'labels' for 3 token ids"),
        ("labels", None, "row 200: field 'labels' is no list but null"),
    ],
)
def test_what_is_wrong_is_named_by_file_and_row(column: str, value: Any, said: str, tmp_path: Path) -> None:
    columns: dict[str, Any] = {name: [[1, 2, 3]] * 300 for name in ("input_ids", "labels")}
    columns[column][200] = value
    path = arrow(tmp_path / "a.arrow", columns)
    with pytest.raises(TrainingError) as caught:
        made(path, tmp_path / "cache")
    assert f"{path}: {said}" in str(caught.value)


@pytest.mark.parametrize("config", [{}, {"vocab_size": 9}])
def test_an_id_that_the_model_has_no_row_for_is_named_before_any_rank_starts(
    config: dict[str, Any], tmp_path: Path
) -> None:
    path = arrow(tmp_path / "a.arrow", {"input_ids": [[1, 2]] * 20 + [[1, 9]]})
    write_json(tmp_path / "config.json", {"model_type": "llama", "vocab_size": 8 if config else 9})
    data = {"kind": "dataset", "path": str(path), "cache": str(tmp_path / "cache"), "tokenizer": "bytes"}
    model = {"kind": "hf", "path": str(tmp_path), "config": config}
    recipe = Recipe.model_validate({"data": data, "model": model})
    with pytest.raises(TrainingError, match=r"a vocabulary of 9 is too small for token 9 of .*a\.arrow: row 20"):
        prepare(recipe, tmp_path)
    larger = Recipe.model_validate({"data": data, "model": {**model, "config": {"vocab_size": 10}}})
    prepare(larger, tmp_path)
    assert prepared_already(larger, tmp_path)
    assert not prepared_already(recipe, tmp_path)


def test_labels_that_the_first_table_lacks_are_refused(tmp_path: Path) -> None:
    arrow(tmp_path / "a.arrow", {"input_ids": [[1, 2]] * 20})
    arrow(tmp_path / "b.arrow", {"input_ids": [[1, 2]] * 20, "labels": [[-100, 2]] * 20})
    with pytest.raises(TrainingError, match=r"b\.arrow: row 0: it has labels, and the first row has none"):
        made(tmp_path, tmp_path / "cache")


@pytest.mark.parametrize(("value", "shown"), [(1.5, "1.5"), (True, "True"), ("a", "'a'")])
def test_lists_of_anything_else_are_no_ids(value: Any, shown: str, tmp_path: Path) -> None:
    path = arrow(tmp_path / "a.arrow", {"input_ids": [[value]] * 20})
    with pytest.raises(TrainingError) as caught:
        made(path, tmp_path / "cache")
    assert f"{path}: row 0: field 'input_ids' holds {shown}: expected whole numbers" in str(caught.value)


def test_a_build_that_was_stopped_goes_on_behind_its_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, keep = arrow(tmp_path / "a.arrow", {"input_ids": ROWS}), module._keep
    fast, _ = both(path, monkeypatch)

    def stopped(*given: Any) -> None:
        keep(*given)
        if given[2]["pieces"] == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(module, "_KEPT_EVERY", -1.0)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "_keep", stopped)
        made(path, tmp_path / "again")
    assert made(path, tmp_path / "again") == fast
