"""Token files, NumPy's and raw ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainkit.errors import TrainingError
from trainkit.recipe.schema import Recipe
from trainkit.recipe.validate import with_kinds
from trainkit.trainer.data import tokens
from trainkit.trainer.data.source import Source
from trainkit.trainer.data.tokens import open_source


def source(path: Path, **settings: Any) -> Source:
    data = {"kind": "tokens", "path": str(path), "sequence_length": 4, **settings}
    return open_source(Recipe.model_validate(with_kinds({"data": data, "model": {"vocab_size": 100}})), Path())


def test_raw_and_numpy_files_give_the_same_samples_with_the_end_held_out(tmp_path: Path) -> None:
    ids = np.arange(60)
    np.save(tmp_path / "ids.npy", ids)
    ids.astype("uint16").tofile(tmp_path / "ids.bin")
    sources = [source(tmp_path / "ids.npy"), source(tmp_path / "ids.bin", dtype="uint16")]
    for found in sources:
        assert found.facts == {"tokens": 60}
        seen = found.train[list(range(len(found.train)))]
        assert seen.inputs["tokens"][:2].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert seen.inputs["targets"][:2].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
        assert int(seen.inputs["targets"].max()) == 54
        assert seen.inputs["targets"][-1].tolist() == [53, 54, -100, -100]
        assert seen.counted == 54
        assert found.validation[[0]].inputs["tokens"].tolist() == [[55, 56, 57, 58]]


def test_an_id_outside_the_vocabulary_is_named_with_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = np.arange(60)
    ids[17] = 100
    np.save(tmp_path / "ids.npy", ids)
    words = rf"data\.path: {tmp_path}/ids\.npy: token 17 is 100, outside the vocabulary of 100"
    with pytest.raises(TrainingError, match=words):
        source(tmp_path / "ids.npy")
    monkeypatch.setattr(tokens, "_SCANNED", 0)  # a file too large to look through: found when it is read
    late = source(tmp_path / "ids.npy")
    late.train[[0, 1]]
    with pytest.raises(TrainingError, match=words):
        late.train[[4]]


@pytest.mark.parametrize(
    ("name", "content", "settings", "message"),
    [
        ("gone.npy", None, {}, "cannot be read: No such file"),
        ("cut.npy", b"\x93NUMPY\x01\x00v\x00{'descr'", {}, "is not a sound .npy file"),
        ("empty.npy", b"", {}, "is not a sound .npy file"),
        ("odd.bin", b"abc", {"dtype": "uint16"}, "is not a raw file of uint16"),
        ("empty.bin", b"", {"dtype": "uint16"}, "is not a raw file of uint16"),
        ("short.bin", bytes(8), {"dtype": "uint8"}, "8 tokens are too few"),
        ("minus.bin", b"\xff" * 400, {"dtype": "int32"}, "token 0 is -1, outside the vocabulary"),
    ],
)
def test_a_file_that_is_missing_or_damaged_is_named(
    name: str, content: bytes | None, settings: dict[str, str], message: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(TrainingError, match=message) as caught:
        source(tmp_path / name, **settings)
    assert f"data.path: {tmp_path}/{name}" in str(caught.value)


def test_fractions_and_tables_are_not_token_files(tmp_path: Path) -> None:
    for array in (np.zeros(50), np.zeros((5, 10), dtype=np.int64)):
        np.save(tmp_path / "array.npy", array)
        with pytest.raises(TrainingError, match="not a one-dimensional array of integers"):
            source(tmp_path / "array.npy")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"path": "a.bin"}, "dtype must say how the numbers in a.bin are written"),
        ({"path": "a.npy", "dtype": "uint8"}, "a .npy file says its own"),
        ({}, "path must name the file"),
    ],
)
def test_the_number_format_is_said_once(data: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe.model_validate({"data": {"kind": "tokens", **data}})
