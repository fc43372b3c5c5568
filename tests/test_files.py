"""Whole files: written beside their target under a name that nobody can plant, read without falling over damage."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from trainkit.files import (
    cache_folder,
    hold_lock,
    is_locked,
    is_there,
    open_regular,
    parse_json,
    publish,
    publish_or_overwrite,
    read_json,
    read_json_lines,
    read_record,
    read_whole,
    refuse_links,
    remove_tree,
    try_lock,
    write_json,
)
from trainkit.runner.rundir.records import Status

Write = Callable[[Path, str], None]
WRITES = [publish, partial(publish, flush=True)]


@pytest.mark.parametrize("write", WRITES)
def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path, write: Write) -> None:
    file = tmp_path / "status.json"
    write(file, "old")
    write(file, "new é")
    assert file.read_text(encoding="utf-8") == "new é"
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


@pytest.mark.parametrize("write", WRITES)
def test_a_link_in_the_place_of_the_target_is_replaced_and_not_written_through(tmp_path: Path, write: Write) -> None:
    victim, file = tmp_path / "victim", tmp_path / "status.json"
    victim.write_text("precious")
    file.symlink_to(victim)
    write(file, "new")
    assert (victim.read_text(), file.is_symlink(), file.read_text()) == ("precious", False, "new")


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize(
    "name", [f".status.json.{os.getpid()}", ".status.json.0011223344556677"], ids=["old", "guessed"]
)
def test_a_link_planted_under_the_temporary_name_is_not_followed(
    tmp_path: Path, write: Write, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, planted = tmp_path / "victim", tmp_path / name
    victim.write_text("precious")
    planted.symlink_to(victim)
    if not name.endswith(str(os.getpid())):  # whoever guesses even the random part reaches nothing
        monkeypatch.setattr(os, "urandom", lambda count: bytes.fromhex("0011223344556677")[:count])
        with pytest.raises(FileExistsError):
            write(tmp_path / "status.json", "new")
    else:
        write(tmp_path / "status.json", "new")
        assert (tmp_path / "status.json").read_text() == "new"
    assert victim.read_text() == "precious"
    assert planted.is_symlink()


def test_what_is_to_outlive_a_power_cut_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, int]] = []
    sync, replace = os.fsync, os.replace

    def noted_sync(fd: int) -> None:
        done.append(("flush", os.fstat(fd).st_size))
        sync(fd)

    def noted_replace(*names: object, **options: object) -> None:
        done.append(("rename", 0))
        replace(*names, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(os, "replace", noted_replace)
    publish(tmp_path / "status.json", "text", flush=True)
    assert done == [("flush", 4), ("rename", 0)]


def test_a_lock_is_one_holders_alone(tmp_path: Path) -> None:
    first = hold_lock(tmp_path / "lock")
    second = os.open(tmp_path / "lock", os.O_RDWR)
    assert is_locked(tmp_path / "lock")
    assert not try_lock(second)
    os.close(first)
    assert not is_locked(tmp_path / "lock")
    assert try_lock(second)
    third = os.open(tmp_path / "lock", os.O_RDWR)
    assert not try_lock(third)
    os.close(second)
    os.close(third)


def test_what_cannot_be_put_in_place_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        publish(tmp_path / "folder", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_on_a_full_disk_a_file_is_rewritten_in_its_place_but_never_through_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    file, link = tmp_path / "status.json", tmp_path / "link"
    file.write_text("a long line")
    publish_or_overwrite(file, "short")
    assert file.read_text() == "short"
    link.symlink_to(file)
    with pytest.raises(OSError, match="link"):
        publish_or_overwrite(link, "other")
    with pytest.raises(FileNotFoundError):
        publish_or_overwrite(tmp_path / "nowhere", "text")
    assert file.read_text() == "short"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "status.json"]


def test_json_is_read_back_and_damage_reads_as_empty(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    write_json(file, {"loss": float("inf"), "name": "é"})
    assert read_json(file) == {"loss": float("inf"), "name": "é"}
    for content in (b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, b""):
        file.write_bytes(content)
        assert read_json(file) == {}
    assert read_json(tmp_path / "nowhere") == read_json(tmp_path) == {}


def test_the_cache_folder_follows_the_xdg_specification() -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/c", "HOME": "/h"}, "corpora") == "/c/trainkit/corpora"
    assert cache_folder({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "corpora") == "/h/.cache/trainkit/corpora"
    assert cache_folder({"HOME": "/h"}, "corpora") == "/h/.cache/trainkit/corpora"
    assert cache_folder({}, "corpora") is None


def test_what_cannot_be_looked_at_is_not_said_to_be_missing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "nowhere").symlink_to("gone")
    there = {name: is_there(tmp_path / name) for name in (".", "file", "gone", "gone/in", "file/in", "nowhere")}
    assert [name for name, found in there.items() if found] == [".", "file"]
    for name, code in (("loop", errno.ELOOP), ("x" * 300, errno.ENAMETOOLONG)):
        with pytest.raises(OSError, match=r"name|link") as raised:
            is_there(tmp_path / name)
        assert raised.value.errno == code


def test_a_link_in_the_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    refuse_links(tmp_path / "real", tmp_path / "missing")
    with pytest.raises(OSError, match="a link is in the place of a folder of the run"):
        refuse_links(tmp_path / "real", tmp_path / "link")


def _link(path: Path) -> None:
    (path.parent / "victim").write_text('{"a": 1}')
    path.symlink_to("victim")


def _second_name(path: Path) -> None:
    (path.parent / "victim").write_text('{"a": 1}')
    path.hardlink_to(path.parent / "victim")


PLANTED: dict[str, Callable[[Path], None]] = {
    "a FIFO": os.mkfifo,
    "a link": _link,
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": Path.mkdir,
}


@pytest.mark.parametrize("kind", PLANTED)
def test_what_is_no_file_is_neither_waited_for_nor_read_nor_written_through(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "status.json"
    PLANTED[kind](file)
    assert (read_json(file), list(read_json_lines(file))) == ({}, [])
    with pytest.raises(OSError):
        read_whole(file)
    with pytest.raises(OSError):
        open_regular(file, os.O_WRONLY | os.O_APPEND)
    if kind == "a link":
        assert read_whole(file, links=True) == b'{"a": 1}'  # one that a person named


def test_nothing_is_appended_to_a_file_with_a_second_name(tmp_path: Path) -> None:
    _second_name(tmp_path / "metrics.jsonl")
    with pytest.raises(OSError, match="second name"):
        open_regular(tmp_path / "metrics.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    assert read_json(tmp_path / "metrics.jsonl") == {"a": 1}


def test_a_file_of_any_size_is_read_to_a_limit_alone(tmp_path: Path) -> None:
    with (tmp_path / "plan.json").open("wb") as file:
        file.truncate(10 * 2**30)
    with pytest.raises(OSError, match="large"):
        read_whole(tmp_path / "plan.json")
    assert (read_json(tmp_path / "plan.json"), list(read_json_lines(tmp_path / "plan.json"))) == ({}, [])


@pytest.mark.parametrize(
    "content", ["[" * 10**6, '{"a":' * 10**5, "[" * 65 + "]" * 65, '{"a":' * 970 + "1" + "}" * 970]
)
def test_json_of_any_depth_is_an_error_like_any_other(content: str) -> None:
    with pytest.raises(ValueError, match="too deeply"):
        parse_json(content)


def test_brackets_in_a_text_are_no_depth() -> None:
    assert parse_json(json.dumps({"a": '[{\\"' * 500})) == {"a": '[{\\"' * 500}
    assert parse_json("[" * 64 + "]" * 64) == parse_json(("[" * 64 + "]" * 64).encode("utf-16"))


def test_a_record_whose_values_are_nested_is_read_as_damaged_at_any_depth(tmp_path: Path) -> None:
    for depth in range(50, 1100):
        (tmp_path / "status.json").write_text(f'{{"pids": {{"ranks": {{"0": {"[" * depth}{"]" * depth}}}}}}}')
        assert read_record(tmp_path / "status.json", Status, below=tmp_path) is None, depth


def test_what_is_in_the_place_of_a_folder_is_removed_itself(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "file").touch()
    (tmp_path / "link").symlink_to("theirs")
    os.mkfifo(tmp_path / "fifo")  # opened, it would wait for its other end
    (tmp_path / "mine" / "inner").mkdir(parents=True)
    for name in ("link", "fifo", "mine"):
        remove_tree(tmp_path / name)
    assert [path.name for path in tmp_path.rglob("*")] == ["theirs", "file"]
    with pytest.raises(FileNotFoundError):
        remove_tree(tmp_path / "mine")
