"""What killed ranks leave outside the run directory: shared memory and multiprocessing's temporary folders.

Only what provably belongs to the run is removed: a name that DeepSpeed derives from the run's own rendezvous, or a file
or socket folder that a process of the run held when it was killed, under a name that a library makes up for itself.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable

SHARED_MEMORY = "/dev/shm"  # noqa: S108  where shm_open() puts its files
# torch's, Python's, NCCL's and DeepSpeed's own buffers: never a data set that a user staged there.
OWN_NAMES = re.compile(r"torch_\d+_|psm_|wnsm_|sem\.mp-|mp-|nccl-|cuda\.shm\.|deepspeed_allreduce_buffer_")
SOCKET_FOLDER = re.compile(r"pymp-\w+")


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
    if paths:
        for name in os.listdir("/proc"):
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
            if len(fields) == 8 and SOCKET_FOLDER.fullmatch(os.path.basename(os.path.dirname(fields[7].rstrip("\n")))):
                folders[f"socket:[{fields[6]}]"] = os.path.dirname(fields[7].rstrip("\n"))
    return folders
