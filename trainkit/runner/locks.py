"""Locks between processes of one machine that die with their holder. Standard library only: the guardian uses them.

Not the filelock package: it takes thirty times as long to load, and hides the descriptor that a child inherits.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping

from trainkit.files import cache_folder


def try_lock(fd: int) -> bool:
    """Lock an open file exclusively if it is free. It stays locked while any process has this descriptor."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


@contextlib.contextmanager
def lock_file(path: str) -> Iterator[int]:
    """The descriptor of a file to be locked with :func:`try_lock`, open for a while."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        yield fd
    finally:
        os.close(fd)


def lock_folder(environ: Mapping[str, str], run_dir: str) -> str:
    """The folder of this user's locks: the cache folder, or the run directory where there is no writable home."""
    home = environ.get("HOME") or os.path.expanduser("~")  # a container may have a user but no HOME
    folder = cache_folder({**environ, "HOME": home}, "locks") or run_dir
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError:
        return run_dir
    return folder if os.access(folder, os.W_OK) else run_dir
