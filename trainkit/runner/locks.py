"""Locks between processes of one machine that die with their holder. Standard library only: the guardian uses them.

Not the filelock package: it takes thirty times as long to load, and hides the descriptor that a child inherits.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Mapping

from trainkit.files import cache_folder


def try_lock(fd: int) -> bool:
    """Lock an open file exclusively if it is free. It stays locked while any process has this descriptor."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


class Lock:
    """A file to be locked; the lock is held while any process has its descriptor."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.fd = -1

    def __enter__(self) -> Lock:
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)

    def acquire(self) -> bool:
        """Take the lock if it is free."""
        return try_lock(self.fd)


def lock_folder(environ: Mapping[str, str], run_dir: str) -> str:
    """Where this user's locks lie: the cache folder, or the run directory where there is no writable home."""
    home = environ.get("HOME") or os.path.expanduser("~")  # a container may have a user but no HOME
    folder = cache_folder({**environ, "HOME": home}, "locks") or run_dir
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError:
        return run_dir
    return folder if os.access(folder, os.W_OK) else run_dir
