"""What the system refuses, in words: errors that are neither a bug nor a wrong recipe. Standard library only."""

from __future__ import annotations

import errno
import re
import resource
from collections.abc import Iterable

_ROOM = "make room, or write to another place"
_DISK = "the disk or its server fails: see dmesg, and write to another place"
_FILES = "raise the number of open files (ulimit -n)"
_PROCESSES = "raise the number of processes (ulimit -u, or pids.max of the cgroup), or lower data.workers"
MEMORY = (
    "memory ran out: lower batch.micro or data.workers, or raise the limit (ulimit -v, or memory.max of the cgroup)"
)
# Errors of the machine, wherever they happen -> what to do.
HINTS: dict[int, str] = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EFBIG: "raise the size of files (ulimit -f), or write to another place",
    errno.EROFS: "write to another place",
    errno.EIO: _DISK,
    errno.ESTALE: _DISK,
    errno.ETIMEDOUT: _DISK,
    errno.EMFILE: _FILES,
    errno.ENFILE: _FILES,
    errno.EAGAIN: _PROCESSES,
    errno.ENOMEM: MEMORY,
}
# What libraries make of the same -> what it is, what to do.
_SAID: dict[str, tuple[str, str]] = {
    r"can't start new thread|Thread creation failed": (
        "no more threads may be started",
        f"{_PROCESSES}; or the memory (ulimit -v)",
    ),
    r"Too many open files": ("too many open files", _FILES),
    r"(?:unable to|could not) (?:write to|open|mmap|allocate|resize).*(?:shared memory|</?torch_)|out of shared memory|"
    r"Bus error": ("shared memory (/dev/shm) is full, or cannot be used", "enlarge /dev/shm, or set data.workers to 0"),
    r"failed to map segment|can't allocate memory|Cannot allocate memory|bad_alloc": (
        "memory cannot be allocated",
        MEMORY,
    ),
    r"Connection (?:closed|reset) by peer|Broken pipe|Socket closed|Application timeout caused pair closure|"
    r"Timed out waiting \d+ms": ("another rank ended, or can no longer be reached", "see the other ranks' logs"),
    r"No space left on device": ("no space left on device", _ROOM),
}


def refusal(error: BaseException) -> tuple[str, str] | None:
    """What the system refused, with the path where it is known, and a hint; None for any other error."""
    if isinstance(error, MemoryError):
        return "memory cannot be allocated", MEMORY
    # What Python says where it can allocate nothing, not even its own error.
    if isinstance(error, SystemError) and resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return f"memory cannot be allocated ({error})", MEMORY
    if isinstance(error, OSError) and error.errno in HINTS:
        path = f": {error.filename}" if error.filename else ""
        return f"the system refuses: {error.strerror}{path}", HINTS[error.errno]
    if isinstance(error, OSError | RuntimeError | ImportError):
        words = " ".join(str(error).split())
        for pattern, (what, hint) in _SAID.items():
            if re.search(pattern, words):
                return f"{what} ({words[:200]})", hint
    return None


def refusal_in(lines: Iterable[str]) -> tuple[str, str] | None:
    """The first refusal of the system that a log shows, as of :func:`refusal`."""
    return next(filter(None, (refusal(RuntimeError(line.strip())) for line in lines)), None)
