"""End a whole tree of processes with KILL, and remove what the killed ones leave outside the run directory.

Only what provably belongs to the run is removed: a name that DeepSpeed derives from the run's own rendezvous, or a file
or socket folder that a process of the run held when it was killed, under a name that a library makes up for itself.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import stat
import time
from collections.abc import Collection, Iterable, Iterator

from trainkit.runner.rundir.records import RankRecord
from trainkit.runner.supervisor.processes import LINUX, descendants, is_alive, send_signal

SHARED_MEMORY = "/dev/shm"  # noqa: S108  where shm_open() puts its files
# torch's, Python's, NCCL's and DeepSpeed's own buffers: never a data set that a user staged there.
OWN_NAMES = re.compile(r"torch_\d+_|psm_|wnsm_|sem\.mp-|mp-|nccl-|cuda\.shm\.|deepspeed_allreduce_buffer_")
SOCKET_FOLDER = re.compile(r"pymp-\w+")
TRACKER_SECONDS = 3.0  # multiprocessing's resource tracker cleans up when its users are gone, and then ends
STUBBORN_SECONDS = 10.0  # a process in uninterruptible sleep outlives KILL, however long one waits
PAUSE = 0.02


def kill_descendants(groups: Iterable[int] = (), spare: Collection[int] = ()) -> tuple[tuple[int, ...], set[str]]:
    """KILL everything below this process until nothing is left but zombies.

    groups: process groups that are killed where the system does not say who descends from whom.
    spare: descendants that do not belong to the run.
    Returns the processes that even KILL did not end, and what the killed ones held outside the run directory.
    """
    begin = time.monotonic()
    for group in groups if not LINUX else ():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if group > 1:
                os.killpg(group, signal.SIGKILL)
    held: set[str] = set()
    # Again and again: what is killed may have forked meanwhile.
    while left := [pid for pid in descendants(os.getpid()) if pid not in spare]:
        passed = time.monotonic() - begin
        if passed >= STUBBORN_SECONDS:
            break
        victims = [pid for pid in left if passed >= TRACKER_SECONDS or not _is_tracker(pid)]
        held |= held_by(victims)
        send_signal(victims, signal.SIGKILL)
        time.sleep(PAUSE)
    return tuple(left), held


def kill_group(group: int) -> None:
    """KILL what is left of a process group, and remove what it held outside the run directory.

    Its first process is a zombie that nobody has waited for, or the number may be that of another group by now.
    """
    held, until = set[str](), time.monotonic() + TRACKER_SECONDS
    while (left := _living_of(group)) and time.monotonic() < until:
        victims = [pid for pid in left if not _is_tracker(pid)]
        held |= held_by(victims)
        send_signal(victims, signal.SIGKILL)
        time.sleep(PAUSE)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
    remove(held)


def _living_of(group: int) -> list[int]:
    found = []
    for name in os.listdir("/proc") if LINUX else ():
        with contextlib.suppress(ValueError, ProcessLookupError):  # no process, or no more
            if os.getpgid(int(name)) == group and is_alive(int(name)):
                found.append(int(name))
    return found


def remove_leftovers(records: Iterable[RankRecord], held: Iterable[str]) -> None:
    """Remove what ranks leave in shared memory under the run's own names, and what killed processes held."""
    remove(
        {
            *held,
            *(path for each in records if each.rendezvous for path in deepspeed_buffers(each.rendezvous, [each.rank])),
        }
    )


def deepspeed_buffers(rendezvous: str, ranks: Iterable[int]) -> list[str]:
    """Paths of DeepSpeed's CPU all-reduce buffers (shm.cpp: prefix, uid, MASTER_ADDR, MASTER_PORT, rank)."""
    return [f"{SHARED_MEMORY}/deepspeed_allreduce_buffer_{os.getuid()}_{rendezvous}_{rank}" for rank in ranks]


def held_by(pids: Iterable[int]) -> set[str]:
    """Shared-memory files and socket folders that these living processes hold."""
    sockets = dict(_socket_folders())
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it ended meanwhile, and cleaned up itself or not at all
            found |= _mapped(pid)
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError, KeyError):  # closed meanwhile, or none of these sockets
                    found.add(sockets[os.readlink(f"/proc/{pid}/fd/{name}")])
    return found


def remove(paths: Iterable[str]) -> list[str]:
    """Remove those that are there, are ours, and that no process maps any more; the ones removed."""
    candidates: set[str] = set()
    for path in paths:
        with contextlib.suppress(OSError):
            if os.lstat(path).st_uid == os.getuid():
                candidates.add(path)
    for name in os.listdir("/proc") if candidates else ():
        if name.isdigit():
            with contextlib.suppress(OSError):
                candidates -= _mapped(int(name))
    for path in candidates:
        folder, name = os.path.split(path)
        with contextlib.suppress(OSError):
            parent = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                _remove_below(parent, name)
            finally:
                os.close(parent)
    return sorted(candidates)


def _remove_below(parent: int, name: str) -> None:
    """Remove a file, or a folder of files; parent: a descriptor, so that no link leads elsewhere. Raises OSError."""
    if not stat.S_ISDIR(os.lstat(name, dir_fd=parent).st_mode):
        os.unlink(name, dir_fd=parent)
        return
    folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        for each in os.listdir(folder):
            with contextlib.suppress(OSError):
                os.unlink(each, dir_fd=folder)
    finally:
        os.close(folder)
    os.rmdir(name, dir_fd=parent)


def _is_tracker(pid: int) -> bool:
    """Whether it is one, or may be: a process in the midst of exec() has no words yet."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read()
            return not words or b"multiprocessing.resource_tracker" in words
    except OSError:  # it is gone
        return False


def _mapped(pid: int) -> set[str]:
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="surrogateescape") as file:
        paths = {line.split(None, 5)[5].rstrip("\n") for line in file if SHARED_MEMORY in line}
    return {path for path in paths if OWN_NAMES.match(os.path.basename(path))}


def _socket_folders() -> Iterator[tuple[str, str]]:
    """``socket:[inode]`` and multiprocessing's temporary folder, for listeners that have one."""
    with contextlib.suppress(OSError), open("/proc/net/unix", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            fields = line.split(None, 7)
            folder = os.path.dirname(fields[7].rstrip("\n")) if len(fields) == 8 else ""
            if SOCKET_FOLDER.fullmatch(os.path.basename(folder)):
                yield f"socket:[{fields[6]}]", folder
