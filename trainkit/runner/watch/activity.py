"""What /proc says of a rank's processes: their state, where in the kernel they wait, what they use of the machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from trainkit.runner.supervisor.processes import LINUX

# Letters of proc(5) that explain why a process does not go on.
STATES: Mapping[str, str] = {"T": "stopped", "t": "stopped by a debugger", "D": "waiting for a disk or a device"}
TICKS = os.sysconf("SC_CLK_TCK")
BUSY = 0.02  # of a core: what uses less is idle but for threads that wake up now and then
FLOW = 1 << 18  # bytes a second from or to a disk: who saves a checkpoint slowly needs no processor for it


class State(NamedTuple):
    """letter: as of proc(5), empty where it is gone or there is no /proc; waits_in: the kernel's function."""

    letter: str = ""
    waits_in: str = ""

    @property
    def in_words(self) -> str:
        """``state T stopped``; empty where it is a common one."""
        return f"state {self.letter} {STATES[self.letter]}" if self.letter in STATES else ""


def state_of(pid: int) -> State:
    """The state of a process now."""
    fields = _stat(pid)
    if not fields:
        return State()
    waits_in = ""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/wchan", encoding="ascii", errors="replace") as file:
        waits_in = file.read().strip()
    return State(fields[0].decode(), "" if waits_in == "0" else waits_in)


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal: by default one ends it."""
    with (
        contextlib.suppress(OSError, ValueError),
        open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file,
    ):
        caught = next((line.split()[1] for line in file if line.startswith("SigCgt:")), "0")
        return bool(int(caught, 16) >> (number - 1) & 1)
    return False


def processor_seconds(pids: Iterable[int]) -> float:
    """That these processes have used so far, with those of theirs that have ended."""
    total = 0
    for pid in pids:
        if fields := _stat(pid):
            total += sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime
    return total / TICKS


def disk_bytes(pids: Iterable[int]) -> int:
    """That these processes have read from disks and written to them so far, as far as this may be known."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/io", encoding="ascii") as file:
            total += sum(int(line.split()[1]) for line in file if line.startswith(("read_bytes", "write_bytes")))
    return total


def _stat(pid: int) -> list[bytes]:
    """The fields of a process's stat file from its state on; none where it is gone."""
    if LINUX:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    return []


class Activity:
    """When a rank last used the processor for more than waking up, or a disk, or wrote output."""

    def __init__(self, now: float, logs: Iterable[str]) -> None:
        self.moved = now
        self._logs = (*logs,)
        self._looked, self._used, self._flowed, self._written = now, 0.0, 0, -1

    def look(self, pids: Iterable[int], now: float, since: float = 0.0) -> None:
        """Look again. pids: of the rank's program and of all that it has started.

        since: of its latest step, which explains what was used before.
        """
        pids, passed = [*pids], now - self._looked
        used, flowed, written = processor_seconds(pids), disk_bytes(pids), sum(map(_size, self._logs))
        # What has ended takes its part along: of the time, where its parent did not wait for it.
        busy = abs(used - self._used) > BUSY * passed or abs(flowed - self._flowed) > FLOW * passed
        if (busy or written != self._written) and self._looked >= since:
            self.moved = now
        self._looked, self._used, self._flowed, self._written = now, used, flowed, written


def _size(path: str) -> int:
    with contextlib.suppress(OSError):
        return os.stat(path).st_size
    return 0
