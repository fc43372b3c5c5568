"""A dump of this node's ranks: stacks, the flight recorders of torch, states. Standard library only.

Nothing here blocks: the guardian begins a dump, polls it in each of its turns, and takes the answers so far.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from trainkit.files import make_folder, open_regular, publish, read_record, remove_file
from trainkit.heartbeat import ASK, PAGE, FlightRecord, HeartbeatState, read_heartbeat
from trainkit.runner.rundir.records import RankRecord, run_of
from trainkit.runner.supervisor.processes import descendants
from trainkit.runner.watch.activity import State, catches, request_flight_record, state_of
from trainkit.runner.watch.hang_cause import DumpedRank, innermost_own_frame

PATIENCE = 5.0  # seconds for all ranks to answer
SETTLE = 0.3  # seconds after which a stack that has not grown is complete
MOST = 1 << 20  # bytes of a stack

Spawn = Callable[[Sequence[str], Sequence[int]], int]  # argv, standard streams -> pid


class RankView:
    """The record and the page of one rank; the page stays readable when the wrapper has ended."""

    def __init__(self, record: RankRecord, *, alive: bool) -> None:
        """alive: whether its wrapper is proved to run; only then is one of its files opened."""
        self.record = record
        self._fd: int | None = None
        if alive and (path := record.opened(record.heartbeat)):
            with contextlib.suppress(OSError):
                self._fd = open_regular(path, links=True)

    def bytes(self) -> bytes:
        """The whole page; empty if there is none."""
        with contextlib.suppress(OSError):
            return os.pread(self._fd, PAGE, 0) if self._fd is not None else b""
        return b""

    def read(self) -> HeartbeatState | None:
        """The program's heartbeat; None if it has not attached."""
        return read_heartbeat(self.bytes())

    def text(self, start: int) -> str:
        """The text that follows the page, from an offset on."""
        with contextlib.suppress(OSError):
            return os.pread(self._fd, MOST, start).decode("utf-8", "replace") if self._fd is not None else ""
        return ""

    def size(self) -> int:
        """Bytes of the page and the text after it."""
        return os.fstat(self._fd).st_size if self._fd is not None else 0

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class _Asked(NamedTuple):
    view: RankView
    page: HeartbeatState | None
    pid: int
    state: State
    start: int  # offset of its stack, after the page
    flight: str  # path of its flight record; empty if it was not asked
    spy: int  # pid of py-spy


class Dump:
    """One dump of all ranks of this node, from the request to the result."""

    def __init__(self, folder: str, views: Iterable[RankView], spawn: Spawn) -> None:
        """views: of ranks whose wrappers are proved to run. Raises OSError if the folder cannot be made."""
        self._run = run_of(os.path.dirname(folder))
        make_folder(folder, below=self._run)
        self._folder, self._spawn = folder, spawn
        self._began = self._grown = time.monotonic()
        self._asked = [self._ask(view) for view in views]
        self._sizes: list[int] = []

    def _ask(self, view: RankView) -> _Asked:
        record, page = view.record, view.read()
        # The number may have been reused: a signal is sent only to a process of this rank.
        below = descendants(record.wrapper_pid)
        attached = page is not None and page.pid in below
        pid = page.pid if page is not None and attached else record.pid if record.pid in below else 0
        state, start, flight, spy = state_of(pid), view.size(), "", 0
        answers = state.letter not in {"T", "t", "Z", "X", ""}
        if answers and attached:
            if ASK is not None and catches(pid, ASK):  # without a handler the signal would end the program
                with contextlib.suppress(OSError):
                    os.kill(pid, ASK)
            flight = self._path(record.rank, "flight.json")
            with contextlib.suppress(OSError):
                remove_file(flight, below=self._run)
            flight = flight if request_flight_record(record.opened(record.orders), flight) else ""
        elif answers and (tool := _tool("py-spy")):
            spy = self._spy(tool, pid, record.rank)
        return _Asked(view, page if attached else None, pid, state, start, flight, spy)

    def _spy(self, tool: str, pid: int, rank: int) -> int:
        nothing = os.open(os.devnull, os.O_RDWR)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        out = open_regular(self._path(rank, "py-spy"), flags, below=self._run)
        try:
            return self._spawn((tool, "dump", "--pid", str(pid)), (nothing, out, nothing))
        except OSError:  # py-spy cannot be started: only the state is known
            return 0
        finally:
            os.close(nothing)
            os.close(out)

    def turn(self, ended: Collection[int]) -> bool:
        """Whether the dump is complete. ended: children of the guardian that have ended."""
        now, sizes = time.monotonic(), [each.view.size() for each in self._asked]
        if sizes != self._sizes:
            self._sizes, self._grown = sizes, now
        # A rank without the thread for requests answers with its stack only.
        whole = all(
            (not each.flight or os.path.lexists(each.flight) or now - self._began > PATIENCE / 2)
            and (not each.spy or each.spy in ended)
            for each in self._asked
        )
        return (whole and now - self._grown > SETTLE) or now - self._began > PATIENCE

    def found(self, moved: Callable[[int], float]) -> list[DumpedRank]:
        """The result; also writes a file for each rank. moved: seconds since a rank has moved."""
        return [self._found(each, moved(each.view.record.rank)) for each in self._asked]

    def _found(self, asked: _Asked, seconds: float) -> DumpedRank:
        record, page, flight = asked.view.record, asked.page, None
        stack = asked.view.text(asked.start) if page is not None else ""
        if asked.spy:
            path = self._path(record.rank, "py-spy")
            with contextlib.suppress(OSError), os.fdopen(open_regular(path, below=self._run), "rb") as file:
                stack = file.read(MOST).decode("utf-8", "replace")
        if asked.flight:
            flight = read_record(asked.flight, FlightRecord, below=self._run)
        late = state_of(asked.pid)  # every process waits for a disk at times: only a lasting D counts
        letter = "" if asked.state.letter == "D" and late.letter != "D" else asked.state.letter
        found = DumpedRank(
            record.rank,
            record.host,
            asked.pid,
            round(max(0.0, seconds), 1),
            page.phase if page is not None else None,
            page.step if page is not None else 0,
            letter,
            asked.state.waits_in,
            flight.groups if flight is not None else {},
            innermost_own_frame(stack),
        )
        state = State(letter).in_words or f"state {letter or 'unknown'}"
        head = f"{found.name}: {state}, in the kernel in {asked.state.waits_in or 'nothing'}\n"
        reason = "a stopped process cannot answer" if letter in {"T", "t"} else "no answer"
        why = "" if stack else f"no stack: {reason}\n"
        with contextlib.suppress(OSError):  # a full disk
            publish(self._path(record.rank, "stack"), f"{head}{why}\n{stack}", below=self._run)
            if asked.spy:
                remove_file(self._path(record.rank, "py-spy"), below=self._run)
        return found

    def _path(self, rank: int, kind: str) -> str:
        return os.path.join(self._folder, f"rank-{rank}.{kind}")


def _tool(name: str) -> str:
    """The path of a program on PATH, or empty. shutil takes too long to load."""
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    paths = (os.path.join(folder, name) for folder in folders if os.path.isabs(folder))
    return next((path for path in paths if os.access(path, os.X_OK) and os.path.isfile(path)), "")


def awake(pids: Iterable[int]) -> None:
    """Continue stopped processes: a stopped process does not receive TERM."""
    for pid in pids:
        if pid > 1 and state_of(pid).letter == "T":
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGCONT)
