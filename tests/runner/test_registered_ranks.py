"""The ranks as the guardian watches them, with real processes in the place of their wrappers."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from trainkit.files import open_regular, publish, read_record
from trainkit.runner.nodes.control import Control
from trainkit.runner.rundir import records
from trainkit.runner.rundir.records import REMOVED, RankRecord, read_records, unwritten, write_record
from trainkit.runner.supervisor import processes
from trainkit.runner.supervisor.registered_ranks import RegisteredRanks
from trainkit.runner.watch.timing import Limits
from trainkit.runner.watch.watch import Watch

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
    known = RankRecord(rank, rank, os.uname().nodename, pid, pid=pid, ended=ended, exit_code=exit_code)
    return known._replace(wrapper_started=processes.started(pid))


def test_ranks_that_have_ended_do_not_keep_their_watcher_awake(attempt: str, start: Start) -> None:
    selector = selectors.DefaultSelector()
    ranks = RegisteredRanks(attempt, selector)
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
    assert len(selector.get_map()) == 1  # else a later one that gets the same descriptor could not be watched


def test_a_rank_that_was_started_anew_is_watched_in_its_new_process_alone(attempt: str, start: Start) -> None:
    selector = selectors.DefaultSelector()
    ranks = RegisteredRanks(attempt, selector)
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

    class Slow(RegisteredRanks):
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


def test_a_node_reads_the_records_of_its_own_ranks_alone(
    attempt: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapper = start("60").pid
    guardians = [RegisteredRanks(attempt, selectors.DefaultSelector(), node) for node in range(3)]
    for rank in range(6):
        write_record(attempt, record(rank, wrapper)._replace(node=rank // 2))
    opened: list[str] = []

    def noted(path: str, kind: type[RankRecord], *, below: str) -> RankRecord | None:
        opened.append(Path(path).name)
        return read_record(path, kind, below=below)

    monkeypatch.setattr(records, "read_record", noted)
    for node, ranks in enumerate(guardians):
        ranks.poll()
        assert [*ranks.records] == [2 * node, 2 * node + 1]
        assert not ranks.obstacle()
    assert sorted(opened) == [f"rank-{rank}.json" for rank in range(6)]
    assert [each.rank for each in read_records(attempt)] == [*range(6)]


def test_records_of_a_run_whose_nodes_had_one_folder_are_still_read(attempt: str) -> None:
    for rank in range(2):
        text = json.dumps(record(rank, 1)._replace(node=rank)._asdict())
        publish(Path(attempt) / "ranks" / f"rank-{rank}.json", text)
    assert [(each.rank, each.node) for each in read_records(attempt)] == [(0, 0), (1, 1)]
    assert [each.rank for each in read_records(attempt, 0)] == [0]


def test_a_link_in_the_place_of_a_nodes_folder_is_neither_written_nor_read(attempt: str, tmp_path: Path) -> None:
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (Path(attempt) / "ranks" / "node-1").symlink_to(elsewhere)
    with pytest.raises(OSError, match="a link is in the place of a folder"):
        write_record(attempt, record(1, 1)._replace(node=1))
    (elsewhere / "rank-1.json").write_text(json.dumps(record(1, 1)._asdict()))
    assert [*read_records(attempt)] == []
    with pytest.raises(OSError, match="a link is in the place of a folder"):
        [*read_records(attempt, 1)]


def test_records_that_cannot_be_read_are_an_obstacle_and_so_is_a_folder_that_is_gone(attempt: str) -> None:
    ranks = RegisteredRanks(attempt, selectors.DefaultSelector())
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

    monkeypatch.setattr("trainkit.runner.supervisor.registered_ranks.is_there", closed)
    assert (
        RegisteredRanks(attempt, selectors.DefaultSelector()).obstacle()
        == f"{attempt}/ranks cannot be written: Permission denied"
    )


def test_a_process_that_is_not_of_this_attempt_is_no_rank(attempt: str, start: Start) -> None:
    """Nothing is signalled here: a look must not even take it in."""
    write_record(attempt, record(0, start("60").pid)._replace(wrapper_started="1"))  # its number was given again
    write_record(attempt, record(1, os.getppid()))  # neither below the guardian nor a wrapper by its words
    ranks = RegisteredRanks(attempt, selectors.DefaultSelector())
    ranks.poll()
    assert ranks.alive() == []
    assert [*ranks.records, *ranks.vanished] == [0, 0]


def test_what_was_taken_for_ended_is_never_alive(attempt: str, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = RegisteredRanks(attempt, selectors.DefaultSelector())
    write_record(attempt, record(0, start("60").pid)._replace(wrapper_started="1"))
    ranks.poll()
    monkeypatch.setattr("trainkit.runner.supervisor.registered_ranks.started", lambda _: "1")
    assert ([*ranks.records], ranks.alive()) == ([0], [])


def test_a_process_that_only_a_record_names_is_not_looked_into(
    attempt: str, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by a tool nor through its descriptors: the stranger is this process, with a child."""
    (tool := tmp_path / "py-spy").write_text("")
    tool.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    opened, spawned = list[str](), list[tuple[str, ...]]()

    def noted(path: str, *args: Any, **options: Any) -> int:
        opened.append(path)
        return open_regular(path, *args, **options)

    def spawn(argv: Sequence[str], _: Sequence[int]) -> int:
        spawned.append(tuple(argv))
        return 0

    monkeypatch.setattr("trainkit.runner.watch.dumping.open_regular", noted)
    stranger = RankRecord(0, 0, "tk0", os.getpid(), pid=start("60").pid, wrapper_started="1", heartbeat=0)
    selector = selectors.DefaultSelector()
    write_record(attempt, stranger)
    (ranks := RegisteredRanks(attempt, selector)).poll()
    (tmp_path / "orders").mkdir()
    (tmp_path / "orders" / "dump").write_text("77")
    watch = Watch(Limits(), attempt, Control(0, {}, selector, 1.0), spawn, 0, "torchrun")
    watch.turn(ranks.records, ranks.alive(), ())
    assert (tmp_path / "dumps").exists()
    assert (opened, spawned) == ([], [])


def test_a_rank_has_term_once_and_one_that_was_started_since_has_it_too(
    attempt: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(RegisteredRanks, "_send", lambda _, pid, number: sent.append((pid, number)))
    ranks = RegisteredRanks(attempt, selectors.DefaultSelector())
    first, late = start("60").pid, start("60").pid
    for rank, pid in enumerate((first, late)):
        write_record(attempt, record(rank, pid))
        ranks.poll()
        ranks.stop()
        ranks.stop()
    assert sent == [(first, signal.SIGTERM), (late, signal.SIGTERM)]
