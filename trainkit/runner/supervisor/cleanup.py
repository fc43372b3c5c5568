"""End a whole tree of processes with KILL, and remove what the killed ones leave outside the run directory.

Only what provably belongs to the run is removed: a name that DeepSpeed derives from the run's own rendezvous, or a file
or socket folder that a process of the run held when it was killed, under a name that a library makes up for itself.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterable
from typing import NamedTuple

from trainkit.runner.rundir.records import RankRecord
from trainkit.runner.supervisor.process_tree import LINUX, command_line, descendants

SHARED_MEMORY = "/dev/shm"  # noqa: S108  where shm_open() puts its files
# torch's, Python's, NCCL's and DeepSpeed's own buffers: never a data set that a user staged there.
OWN_NAMES = re.compile(r"torch_\d+_|psm_|wnsm_|sem\.mp-|mp-|nccl-|cuda\.shm\.|deepspeed_allreduce_buffer_")
SOCKET_FOLDER = re.compile(r"pymp-\w+")
TRACKER_SECONDS = 1.0  # multiprocessing's resource tracker cleans up when its users are gone, and then ends
STUBBORN_SECONDS = 10.0  # a process in uninterruptible sleep outlives KILL, however long one waits
PAUSE = 0.02


class Ended(NamedTuple):
    """What remained: processes that even KILL did not end, and what the killed ones held outside the run directory."""

    survivors: tuple[int, ...]
    held: frozenset[str]


def reap() -> dict[int, int]:
    """Collect children that have ended: pid -> exit code, minus the signal for those that a signal ended."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = os.waitstatus_to_exitcode(found[1])
    return ended


def send(pids: Iterable[int], number: int) -> None:
    """A signal to each that is still there."""
    for pid in pids:
        if pid > 1:  # kill() reads 0 and below as groups, -1 as everybody
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


def kill_descendants(groups: Iterable[int] = (), spare: frozenset[int] = frozenset()) -> Ended:
    """KILL everything below this process until nothing is left but zombies.

    groups: process groups that are killed where the system does not say who descends from whom.
    spare: descendants that do not belong to the run.
    """
    begin = time.monotonic()
    for group in groups if not LINUX else ():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if group > 1:
                os.killpg(group, signal.SIGKILL)
    held: set[str] = set()
    while left := [pid for pid in descendants(os.getpid()) if pid not in spare]:
        passed = time.monotonic() - begin
        if passed >= STUBBORN_SECONDS:
            break
        victims = [pid for pid in left if passed >= TRACKER_SECONDS or not _is_tracker(pid)]
        held |= held_by(victims)
        send(victims, signal.SIGKILL)
        time.sleep(PAUSE)
    return Ended(tuple(left), frozenset(held))


def remove_leftovers(records: Iterable[RankRecord], held: Iterable[str]) -> None:
    """Remove what ranks leave in shared memory under the run's own names, and what killed processes held."""
    remove({*held, *(path for each in records for path in deepspeed_buffers(each.rendezvous, [each.rank]))})


def deepspeed_buffers(rendezvous: str, ranks: Iterable[int]) -> list[str]:
    """Paths of DeepSpeed's CPU all-reduce buffers (shm.cpp: prefix, uid, MASTER_ADDR, MASTER_PORT, rank)."""
    return [f"{SHARED_MEMORY}/deepspeed_allreduce_buffer_{os.getuid()}_{rendezvous}_{rank}" for rank in ranks]


def held_by(pids: Iterable[int]) -> set[str]:
    """Shared-memory files and socket folders that these living processes hold."""
    sockets = _socket_folders()
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it ended meanwhile, and cleaned up itself or not at all
            found |= _mapped(pid)
            found |= {sockets[link] for link in _links(pid) if link in sockets}
    return found


def remove(paths: Iterable[str]) -> list[str]:
    """Remove those that are there, are ours, and that no process maps any more; the ones removed."""
    candidates = {path for path in paths if _is_ours(path)}
    candidates -= _mapped_by_anyone(candidates)
    for path in candidates:
        if os.path.isdir(path):
            for name in os.listdir(path):
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(path, name))
        with contextlib.suppress(OSError):
            (os.rmdir if os.path.isdir(path) else os.unlink)(path)
    return sorted(candidates)


def _is_tracker(pid: int) -> bool:
    return b"multiprocessing.resource_tracker" in command_line(pid)


def _is_ours(path: str) -> bool:
    with contextlib.suppress(OSError):
        return os.lstat(path).st_uid == os.getuid()
    return False


def _mapped(pid: int) -> set[str]:
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="surrogateescape") as file:
        paths = {line.split(None, 5)[5].rstrip("\n") for line in file if SHARED_MEMORY in line}
    return {path for path in paths if OWN_NAMES.match(os.path.basename(path))}


def _mapped_by_anyone(paths: set[str]) -> set[str]:
    used: set[str] = set()
    for name in os.listdir("/proc") if paths else ():
        if name.isdigit():
            with contextlib.suppress(OSError):
                used |= _mapped(int(name)) & paths
    return used


def _links(pid: int) -> Iterable[str]:
    folder = f"/proc/{pid}/fd"
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):
            yield os.readlink(f"{folder}/{name}")


def _socket_folders() -> dict[str, str]:
    """``socket:[inode]`` -> multiprocessing's temporary folder, for listeners that have one."""
    folders: dict[str, str] = {}
    with contextlib.suppress(OSError), open("/proc/net/unix", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            fields = line.split(None, 7)
            folder = os.path.dirname(fields[7].rstrip("\n")) if len(fields) == 8 else ""
            if SOCKET_FOLDER.fullmatch(os.path.basename(folder)):
                folders[f"socket:[{fields[6]}]"] = folder
    return folders
