"""The text data set and its cache."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from trainkit.data import prepared
from trainkit.errors import TrainingError
from trainkit.recipe.schema import Recipe, TextData
from trainkit.trainer.data.text import find_files, open_corpus, open_source, read_corpus


def text_data(path: Path | str, **settings: object) -> TextData:
    return TextData.model_validate({"path": str(path), "include": "**/*.txt", **settings})


def written(folder: Path, **files: bytes) -> Path:
    folder.mkdir()
    for name, content in files.items():
        (folder / f"{name}.txt").write_bytes(content)
    return folder


@pytest.fixture
def two_files(tmp_path: Path) -> Path:
    return written(tmp_path / "text", a=b"abcdefg", b=b"tuvwxyz")


def test_targets_are_the_next_bytes_except_the_first_of_a_file_and_what_lies_beyond_the_end(
    two_files: Path, tmp_path: Path
) -> None:
    corpus = read_corpus(text_data(two_files, cache=str(tmp_path / "cache")), tmp_path)
    samples = corpus.samples(range(corpus.tokens.size), length=5)
    batch = samples[[0, 1, 2]]
    assert len(samples) == 3
    assert bytes(batch.inputs["tokens"][:2].flatten().tolist()) == b"abcdefgtuv"
    assert batch.inputs["targets"][0].tolist() == list(b"bcdef")
    assert batch.inputs["targets"][1].tolist() == [ord("g"), -100, *b"uvw"]
    assert batch.inputs["targets"][2].tolist() == [*b"xyz", -100, -100]
    assert batch.counted == 5 + 4 + 3


def test_validation_text_is_the_end_and_is_never_trained_on(tmp_path: Path) -> None:
    folder = written(tmp_path / "text", a=bytes(range(200)))
    data = text_data(folder, sequence_length=8, validation_fraction=0.1, cache=str(tmp_path / "cache"))
    source = open_source(Recipe.model_validate({"data": data}), tmp_path)
    seen = source.train[range(len(source.train))]
    held = source.validation[range(len(source.validation))]
    assert max(values.max() for values in seen.inputs.values()) < 180 <= int(held.inputs["tokens"].min())


def test_files_of_ones_own_are_evaluated_on_and_all_others_trained_on(tmp_path: Path) -> None:
    folder = written(tmp_path / "text", a=bytes(range(100)))
    own = written(tmp_path / "own", b=bytes(range(150, 200)))
    cache = str(tmp_path / "cache")
    data = text_data(folder, sequence_length=8, validation_path=str(own), cache=cache)
    source = open_source(Recipe.model_validate({"data": data}), tmp_path)
    batch = source.train[range(len(source.train))]
    held = source.validation[range(len(source.validation))]
    assert (batch.counted, held.counted) == (99, 49)
    assert int(batch.inputs["tokens"].max()) < 100 and int(held.inputs["tokens"].min()) >= 150
    assert source.highest == 199 and source.facts["validation_bytes"] == 50
    short = text_data(folder, sequence_length=60, validation_path=str(own), cache=cache)
    with pytest.raises(TrainingError, match=r"data\.validation_path: 50 bytes are too few for a sample of 60"):
        open_source(Recipe.model_validate({"data": short}), tmp_path)
    with pytest.raises(TrainingError, match=r"data\.validation_path: .*/none does not exist"):
        find_files(text_data(folder, validation_path=str(tmp_path / "none")), "validation_path")


def test_the_unigram_entropy_is_that_of_the_bytes(tmp_path: Path) -> None:
    folder = written(tmp_path / "text", a=b"aabb", b=b"cccc")
    corpus = open_corpus(find_files(text_data(folder)), [tmp_path / "cache"])
    assert corpus.unigram_entropy == pytest.approx(0.5 * math.log(2) + 2 * 0.25 * math.log(4))
    assert corpus.starts.tolist() == [0, 4]


def test_a_corpus_is_read_once_until_a_file_changes(two_files: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    first = open_corpus(find_files(text_data(two_files)), [folder])
    assert len(list(folder.glob("*/meta.json"))) == 1
    written = next(folder.glob("*/tokens.bin")).stat().st_mtime_ns
    open_corpus(find_files(text_data(two_files)), [folder])
    assert next(folder.glob("*/tokens.bin")).stat().st_mtime_ns == written
    (two_files / "b.txt").write_bytes(b"changed!")
    assert open_corpus(find_files(text_data(two_files)), [folder]).tokens.size == first.tokens.size + 1


def test_processes_that_start_together_build_one_corpus(two_files: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from trainkit.trainer.data.text import open_corpus;"
        "print(open_corpus(sorted(Path(sys.argv[1]).glob('*.txt')), [Path(sys.argv[2])]).tokens.size)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", program, str(two_files), str(tmp_path / "cache")]
    readers = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert [reader.communicate(timeout=60)[0].strip() for reader in readers] == ["14"] * 4
    assert len(list((tmp_path / "cache").glob("*/tokens.bin"))) == 1


def test_what_a_killed_builder_left_is_cleared(two_files: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    files = find_files(text_data(two_files))
    open_corpus(files, [folder])
    (ready,) = (path.parent for path in folder.glob("*/meta.json"))
    leftover = ready.rename(folder / f".tmp-{ready.name}-123")
    (leftover / "meta.json").unlink()
    assert open_corpus(files, [folder]).tokens.size == 14
    assert not leftover.exists()


def test_waiting_for_another_builder_has_an_end(
    two_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    files, folder = find_files(text_data(two_files)), tmp_path / "cache"
    open_corpus(files, [folder])
    (ready,) = (path.parent for path in folder.glob("*/meta.json"))
    ready.rename(folder / "elsewhere")
    monkeypatch.setattr(prepared, "PATIENCE", 0.3)
    with (folder / f"{ready.name}.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(TrainingError, match="another process has been preparing"):
            open_corpus(files, [folder])


def test_a_home_that_cannot_be_written_falls_back_to_the_run_directory(two_files: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    for home in (str(tmp_path / "file"), "", "/proc"):
        run_dir = tmp_path / f"run{len(home)}"
        run_dir.mkdir()
        assert read_corpus(text_data(two_files), run_dir, {"HOME": home}).tokens.size == 14
        assert list(run_dir.glob("corpus/*/tokens.bin"))


@pytest.mark.parametrize(
    ("path", "message"),
    [("missing", "does not exist"), ("empty", "no file in"), ("hollow", "are empty"), ("short", "too few")],
)
def test_a_path_without_usable_text_is_named(path: str, message: str, tmp_path: Path) -> None:
    for name, files in (("hollow", {"a": b""}), ("short", {"a": b"abc"}), ("empty", {})):
        written(tmp_path / name, **files)
    data = text_data(tmp_path / path, cache=str(tmp_path / "cache"))
    with pytest.raises(TrainingError, match=message) as caught:
        open_source(Recipe.model_validate({"data": data}), tmp_path)
    assert "data.path" in str(caught.value)


def test_the_standard_library_is_twelve_megabytes_of_text_without_tests_and_packages() -> None:
    files = find_files(TextData())
    assert sum(file.stat().st_size for file in files) == pytest.approx(12.6e6, rel=0.2)
    assert not any({"site-packages", "test", "tests"} & set(file.parts[-3:]) for file in files)
    counts = np.zeros(256)
    for file in files:
        counts += np.bincount(np.frombuffer(file.read_bytes(), np.uint8), minlength=256)
    shares = counts[counts > 0] / counts.sum()
    assert -(shares * np.log(shares)).sum() == pytest.approx(3.27, abs=0.08)  # that of Python 3.13 has 3.30


@pytest.mark.parametrize(
    ("name", "size"), [("tokens.bin", 5), ("tokens.bin", 0), ("meta.json", 3), ("starts.bin", None)]
)
def test_a_corpus_that_the_disk_has_damaged_is_made_anew(
    two_files: Path, tmp_path: Path, name: str, size: int | None
) -> None:
    data = text_data(two_files, cache=str(tmp_path / "cache"))
    read_corpus(data, tmp_path)
    (file,) = (tmp_path / "cache").glob(f"*/{name}")
    os.truncate(file, size) if size is not None else file.unlink()
    assert bytes(read_corpus(data, tmp_path).tokens) == b"abcdefgtuvwxyz"
