"""End a whole tree of processes: KILL, repeated until none is left."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from typing import NamedTuple

from trainkit.runner.supervisor.cleanup import held_by
from trainkit.runner.supervisor.process_tree import LINUX, command_line, descendants

TRACKER_SECONDS = 1.0  # multiprocessing's resource tracker cleans up when its users are gone, and then ends
STUBBORN_SECONDS = 10.0  # a process in uninterruptible sleep outlives KILL; waiting longer helps nobody
PAUSE = 0.02


class Ended(NamedTuple):
    """What remained: processes that even KILL did not end, and what the killed ones held outside the run directory."""

    survivors: tuple[int, ...]
    held: frozenset[str]


def reap() -> dict[int, int]:
    """Collect children that have ended: pid -> exit code, minus the signal for those that a signal ended."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = os.waitstatus_to_exitcode(status)
    return ended


def send(pids: Iterable[int], number: int) -> None:
    """A signal to each that is still there."""
    for pid in pids:
        if pid <= 1:  # kill() reads 0 and below as groups, -1 as everybody
            continue
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill_descendants(groups: Iterable[int] = (), spare: frozenset[int] = frozenset()) -> Ended:
    """KILL everything below this process until nothing is left but zombies.

    groups: process groups that are killed where the system does not tell who descends from whom.
    spare: descendants that are none of the run's.
    """
    begin = time.monotonic()
    if not LINUX:
        _kill_groups(groups)
    held: set[str] = set()
    while (left := [pid for pid in descendants(os.getpid()) if pid not in spare]) and _patient(begin, STUBBORN_SECONDS):
        victims = [pid for pid in left if not (_patient(begin, TRACKER_SECONDS) and _is_tracker(pid))]
        held |= held_by(victims)
        send(victims, signal.SIGKILL)
        time.sleep(PAUSE)
    return Ended(tuple(left), frozenset(held))


def _patient(begin: float, seconds: float) -> bool:
    return time.monotonic() - begin < seconds


def _kill_groups(groups: Iterable[int]) -> None:
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if group > 1:
                os.killpg(group, signal.SIGKILL)


def _is_tracker(pid: int) -> bool:
    return b"multiprocessing.resource_tracker" in command_line(pid)
