"""The ranks as the guardian watches them, with real processes in the place of their wrappers."""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trainkit.runner.rundir.records import REMOVED, RankRecord, unwritten, write_record
from trainkit.runner.supervisor.ranks import Ranks

Start = Callable[[str], subprocess.Popen[bytes]]


@pytest.fixture
def attempt(tmp_path: Path) -> str:
    (tmp_path / "ranks").mkdir()
    return str(tmp_path)


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a process that lives for so many seconds; none outlives the test."""
    started: list[subprocess.Popen[bytes]] = []

    def sleep(seconds: str) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["sleep", seconds]))
        return started[-1]

    yield sleep
    for process in started:
        process.kill()
        process.wait()


def record(rank: int, pid: int, *, ended: float | None = None, exit_code: int | None = None) -> RankRecord:
    return RankRecord(rank, rank, os.uname().nodename, pid, pid=pid, ended=ended, exit_code=exit_code)


def test_ranks_that_have_ended_do_not_keep_their_watcher_awake(attempt: str, start: Start) -> None:
    selector = selectors.DefaultSelector()
    ranks = Ranks(attempt, selector)
    first, second = start("60"), start("60")
    for rank, process in enumerate((first, second)):
        write_record(attempt, record(rank, process.pid))
    ranks.poll()
    write_record(attempt, record(0, first.pid, ended=time.time(), exit_code=0))
    first.kill()
    first.wait()
    ranks.poll()
    assert ranks.alive() == [1]
    assert not ranks.vanished
    assert selector.select(0) == []


def test_a_rank_that_was_started_anew_is_watched_in_its_new_process_alone(attempt: str, start: Start) -> None:
    selector = selectors.DefaultSelector()
    ranks = Ranks(attempt, selector)
    first, second = start("60"), start("60")
    write_record(attempt, record(0, first.pid))
    ranks.poll()
    first.kill()
    first.wait()
    write_record(attempt, record(0, second.pid))
    ranks.poll()
    assert (ranks.alive(), ranks.vanished) == ([0], {})
    assert selector.select(0) == []


def test_a_rank_that_registers_while_another_vanishes_is_taken_in(attempt: str, start: Start) -> None:
    dead, late = start("0"), start("60")
    dead.wait()
    write_record(attempt, record(0, dead.pid))

    class Slow(Ranks):
        """Its second look finds one rank more than its first."""

        looks = 0

        def _read(self) -> None:
            self.looks += 1
            if self.looks == 2:
                write_record(attempt, record(1, late.pid))
            super()._read()

    ranks = Slow(attempt, selectors.DefaultSelector())
    ranks.poll()
    assert list(ranks.vanished) == [0]
    assert ranks.alive() == [1]


def test_records_that_cannot_be_read_are_an_obstacle_and_so_is_a_folder_that_is_gone(attempt: str) -> None:
    ranks = Ranks(attempt, selectors.DefaultSelector())
    write_record(attempt, record(0, 4))
    assert ranks.obstacle() == ""
    (Path(attempt) / "ranks/rank-1.json").mkdir()  # read, it is an error, as one on a failing disk
    assert ranks.obstacle() == f"{attempt}/ranks cannot be read: Is a directory"
    Path(attempt).rename(f"{attempt}-moved")
    assert ranks.obstacle() == REMOVED
    Path(attempt).symlink_to(f"{attempt}-moved")
    assert "a link is in the place of a folder of the run" in ranks.obstacle()


def test_a_wrapper_that_could_not_write_its_record_has_said_so_to_the_launcher(attempt: str) -> None:
    assert unwritten(attempt) == ""
    log = Path(attempt) / "logs" / "launcher.log"
    log.parent.mkdir()
    log.write_text("trainkit.runner.rank: /another cannot be written: No such file or directory\n")
    assert unwritten(attempt) == ""
    with log.open("a") as file:
        file.write(f"trainkit.runner.rank: {attempt} cannot be written: Read-only file system\n")
    assert unwritten(attempt) == f"{attempt} cannot be written: Read-only file system"


def test_a_closed_folder_is_not_called_removed(attempt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(path: str) -> bool:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("trainkit.runner.supervisor.ranks.is_there", closed)
    assert (
        Ranks(attempt, selectors.DefaultSelector()).obstacle()
        == f"{attempt}/ranks cannot be written: Permission denied"
    )
