"""Prepared rows: tokenised once, found by content, torn ones made anew, and the split, lengths and counts of a view."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.trainer.sources import lines, parquet
from tests.trainer.tiny_tokenizer import save_tokenizer
from trainkit.data import packing
from trainkit.data import prepare as preparing
from trainkit.data.encode import RowEncoder
from trainkit.data.look import look
from trainkit.data.prepare import Made, Piece, prepare, prepared_already
from trainkit.data.prepared import Prepared
from trainkit.data.report import as_json, described, learned_pieces, page, remarks
from trainkit.errors import TrainingError
from trainkit.recipe.schema import Recipe
from trainkit.trainer.data.dataset import open_source
from trainkit.trainer.data.source import Source

pytestmark = pytest.mark.torch  # NumPy comes with the libraries around torch


def texts(count: int, seed: int = 0) -> list[dict[str, str]]:
    chance = random.Random(seed)
    return [{"text": f"{number} " + "x" * chance.randint(1, 60)} for number in range(count)]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home/trainkit/prepared"


@pytest.fixture
def tokenised(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many rows each piece had that this process turned into tokens."""
    counts: list[int] = []
    plain = preparing.made_of

    def made_of(piece: Piece, encoder: RowEncoder) -> Made:
        made = plain(piece, encoder)
        counts.append(made.rows)
        return made

    monkeypatch.setattr(preparing, "made_of", made_of)
    yield counts


def recipe_for(path: object, model: Mapping[str, Any] | None = None, **data: Any) -> Recipe:
    named = [str(each) for each in path] if isinstance(path, list) else str(path)
    return Recipe.model_validate(
        {"data": {"kind": "dataset", "path": named, **data}, "model": model or {"kind": "gpt"}}
    )


def made(
    path: object, model: Mapping[str, Any] | None = None, run_dir: Path = Path("/nowhere"), **data: Any
) -> Prepared:
    return prepare(recipe_for(path, model, **data), run_dir, os.environ)[0]


def told(path: object, model: Mapping[str, Any] | None = None, **data: Any) -> tuple[str, list[str]]:
    """The description of the data, and the warnings."""
    prepared, _, encoder, names = prepare(recipe_for(path, model, **data), Path("/nowhere"), os.environ)
    return described(prepared, encoder, names), remarks(prepared, encoder, names)


def arrays_of(prepared: Prepared) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(prepared.tokens.folder.glob("*.bin"))}


def text_of(prepared: Prepared, side: str) -> list[str]:
    """The texts of a side's samples, as bytes."""
    ids = prepared.tokens.ids
    return [bytes(ids[start:stop].tolist()).decode() for start, stop in prepared.spans(side).array.tolist()]


def test_the_second_time_nothing_is_tokenised(home: Path, tokenised: list[int], tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", texts(700))
    first = made(path)
    assert sum(tokenised) == 700 == first.tokens.meta["rows"]
    assert prepared_already(recipe_for(path), tmp_path)
    again = made(path)
    assert sum(tokenised) == 700
    assert again.folder == first.folder
    other = made(path, validation_fraction=0.2, sequence_length=64, packing="none")  # another view of the same tokens
    assert sum(tokenised) == 700
    assert (other.tokens.folder, other.folder != first.folder) == (first.tokens.folder, True)
    assert first.tokens.folder.parent == home


def test_a_file_that_has_moved_is_found_and_one_that_has_changed_is_not(
    home: Path, tokenised: list[int], tmp_path: Path
) -> None:
    path = lines(tmp_path / "a.jsonl", texts(40))
    first = made(path).tokens.folder
    moved = tmp_path / "elsewhere/b.jsonl"
    moved.parent.mkdir()
    path.rename(moved)
    assert made(moved).tokens.folder == first
    assert sum(tokenised) == 40
    lines(moved, texts(40, seed=1))
    assert made(moved).tokens.folder != first
    assert sum(tokenised) == 80


def test_content_of_the_same_size_and_age_is_told_apart(home: Path, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [{"text": "aaaa"}, {"text": "bbbb"}])
    long_ago = time.time() - 10_000
    os.utime(path, (long_ago, long_ago))
    first = made(path)
    other = lines(tmp_path / "other.jsonl", [{"text": "aaaa"}, {"text": "cccc"}])
    os.utime(other, (long_ago, long_ago))
    other.replace(path)  # another file under this name
    assert made(path).tokens.folder != first.tokens.folder


def test_content_that_is_replaced_in_place_under_its_old_time_is_told_apart(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = lines(tmp_path / "a.jsonl", [{"text": "aaaa"}, {"text": "bbbb"}])
    for settled in (preparing._SETTLED, -60.0):  # just written, or long enough ago to be remembered
        monkeypatch.setattr(preparing, "_SETTLED", settled)
        before, first = path.stat(), made(path).tokens.folder
        assert (home / "contents").exists() == (settled < 0)
        path.write_text(path.read_text().translate({97: 99, 98: 100, 99: 101, 100: 102}))  # of a to d
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        now = path.stat()
        assert (now.st_size, now.st_mtime_ns, now.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)
        assert made(path).tokens.folder != first


def test_a_file_that_is_written_while_it_is_read_is_refused(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = lines(tmp_path / "a.jsonl", texts(30))
    plain = preparing.made_of

    def made_of(piece: Piece, encoder: RowEncoder) -> Made:
        with path.open("a") as file:
            file.write('{"text": "more"}\n')
        return plain(piece, encoder)

    with monkeypatch.context() as patched:
        patched.setattr(preparing, "made_of", made_of)
        with pytest.raises(TrainingError, match=r"a\.jsonl was written while it was read"):
            made(path)
    assert made(path).tokens.meta["rows"] == 31


def test_messages_name_the_file_as_it_is_called_now(home: Path, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [{"text": "a~"}, {"text": "bc"}])
    assert made(path).tokens.meta["where"] == f"{path}:1"
    moved = path.rename(tmp_path / "moved.jsonl")
    prepared = made(moved)
    assert prepared.tokens.meta["where"] == f"{moved}:1"


@pytest.mark.parametrize(
    "changes",
    [
        {"tokenizer": "other"}, {"prompt_prefix": "do: "}, {"skip_empty": True}, {"chat_template": "chatml"},
        {"train_on_prompts": True}, {"max_rows": 8},
        {"chat_template": "own.jinja"}, {"columns": {"text": "prompt"}},
    ],
    ids=str,
)  # fmt: skip
def test_what_decides_the_tokens_is_part_of_their_key(
    changes: Mapping[str, Any], home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = lines(tmp_path / "a.jsonl", [{"prompt": f"the cat {number}", "completion": "sat"} for number in range(9)])
    shutil.copytree(save_tokenizer(tmp_path / "tokenizer"), tmp_path / "other")
    (tmp_path / "other/vocab.txt").write_text("another")
    (tmp_path / "own.jinja").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    asked: dict[str, Any] = {"tokenizer": "tokenizer"}
    first = made(path, **asked).tokens.folder
    assert made(path, **{**asked, **changes}).tokens.folder != first
    assert made(path, **asked, sequence_length=99, packing="dense", split_seed=3).tokens.folder == first
    assert made(path, **asked, max_rows=9).tokens.folder == first, "of no more rows than that"
    if changes.get("chat_template") == "own.jinja":
        before = made(path, **{**asked, **changes}).tokens.folder
        (tmp_path / "own.jinja").write_text("{% for message in messages %}{{ message['content'] }}.{% endfor %}")
        assert made(path, **{**asked, **changes}).tokens.folder != before


def gzipped(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_bytes(gzip.compress("".join(json.dumps(each) + "\n" for each in rows).encode()))
    return path


def listed(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text(json.dumps(rows))
    return path


def cells(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("text\n" + "".join(f"{each['text']}\n" for each in rows))
    return path


WRITERS: dict[str, Callable[[Path, list[dict[str, str]]], Path]] = {
    "jsonl": lines, "parquet": parquet, "jsonl.gz": gzipped, "json": listed, "csv": cells,
}  # fmt: skip


@pytest.mark.parametrize("form", WRITERS)
@pytest.mark.parametrize("most", [1, 30, 50, 69, 70, 71, 140, 500, 0.25, 0.75])
def test_of_each_source_so_many_rows_are_read_and_some_of_them_held_out(
    most: float, form: str, home: Path, tokenised: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparing, "PIECE", 1 << 10)
    rows = texts(140)
    files = [WRITERS[form](tmp_path / f"{place}.{form}", rows[place : place + 70]) for place in (0, 70)]
    if most == 1:
        with pytest.raises(TrainingError, match="nothing is left to evaluate on: 1 row") as caught:
            made(files, max_rows=1)
        assert caught.value.diagnostics[0].hint.startswith("raise data.max_rows")
        return
    prepared = made(files, max_rows=most, packing="none", sequence_length=100)
    found = [bytes(prepared.tokens.text(number)[0].tolist()).decode() for number in range(len(prepared.tokens.rows))]
    assert found == [each["text"] for each in rows[: round(most * 140) if most < 1 else int(most)]]
    assert sum(tokenised) == len(found), "and no others"
    assert prepared.view.train.rows + prepared.view.validation.rows == len(found)
    assert prepared.view.validation.rows >= 1
    assert prepared_already(recipe_for(files, max_rows=most, packing="none", sequence_length=100), tmp_path)
    seen = look(recipe_for(files, max_rows=most), str, os.environ)
    assert seen.rows in (None, len(found))


def test_rows_of_files_to_evaluate_on_are_as_many_at_most(home: Path, tmp_path: Path) -> None:
    rows = texts(60)
    path, own = lines(tmp_path / "a.jsonl", rows[:40]), lines(tmp_path / "b.jsonl", rows[40:])
    view = made(path, validation_path=str(own), max_rows=12).view
    assert (view.train.rows, view.validation.rows) == (12, 12)
    view = made(path, validation_path=str(own), max_rows=30).view
    assert (view.train.rows, view.validation.rows) == (30, 20)
    description, _ = told(path, validation_path=str(own), max_rows=30)
    assert "50 texts" in description
    assert "(data.max_rows: at most the first 30 rows)" in description


def test_a_file_of_token_ids_is_read_up_to_the_last_row_that_counts(home: Path, tmp_path: Path) -> None:
    ids = [{"input_ids": [number, number + 1, number + 2]} for number in range(50)]
    path = parquet(tmp_path / "a.parquet", ids)
    prepared = made(path, max_rows=33)
    assert prepared.tokens.ids.tolist() == [each for row in ids[:33] for each in row["input_ids"]]


def test_files_behind_the_last_row_that_counts_are_not_looked_at(home: Path, tmp_path: Path) -> None:
    first = lines(tmp_path / "a.jsonl", texts(20))
    (tmp_path / "b.jsonl").write_text("no JSON")
    assert made([first, tmp_path / "b.jsonl"], max_rows=20).view.train.rows == 19
    with pytest.raises(TrainingError, match=r"b\.jsonl:1 is not JSON"):
        made([first, tmp_path / "b.jsonl"], max_rows=21)


@pytest.mark.parametrize("harm", ["truncate", "flip", "remove", "no metadata", "half metadata"])
@pytest.mark.parametrize("name", ["ids", "starts", "view"])
def test_torn_files_are_found_and_made_anew(
    name: str, harm: str, home: Path, tokenised: list[int], tmp_path: Path
) -> None:
    path = lines(tmp_path / "a.jsonl", texts(300))
    first = made(path)
    whole = arrays_of(first)
    spans = (first.folder / "train.bin").read_bytes()
    folder = first.folder if name == "view" else first.tokens.folder
    victim = folder / ("train.bin" if name == "view" else f"{name}.bin")
    content = victim.read_bytes()
    if harm == "truncate":
        victim.write_bytes(content[:-8])
    elif harm == "flip":
        victim.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif harm == "remove":
        victim.unlink()
    elif harm == "no metadata":
        (folder / "meta.json").unlink()
    else:
        (folder / "meta.json").write_bytes((folder / "meta.json").read_bytes()[:40])
    assert not prepared_already(recipe_for(path), tmp_path)
    again = made(path)
    assert arrays_of(again) == whole
    assert (again.folder / "train.bin").read_bytes() == spans
    assert sum(tokenised) == (300 if name == "view" else 600)


SCRIPT = """
import json, os, sys, time
from pathlib import Path
from trainkit.data import prepare as preparing
from trainkit.errors import TrainkitError
from trainkit.recipe.schema import Recipe
settings = json.loads(sys.argv[1])
for name, value in settings.get("set", {}).items():
    setattr(preparing, name, value)
plain = preparing.made_of
def made_of(piece, encoder):
    time.sleep(settings.get("pause", 0))
    made = plain(piece, encoder)
    with open(settings["log"], "a") as log:
        log.write(f"{made.rows}\\n")
    return made
preparing.made_of = made_of
if settings.get("most"):
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (settings["most"], settings["most"]))
try:
    preparing.prepare(Recipe.model_validate(settings["recipe"]), Path(settings["run_dir"]), os.environ)
except TrainkitError as error:
    print(json.dumps([str(each) for each in error.diagnostics] + [each.hint for each in error.diagnostics]))
    sys.exit(2)
"""
IN_PIECES = {"PIECE": 2000, "BATCH": 40}


def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in IN_PIECES.items():
        monkeypatch.setattr(preparing, name, value)


def started(path: Path, log: Path, **settings: Any) -> subprocess.Popen[str]:
    """A process of its own that prepares a file, in a process group of its own."""
    recipe = {"data": {"kind": "dataset", "path": str(path)}, "model": {"kind": "gpt"}}
    words = json.dumps({"recipe": recipe, "log": str(log), "run_dir": str(log.parent / "run"), **settings})
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, words], start_new_session=True, text=True, stdout=subprocess.PIPE
    )


def rows_in(log: Path) -> int:
    return sum(map(int, log.read_text().split())) if log.exists() else 0


def wait_for(happened: Callable[[], Any], process: subprocess.Popen[str], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.01)


@pytest.mark.parametrize(("kind", "alone"), [("jsonl", True), ("parquet", False)], ids=["the parent", "all"])
def test_a_preparation_that_is_killed_goes_on_with_what_it_has_kept(
    kind: str, alone: bool, home: Path, tokenised: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_pieces(monkeypatch)
    rows, log = texts(1500), tmp_path / "log"
    path = lines(tmp_path / "a.jsonl", rows) if kind == "jsonl" else parquet(tmp_path / "a.parquet", rows, 40)
    with started(path, log, set={**IN_PIECES, "SMALL": 0, "_KEPT_EVERY": 0.0}, pause=0.03) as process:
        try:
            wait_for(lambda: any(json.loads(each.read_text())["pieces"] > 9 for each in home.glob("*.part/done.json")
                                 if each.stat().st_size), process)  # fmt: skip
            workers = psutil.Process(process.pid).children(recursive=True)
            assert workers
            if alone:
                process.kill()
                _, left = psutil.wait_procs(workers, timeout=20)
                assert not left, "workers end with the process that started them"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    [done] = home.glob("*.part/done.json")
    kept = json.loads(done.read_text())["rows"]
    assert 0 < kept < len(rows)
    again = made(path)
    assert sum(tokenised) == len(rows) - kept
    assert not list(home.glob("*.part"))
    found = arrays_of(again)
    shutil.rmtree(home)
    assert found == arrays_of(made(path))


def test_what_was_kept_of_a_killed_preparation_is_not_believed_where_it_is_torn(
    home: Path, tokenised: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = lines(tmp_path / "a.jsonl", texts(900))
    whole = arrays_of(made(path))
    in_pieces(monkeypatch)

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    for harm in ("nothing", "ids", "sizes", "done"):
        shutil.rmtree(home)
        with monkeypatch.context() as patched:
            patched.setattr(preparing, "_assemble", end)
            with pytest.raises(KeyboardInterrupt):
                made(path)
        [part] = home.glob("*.part")
        if harm == "done":
            (part / "done.json").write_bytes((part / "done.json").read_bytes()[:50])
        elif harm != "nothing":
            content = (part / f"{harm}.part").read_bytes()
            (part / f"{harm}.part").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        tokenised.clear()
        assert arrays_of(made(path)) == whole
        assert sum(tokenised) == (0 if harm == "nothing" else 900)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv", "chats"])
def test_in_parallel_it_is_bit_for_bit_what_one_process_makes(
    kind: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[dict[str, Any]] = [*texts(400)]
    settings: dict[str, Any] = {}
    if kind == "parquet":
        path = parquet(tmp_path / "a.parquet", rows, 30)
    elif kind == "csv":
        path = tmp_path / "a.csv"
        path.write_text("text\n" + "".join(f"{row['text']}\n" for row in rows))
    elif kind == "chats":
        said = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on"}]
        path = lines(tmp_path / "a.jsonl", [{"messages": said * (number % 4 + 1)} for number in range(200)])
        settings["tokenizer"] = str(save_tokenizer(tmp_path / "tokenizer"))
    else:
        path = lines(tmp_path / "a.jsonl", rows)
    alone = made(path, **settings)
    found = arrays_of(alone)
    shutil.rmtree(home)
    in_pieces(monkeypatch)
    monkeypatch.setattr(preparing, "SMALL", 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(3), raising=False)
    before = psutil.Process().children(recursive=True)
    together = made(path, **settings)
    assert psutil.Process().children(recursive=True) == before
    assert arrays_of(together) == found
    names = ("rows", "training_rows", "skipped", "highest", "where", "labels", "remarks", "arrays")
    assert {name: together.tokens.meta[name] for name in names} == {name: alone.tokens.meta[name] for name in names}


def test_a_row_that_cannot_be_learned_from_ends_a_parallel_preparation_with_its_place(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = lines(tmp_path / "a.jsonl", [*texts(300), {"text": 7}, *texts(300)])
    in_pieces(monkeypatch)
    monkeypatch.setattr(preparing, "SMALL", 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(3), raising=False)
    with pytest.raises(TrainingError, match=r"a\.jsonl:301: field 'text' is no text but a number"):
        made(path)


@pytest.mark.parametrize("ending", ["arrow", "parquet"])
def test_what_is_wrong_in_a_column_that_is_not_read_does_not_matter(ending: str, home: Path, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    beyond = pyarrow.array([2**50] * 9, pyarrow.timestamp("ms"))  # no calendar of Python has it
    table = pyarrow.table({"text": [f"text {number}" for number in range(9)], "when": beyond})
    path = tmp_path / f"a.{ending}"
    if ending == "arrow":
        with pyarrow.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)
    else:
        pytest.importorskip("pyarrow.parquet").write_table(table, path)
    assert made(path).tokens.meta["rows"] == 9


@pytest.mark.parametrize("form", ["text", "messages"])
def test_half_of_a_character_is_named_where_a_tokenizer_would_fail(form: str, home: Path, tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path / "words")

    def row(said: str) -> dict[str, Any]:
        chat = [{"role": "user", "content": said}, {"role": "assistant", "content": "b"}]
        return {"text": said} if form == "text" else {"messages": chat}

    path = lines(tmp_path / "a.jsonl", [row("a"), row("a \ud83d"), row("\U0001f600")])
    with pytest.raises(TrainingError, match=r"a\.jsonl:2: half of a surrogate pair"):
        made(path, tokenizer=str(tokenizer))


def test_two_at_once_make_it_once(home: Path, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", texts(600))
    logs = [tmp_path / f"log-{number}" for number in range(2)]
    processes = [started(path, log, set={"BATCH": 40}, pause=0.05) for log in logs]
    for process in processes:
        with process:
            assert process.wait(timeout=120) == 0
    assert sum(map(rows_in, logs)) == 600
    assert len(list(home.glob("*/meta.json"))) == 1


def test_where_the_cache_cannot_be_written_the_run_directory_has_it(home: Path, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", texts(50))
    (tmp_path / "file").write_text("not a folder")
    found = made(path, run_dir=tmp_path / "run", cache=str(tmp_path / "file/cache"))
    assert found.tokens.folder.parent == tmp_path / "run/prepared"
    with pytest.raises(TrainingError, match="no folder can hold the prepared data") as caught:
        made(path, run_dir=tmp_path / "file", cache=str(tmp_path / "file/cache"))
    assert caught.value.diagnostics[0].hint == "set data.cache to a writable folder"


def test_a_full_disk_is_one_message_and_the_next_try_succeeds(home: Path, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", texts(4000))
    with started(path, tmp_path / "log", most=60_000) as process:
        assert process.wait(timeout=120) == 2
        assert process.stdout is not None
        [what, hint] = json.loads(process.stdout.read())
    assert "no folder can hold the prepared data" in what
    assert what.count("File too large") == 2, "the cache and the run directory"
    assert "data.cache" in hint
    assert made(path).tokens.meta["rows"] == 4000


def split(path: Path, **settings: Any) -> tuple[list[str], list[str]]:
    found = made(path, packing="none", sequence_length=200, **settings)
    return text_of(found, "train"), text_of(found, "validation")


def test_equal_rows_are_on_one_side_and_the_split_is_that_of_the_content(home: Path, tmp_path: Path) -> None:
    rows = [{"text": f"the text {number}"} for number in range(200) for _ in range(number % 4 + 1)]
    train, validation = split(lines(tmp_path / "a.jsonl", rows), validation_fraction=0.2)
    assert not {*train} & {*validation}
    assert 0.15 * len(rows) < len(validation) < 0.25 * len(rows)
    random.Random(0).shuffle(rows)
    again = split(lines(tmp_path / "b.jsonl", rows), validation_fraction=0.2)
    assert (sorted(again[0]), sorted(again[1])) == (sorted(train), sorted(validation))
    assert again[1] != validation, "in the order of the file"
    other = split(tmp_path / "b.jsonl", validation_fraction=0.2, split_seed=1)
    assert not {*other[0]} & {*other[1]}
    assert len({*other[1]} & {*validation}) < 0.5 * len({*validation})


def test_a_sorted_file_gives_both_sides_of_both_classes_and_a_missing_class_is_warned_of(
    home: Path, tmp_path: Path
) -> None:
    model = {"kind": "hf", "architecture": "bert", "task": "sequence_classification"}
    rows = [{"text": f"text {number}", "label": "bad" if number < 100 else "good"} for number in range(200)]
    path = lines(tmp_path / "a.jsonl", rows)
    view = made(path, model, validation_fraction=0.2).view
    assert all(min(trains, evaluates) > 5 for trains, evaluates in view.labels)
    assert not told(path, model, validation_fraction=0.2)[1]
    lines(path, [*rows[:100], *rows[100:101]])
    _, [warned] = told(path, model)
    assert warned.startswith("no row with label good is left to ")
    assert "data.validation_path" in warned
    lines(path, [{**row, "label": 1990 + number % 3} for number, row in enumerate(rows)])
    [warned] = told(path, model, validation_fraction=0.2)[1]
    assert warned.startswith("no row with label 0, 1, 2, 3, 4, 5, 6, 7 and 1982 more is left to train on: ")


def test_labels_that_a_pretrained_classifier_knows_keep_their_numbers(home: Path, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [{"text": f"text {n}", "label": ("bad", "good")[n % 2]} for n in range(40)])
    for known, numbered in (
        ({"0": "good", "1": "bad", "2": "so-so"}, "(0 good, 1 bad, 2 so-so)"),
        ({"0": "LABEL_0", "1": "LABEL_1"}, "(0 bad, 1 good)"),
        (None, "(0 bad, 1 good)"),
        (["good", "bad"], "(0 bad, 1 good)"),
    ):
        config = {"model_type": "bert", "id2label": known}
        (tmp_path / "config.json").write_text(json.dumps(config))
        model = {"kind": "hf", "path": str(tmp_path), "task": "sequence_classification"}
        assert numbered in told(path, model, tokenizer="bytes")[0]
        assert "(0 bad, 1 good)" in told(path, model, tokenizer="bytes", labels=["bad", "good"])[0]


def test_the_label_of_a_text_is_shown_as_what_is_learned(home: Path, tmp_path: Path) -> None:
    model = {"kind": "hf", "architecture": "bert", "task": "sequence_classification"}
    for labels, shown in ((("bad", "good"), "bad"), ((0, 1), "0")):
        rows = [{"text": f"text {number}", "label": labels[number % 2]} for number in range(40)]
        recipe = recipe_for(lines(tmp_path / "a.jsonl", rows), model)
        prepared, found, encoder, names = prepare(recipe, Path("/nowhere"), os.environ)
        assert f"text 0 ⟦{shown}⟧" in page(prepared, found.files, encoder, names, 1, colour=False)
        assert as_json(prepared, found.files, encoder, names, 1)["texts"] == [[("text 0 ", False), (shown, True)]]


def test_prepared_rows_are_shown_again_without_a_tokenizer_of_transformers_and_never_prepared_for_it(
    home: Path, tmp_path: Path
) -> None:
    pairs = [{"prompt": f"say {number}", "completion": f"it is {number}"} for number in range(8)]
    rows, labelled = (
        lines(tmp_path / "rows.jsonl", pairs),
        [{"text": "b", "label": "good"}, {"text": "a", "label": "bad"}] * 4,
    )
    words = str(save_tokenizer(tmp_path / "words"))
    for recipe in (
        recipe_for(rows),
        recipe_for(rows, tokenizer=words),
        recipe_for(
            lines(tmp_path / "labelled.jsonl", labelled),
            {"kind": "hf", "architecture": "bert", "task": "sequence_classification"},
        ),
    ):
        with pytest.raises(
            TrainingError, match="the rows have changed since the run, or what was prepared of them is gone"
        ):
            learned_pieces(recipe, os.environ, 3)
        time.sleep(2.1)  # until the files count as settled
        prepared, found, encoder, names = prepare(recipe, Path("/nowhere"), os.environ)
        shown = as_json(prepared, found.files, encoder, names, 3)["texts"]
        assert learned_pieces(recipe, os.environ, 3) == shown
        assert {learned for text in shown for _, learned in text} == {True, False}
    rows.write_text("")
    with pytest.raises(TrainingError):
        learned_pieces(recipe_for(rows), os.environ, 3)


def test_answers_that_are_all_of_weight_0_are_not_called_too_long(home: Path, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello.", "weight": 0}]
    path = lines(tmp_path / "a.jsonl", [{"messages": chat}] * 4)
    with pytest.raises(TrainingError, match="nothing is left to train on") as caught:
        made(path, tokenizer=str(save_tokenizer(tmp_path / "tokenizer")))
    assert caught.value.diagnostics[0].hint == "give at least one answer a weight of 1"


def test_rows_that_are_nearly_all_equal_are_on_both_sides_and_that_is_said(home: Path, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [{"text": "the same"}] * 100)
    view = made(path).view
    assert (view.train.rows, view.validation.rows, view.equal_rows) == (95, 5, 5)
    assert told(path)[1] == ["5 rows to evaluate on have an equal row that is trained on"]
    view = made(lines(path, [{"text": "the same"}] * 2)).view
    assert (view.train.rows, view.validation.rows, view.equal_rows) == (1, 1, 1)
    assert told(path)[1] == ["1 row to evaluate on has an equal row that is trained on"]


def test_files_of_another_format_in_a_folder_are_named_where_they_are_not_read(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    lines(folder / "a.jsonl", texts(9))
    assert told(folder)[1] == []
    (folder / "b.csv").write_text("text\nmore\n")
    [warned] = told(folder)[1]
    assert warned.startswith("not read, for other files of the folder are of another format: b.csv")
    stream = recipe_for(folder, streaming=True, sequence_length=16, validation_rows=1)
    assert open_source(stream, tmp_path).remarks == (warned,)
    assert made([folder / "a.jsonl", folder / "b.csv"]).tokens.meta["rows"] == 10
    (folder / "README.md").write_text("---\nconfigs:\n- config_name: default\n  data_files: a.jsonl\n---\n")
    assert told(folder)[1] == []


def test_rows_of_a_file_of_its_own_that_are_trained_on_too_are_counted(home: Path, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [{"text": f"text {number}"} for number in range(20)] + [{"text": ""}])
    own = lines(tmp_path / "b.jsonl", [{"text": f"text {number}"} for number in range(17, 25)] + [{"text": ""}])
    assert told(path, validation_path=str(own), skip_empty=True)[1] == [
        "3 rows to evaluate on have an equal row that is trained on"
    ]


def test_empty_rows_are_never_those_to_evaluate_on(home: Path, tmp_path: Path) -> None:
    rows = [{"text": f"text {number}"} for number in range(40)] + [{"text": ""}] * 30
    path = lines(tmp_path / "a.jsonl", rows)
    for seed in range(40):
        view = made(path, skip_empty=True, split_seed=seed).view
        assert (view.train.samples, view.validation.samples, view.equal_rows) == (38, 2, 0)
        assert view.train.skipped + view.validation.skipped == 30


def test_data_of_which_nothing_is_left_to_evaluate_on_is_never_said_to_be_ready(home: Path, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [{"text": "only one"}])
    for _ in range(2):
        with pytest.raises(TrainingError, match="nothing is left to evaluate on"):
            made(path)
        assert not prepared_already(recipe_for(path), tmp_path)


def test_a_file_of_its_own_is_evaluated_on_whatever_its_format(home: Path, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [{"text": f"text {number}"} for number in range(20)])
    (tmp_path / "b.csv").write_text("text\nevaluated\non these\n")
    train, validation = split(path, validation_path=str(tmp_path / "b.csv"))
    assert (len(train), validation) == (20, ["evaluated", "on these"])
    (tmp_path / "c.csv").write_text("text\n")
    with pytest.raises(TrainingError, match=r"c\.csv has no row to evaluate on"):
        split(path, validation_path=str(tmp_path / "c.csv"))
    (tmp_path / "c.csv").write_text("words\nevaluated\n")
    with pytest.raises(TrainingError, match=r"c\.csv:2: field 'text' is missing"):
        split(path, validation_path=str(tmp_path / "c.csv"))
    with pytest.raises(TrainingError, match=r"gone\.csv does not exist"):
        split(path, validation_path=str(tmp_path / "gone.csv"))


def lengths(path: Path, **config: Any) -> int:
    model = path.parent / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    asked = {"kind": "hf", "path": str(model)}
    return made(path, asked, sequence_length="auto", tokenizer="bytes").view.sequence_length


def test_the_length_is_what_99_of_100_rows_fit_into_and_at_most_what_the_model_reads(
    home: Path, tmp_path: Path
) -> None:
    path = lines(tmp_path / "a.jsonl", [*[{"text": f"{n:03}" + "x" * (n % 100)} for n in range(990)],
                                        *[{"text": f"{n}" + "y" * 5000} for n in range(10)]])  # fmt: skip
    assert lengths(path) == 128, "102, in multiples of 64"
    assert lengths(path, max_position_embeddings=100) == 100
    assert lengths(path, max_position_embeddings=5000) == 128
    lines(path, [{"text": f"{n:03}" + "x" * 61} for n in range(200)])
    assert lengths(path) == 64
    lines(path, [{"text": f"{n:03}" + "x" * 62} for n in range(200)])
    assert lengths(path) == 128


def test_a_tokenizer_that_knows_a_limit_lowers_the_length(home: Path, tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "tokenizer")
    path = lines(tmp_path / "a.jsonl", [{"text": f"{number} the cat" * 40} for number in range(30)])
    for limit, expected in ((33, 33), (10**30, 256)):
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "model_max_length": limit}))
        found = made(path, sequence_length="auto", tokenizer=str(folder)).view
        assert found.sequence_length == min(expected, -(-found.lengths.p99 // 64) * 64)


def test_what_is_cut_in_pieces_left_out_and_skipped_is_counted_and_above_1_of_100_warned_of(
    home: Path, tmp_path: Path
) -> None:
    short = [{"prompt": f"{number} = ", "completion": "x" * 9} for number in range(95)]
    cut = [{"prompt": f"{number} = ", "completion": "x" * 90} for number in range(95, 98)]
    filled = [{"prompt": f"{number} = " * 20, "completion": "x"} for number in range(98, 100)]
    empty = [{"prompt": "", "completion": "x"}] * 4
    path = lines(tmp_path / "a.jsonl", [*short, *cut, *filled, *empty])
    asked: dict[str, Any] = {"sequence_length": 40, "skip_empty": True}
    view = made(path, **asked).view
    sides = (view.train, view.validation)
    assert sum(each.cut for each in sides) == 5
    assert sum(each.without for each in sides) == 2
    assert sum(each.skipped for each in sides) == 4
    text, warned = told(path, **asked)
    assert text.endswith("(5 cut at 40 tokens) (2 left out: nothing to learn within 40 tokens) (4 empty rows skipped)")
    assert warned[0].startswith("5.0% of the texts is cut at data.sequence_length 40: the longest has")
    assert warned[1].startswith("2.0% of the texts is left out, for it has nothing to learn")
    lines(path, [*short, {"prompt": "1", "completion": "x" * 90}, *[{**each, "prompt": "more"} for each in short]])
    text, warned = told(path, **asked)
    assert "1 cut at 40 tokens" in text and not any("is cut" in each for each in warned)
    lines(path, [{"text": f"{number} " + "x" * 100} for number in range(10)])
    text, warned = told(path, sequence_length=40)
    assert "(10 in pieces)" in text and not warned


def samples_of(source: Source, numbers: Sequence[int]) -> list[tuple[str, ...]]:
    """The texts of each sample, without the last byte of each, which is only predicted."""
    found = []
    for number in numbers:
        inputs = source.train[[number]].inputs
        ids, positions = inputs["tokens"][0].tolist(), inputs["position_ids"][0].tolist()
        begins = [place for place, position in enumerate(positions) if position == 0]
        parts = [bytes(ids[one:other]).decode() for one, other in zip(begins, [*begins[1:], len(ids)], strict=True)]
        found.append(tuple(part for part in parts if part.strip("\0")))
    return found


@pytest.mark.parametrize("group", [1 << 16, 50])
def test_whole_texts_fill_samples_in_other_company_in_each_epoch_from_any_number_on(
    group: int, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "GROUP", group)
    rows = texts(400)
    path, held_out = lines(tmp_path / "a.jsonl", rows), lines(tmp_path / "b.jsonl", rows[:3])
    recipe = recipe_for(path, validation_path=str(held_out), sequence_length=128)
    source = open_source(recipe, tmp_path)
    count = len(source.train)
    assert float(source.facts["fill"]) >= (0.9 if group == 50 else 0.97)
    epochs = [samples_of(source, range(epoch * count, (epoch + 1) * count)) for epoch in range(3)]
    whole = sorted(row["text"][:-1] for row in rows)
    for epoch in epochs:
        assert sorted(text for sample in epoch for text in sample) == whole, "none is cut, each is there once"
    pairs = [{frozenset((a, b)) for sample in epoch for a in sample for b in sample if a != b} for epoch in epochs]
    for one, other in ((0, 1), (1, 2), (0, 2)):
        assert len(pairs[one] & pairs[other]) < 0.2 * len(pairs[one])
    for number in (0, 1, count - 1, count, 2 * count + 3):  # as a run that goes on there
        [fresh] = samples_of(open_source(recipe, tmp_path), [number])
        assert fresh == epochs[number // count][number % count]
    monkeypatch.setattr(packing, "GROUP", 1 << 16)


def predicted_by(source: Source) -> Counter[tuple[bytes, int]]:
    """Of each sample what is predicted, and from what: the tokens before it in its text."""
    found: Counter[tuple[bytes, int]] = Counter()
    inputs = source.train[range(len(source.train))].inputs
    positions = inputs.get("position_ids")
    for row, (ids, targets) in enumerate(zip(inputs["tokens"].tolist(), inputs["targets"].tolist(), strict=True)):
        begin = 0
        for place, target in enumerate(targets):
            begin = place if positions is not None and positions[row, place] == 0 else begin
            if target >= 0:
                found[bytes(ids[begin : place + 1]), target] += 1
    return found


@pytest.mark.parametrize("prompts", [False, True], ids=["texts", "prompts with answers"])
@pytest.mark.parametrize("packing", ["isolated", "none", "dense"])
def test_every_token_that_is_to_be_learned_is_predicted_once_from_those_before_it_in_its_text(
    packing: str, prompts: bool, home: Path, tmp_path: Path, thorough: bool
) -> None:
    for seed in range(60 if thorough else 8):
        chance = random.Random(seed)
        length = chance.randint(2, 24)
        parts = [
            (
                "".join(chance.choices("abcd", k=chance.randint(1, 20) if prompts else 0)),
                "".join(chance.choices("efgh", k=chance.randint(1, 40))),
            )
            for _ in range(chance.randint(3, 60))
        ]
        parts += [("a" * prompts, "ef"), parts[0]]
        rows = [{"prompt": one, "completion": other} if prompts else {"text": other} for one, other in parts]
        path, held_out = lines(tmp_path / f"{seed}.jsonl", rows), lines(tmp_path / "b.jsonl", rows[-2:-1])
        source = open_source(
            recipe_for(path, validation_path=str(held_out), packing=packing, sequence_length=length), tmp_path
        )
        expected: Counter[tuple[bytes, int]] = Counter()
        for one, other in parts:
            text = (one + other).encode()
            for begin in (0,) if prompts else range(0, max(1, len(text) - 1), length):
                piece = text[begin : begin + length + 1]
                expected.update((piece[:place], piece[place]) for place in range(max(1, len(one)), len(piece)))
        if packing == "dense":  # cut anywhere, so that tokens have others before them, and none is lost
            found = sum(source.train[[number]].counted for number in range(len(source.train)))
            assert found == sum(len(other) - (not one) for one, other in parts)
        else:
            assert predicted_by(source) == expected, seed


MEASURED = """
import json, re, sys
from pathlib import Path
from trainkit.recipe.schema import Recipe
from trainkit.trainer.data.dataset import open_source
source = open_source(Recipe.model_validate(json.loads(sys.argv[1])), Path("run"))
for number in range(0, len(source.train), len(source.train) // 12):
    source.train[[number]]
print(re.search(r"Anonymous: +(\\d+) kB", Path("/proc/self/smaps_rollup").read_text())[1])  # not what is mapped
"""


def test_the_memory_of_a_rank_does_not_depend_on_the_rows(home: Path, tmp_path: Path, thorough: bool) -> None:
    if not thorough:
        pytest.skip("a million rows take a minute: scripts/test --all")
    used = []
    for rows in (250_000, 1_000_000):
        path = tmp_path / f"{rows}.jsonl"
        with path.open("w") as file:
            file.writelines(f'{{"text": "row {number} of many"}}\n' for number in range(rows))
        recipe = recipe_for(path, sequence_length=128).model_dump(mode="json", by_alias=True)
        words = [sys.executable, "-c", MEASURED, json.dumps(recipe)]
        made(path, sequence_length=128)
        done = subprocess.run(words, check=True, capture_output=True, text=True, cwd=tmp_path)
        used.append(int(done.stdout))
    assert used[1] - used[0] < 8_000, used
