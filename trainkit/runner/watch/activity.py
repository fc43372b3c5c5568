"""Whether a rank makes progress: its processes' state and use of the machine, and the collectives that it joins.

A process that waits for a GPU keeps a processor busy: a program that hangs there seems to evaluate, but its flight
recorder shows the collective. A program without an optimizer makes no steps: it moves while it joins collectives.
Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from trainkit.files import read_record, remove_file
from trainkit.heartbeat import FlightRecord
from trainkit.runner.rundir.records import run_of
from trainkit.runner.supervisor.processes import stat_fields

# Letters of proc(5) that explain why a process does not make progress.
STATES: Mapping[str, str] = {"T": "stopped", "t": "stopped by a debugger", "D": "waiting for a disk or a device"}
TICKS = os.sysconf("SC_CLK_TCK")
STOPPED = ("T", "t", "D")  # states in which a process cannot continue by itself
BUSY = 0.02  # share of a core: below it a process is idle, apart from threads that wake up now and then
FLOW = 1 << 18  # bytes a second from or to a disk: slow saving of a checkpoint takes no processor time
EVERY_SECONDS = 2.0  # at least, between two requests
FEW = 5  # collectives that a program may join during its start-up
STEADY = 20  # polls, a second apart, that saw new collectives: then this is how the program works


class State(NamedTuple):
    """The state of a process.

    letter: as in proc(5), empty if it is gone or without /proc; waits_in: a kernel function.
    """

    letter: str = ""
    waits_in: str = ""

    @property
    def in_words(self) -> str:
        """``state T stopped``; empty for a common state."""
        return f"state {self.letter} {STATES[self.letter]}" if self.letter in STATES else ""


def state_of(pid: int) -> State:
    fields = stat_fields(pid)
    if not fields:
        return State()
    waits_in = ""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/wchan", encoding="ascii", errors="replace") as file:
        waits_in = file.read().strip()
    return State(fields[0].decode(), "" if waits_in == "0" else waits_in)


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    with (
        contextlib.suppress(OSError, ValueError),
        open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file,
    ):
        caught = next((line.split()[1] for line in file if line.startswith("SigCgt:")), "0")
        return bool(int(caught, 16) >> (number - 1) & 1)
    return False


def processor_seconds(pids: Iterable[int]) -> float:
    """Processor time of these processes so far, including their children that have ended."""
    total = 0
    for pid in pids:
        if fields := stat_fields(pid):
            total += sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime
    return total / TICKS


def disk_bytes(pids: Iterable[int]) -> int:
    """Bytes that these processes have read from and written to disks so far, if the system reports it."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/io", encoding="ascii") as file:
            total += sum(int(line.split()[1]) for line in file if line.startswith(("read_bytes", "write_bytes")))
    return total


class Activity:
    """When a rank last used the processor (more than waking up), used a disk, or wrote output."""

    def __init__(self, now: float, logs: Iterable[str]) -> None:
        self.moved = now
        self._logs = (*logs,)
        self._looked, self._used, self._flowed, self._written = now, 0.0, 0, -1

    def look(self, pids: Iterable[int], now: float, since: float = 0.0) -> None:
        """Measure again. pids: of the rank's program and its descendants.

        since: its latest step; earlier use belongs to that.
        """
        pids, passed, written = [*pids], now - self._looked, 0
        used, flowed = processor_seconds(pids), disk_bytes(pids)
        for path in self._logs:
            with contextlib.suppress(OSError):
                written += os.stat(path).st_size
        # abs: the total falls when a process ends that its parent does not wait for.
        busy = abs(used - self._used) > BUSY * passed or abs(flowed - self._flowed) > FLOW * passed
        if (busy or written != self._written) and self._looked >= since:
            self.moved = now
        self._looked, self._used, self._flowed, self._written = now, used, flowed, written


def request_flight_record(place: str, path: str) -> bool:
    """Ask a program to write its flight recorder's content to a path; whether it could be asked.

    place: path of its pipe. An empty path requests the number of collectives that it has joined
    (`HeartbeatState.joined`).
    """
    if not place or "\n" in path:
        return False
    with contextlib.suppress(OSError):
        orders = os.open(place, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            is_pipe = stat.S_ISFIFO(os.fstat(orders).st_mode)  # the wrapper's number may have been reused
            return is_pipe and os.write(orders, os.fsencode(f"{path}\n")) > 0
        finally:
            os.close(orders)
    return False


class FlightRecordPoll:
    """Asks one rank for its flight record repeatedly while it makes no step. path: of the answer, in the attempt."""

    def __init__(self, path: str) -> None:
        self._path, self._run = path, run_of(os.path.dirname(path))
        self._asked = self._waits = 0.0

    def waits(self, place: str, since: float, every: float, now: float) -> float:
        """Seconds that it has waited in one collective, by its latest answer; 0 without an answer.

        place: path of its pipe for requests. since: its last step; earlier answers do not count. every: seconds.
        """
        if self._asked < since:
            self._waits = 0.0
        elif (found := read_record(self._path, FlightRecord, below=self._run)) and found.groups:
            self.remove()
            waiting = (each.seconds for group in found.groups.values() for each in group.waiting)
            self._waits = max(waiting, default=0.0)
        if now - self._asked > max(every, EVERY_SECONDS):
            self._asked = now
            self.remove()
            request_flight_record(place, self._path)
        return self._waits

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            remove_file(self._path, below=self._run)


class JoinedCollectives:
    """The number of collectives that a rank has joined. moved: when it was last seen to grow."""

    def __init__(self) -> None:
        self.moved = 0.0
        self._number = self._looks = 0
        self._longest = 0.0  # between two changes

    def see(self, number: int, now: float) -> None:
        if number != self._number:
            if self._number:
                self._longest = max(self._longest, now - self.moved)
            self._number, self.moved = number, now
            self._looks += 1

    @property
    def is_steady(self) -> bool:
        return self._looks >= STEADY

    def pause(self, after: float | None) -> float:
        """The longest time between two of them; 0 if they may belong to the start-up. after: as in `Limits`."""
        known = self.is_steady or (after is not None and self._number > FEW)
        return max(self._longest, EVERY_SECONDS) if known else 0.0
