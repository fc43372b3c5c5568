"""Files that are prepared alone, as the tasks of an array do: a build of all of them takes what is there."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.sources import BERT, lines
from trainkit.data import prepare as module
from trainkit.data.prepare import prepare, prepare_files
from trainkit.errors import TrainingError
from trainkit.files import read_json
from trainkit.recipe.schema import Recipe

pytestmark = pytest.mark.torch  # NumPy comes with the libraries around torch

LABELS = (["no", "yes"], ["maybe", "no", ""], ["yes", "never"])


def labelled(folder: Path) -> list[Path]:
    """Files of labelled texts, whose labels come in another order in each; some rows are empty."""
    made = []
    for number, names in enumerate(LABELS):
        rows = [
            {"text": f"row {place} of {number} " * (1 + place % 3) if name else "", "label": name or "no"}
            for place, name in enumerate(names * 40)
        ]
        made.append(lines(folder / f"{number}.jsonl", rows))
    return made


def recipe(cache: Path, paths: list[Path], **settings: Any) -> Recipe:
    data = {"kind": "dataset", "path": [str(each) for each in paths], "cache": str(cache), "tokenizer": "bytes"}
    return Recipe.model_validate({"data": {**data, "skip_empty": True, **settings}, "model": BERT})


def contents(folder: Path) -> Mapping[str, Any]:
    """What a folder of token ids holds."""
    return {each.name: each.read_bytes() for each in folder.glob("*.bin")} | read_json(folder / "meta.json")


def in_one_go(tmp_path: Path, files: list[Path], **settings: Any) -> Mapping[str, Any]:
    return contents(prepare(recipe(tmp_path / "whole", files, **settings), tmp_path)[0].tokens.folder)


@pytest.mark.parametrize("alone", [[0, 1, 2, 3], [1], [0, 3], []])
def test_what_is_taken_is_bit_equal_to_a_build_in_one_go(
    alone: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = labelled(tmp_path)
    held = lines(tmp_path / "held.jsonl", [{"text": "later", "label": "yes"}, {"text": "one", "label": "no"}])
    asked = recipe(tmp_path / "parts", files, validation_path=str(held))
    prepare_files(asked, [[*files, held][number] for number in alone])
    read: list[Path] = []
    inner = module.pieces_of
    monkeypatch.setattr(module, "pieces_of", lambda path, columns: read.append(path) or inner(path, columns))  # type: ignore[func-returns-value]
    found = contents(prepare(asked, tmp_path)[0].tokens.folder)
    assert read == [each for number, each in enumerate([*files, held]) if number not in alone]
    assert found == in_one_go(tmp_path, files, validation_path=str(held))
    assert [label for label, _ in found["labels"]] == ["no", "yes", "maybe", "never"]
    assert found["skipped"] == 40


def test_a_file_that_is_read_in_part_is_not_prepared_alone(tmp_path: Path) -> None:
    files = labelled(tmp_path)
    asked = recipe(tmp_path / "parts", files, max_rows=100)
    prepare_files(asked, files)
    assert len([*(tmp_path / "parts").glob("*/meta.json")]) == 1
    found = contents(prepare(asked, tmp_path)[0].tokens.folder)
    assert found == in_one_go(tmp_path, files, max_rows=100)
    assert found["rows"] == 100


@pytest.mark.cli
@pytest.mark.parametrize("die_at", [1, 4, 5])
def test_a_build_that_is_killed_while_it_copies_is_gone_on_with(
    die_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = labelled(tmp_path)
    asked = recipe(tmp_path / "parts", files)
    prepare_files(asked, files)
    left = [die_at]

    def torn(source: Any, out: Any, size: int) -> None:
        left[0] -= 1
        content = source.read()
        if not left[0]:
            out.write(content[: len(content) // 2])
            out.flush()
            os._exit(9)
        out.write(content)

    def killed() -> None:
        monkeypatch.setattr(shutil, "copyfileobj", torn)
        monkeypatch.setattr(module, "_KEPT_EVERY", -1.0)  # it records each file
        prepare(asked, tmp_path)

    child = multiprocessing.get_context("fork").Process(target=killed)
    child.start()
    child.join(60)
    assert child.exitcode == 9
    kept = list((tmp_path / "parts").glob("*.part"))
    assert len(kept) == 1
    assert (kept[0] / "done.json").exists() == (die_at > 3)
    assert contents(prepare(asked, tmp_path)[0].tokens.folder) == in_one_go(tmp_path, files)
    assert not [*(tmp_path / "parts").glob("*.part")]


def test_a_file_that_was_begun_row_by_row_is_not_copied_behind_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, keep = labelled(tmp_path), module._keep
    asked = recipe(tmp_path / "parts", files)
    monkeypatch.setattr(module, "BATCH", 32)
    monkeypatch.setattr(module, "PIECE", 1 << 11)
    monkeypatch.setattr(module, "_KEPT_EVERY", -1.0)

    def stopped(*given: Any) -> None:
        keep(*given)
        if given[2]["file"] == 1 and given[2]["pieces"] == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "_keep", stopped)
        prepare(asked, tmp_path)
    prepare_files(asked, files)
    assert contents(prepare(asked, tmp_path)[0].tokens.folder) == in_one_go(tmp_path, files)


def test_places_of_a_copied_file_are_where_it_lies_now(tmp_path: Path) -> None:
    files = labelled(tmp_path / "before")
    prepare_files(recipe(tmp_path / "parts", files), files)
    shutil.move(tmp_path / "before", tmp_path / "after")
    files = [tmp_path / "after" / each.name for each in files]
    asked = recipe(tmp_path / "parts", files, labels=["no", "yes", "maybe"])
    with pytest.raises(TrainingError, match=rf"{tmp_path}/after/2\.jsonl:2: label 'never' is not in data.labels"):
        prepare(asked, tmp_path)


def test_a_torn_file_is_made_anew_and_one_without_rows_is_none_alone(tmp_path: Path) -> None:
    files = [*labelled(tmp_path), lines(tmp_path / "empty.jsonl", [{"text": "", "label": "no"}] * 3)]
    asked = recipe(tmp_path / "parts", files)
    prepare_files(asked, files)
    folders = sorted((tmp_path / "parts").glob("*/meta.json"))
    assert len(folders) == 4
    with (folders[0].parent / "ids.bin").open("ab") as file:
        file.write(b"x")
    assert contents(prepare(asked, tmp_path)[0].tokens.folder) == in_one_go(tmp_path, files)
    alone = recipe(tmp_path / "parts", files[3:])
    for _ in range(2):
        with pytest.raises(TrainingError, match=r"empty\.jsonl has no row to learn from"):
            prepare(alone, tmp_path)
