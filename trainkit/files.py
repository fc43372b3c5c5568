"""Files whole or not at all, locks, and this user's cache folders. Standard library only: every rank uses it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

_SOCKET = "/pymp-12345678/listener-12345678"  # what multiprocessing makes below the temporary folder
PathLike = str | os.PathLike[str]


def publish(path: PathLike, content: str | bytes, *, flush: bool = False) -> None:
    """Write beside the target, rename over it: readers see the old file or the new one.

    flush: wait for the disk, so that a power cut leaves one of them too.
    """
    folder, name = os.path.split(os.fspath(path))
    # In a folder that others may write to, a guessable name could be planted as a link to a file of ours.
    scratch = os.path.join(folder, f".{name}.{os.urandom(8).hex()}")
    fd = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content)
            if flush:
                # Before the rename: a file system may write the new name to disk before the content (fsync(2)).
                file.flush()
                os.fsync(fd)
        os.replace(scratch, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(scratch)
        raise


def publish_or_overwrite(path: PathLike, content: str, *, flush: bool = False) -> None:
    """The same for a small file, also on a full disk: there it is rewritten in its own place, which takes no room.

    Readers may then see it torn. OSError where there is no such file yet.
    """
    try:
        publish(path, content, flush=flush)
    except OSError:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.ftruncate(fd, os.pwrite(fd, content.encode("utf-8", "surrogateescape"), 0))
        finally:
            os.close(fd)


def refuse_links(*folders: PathLike) -> None:
    """OSError where a link has taken the place of a folder that was made as one: it may lead to somebody else's."""
    for folder in folders:
        if os.path.islink(folder):
            raise OSError(errno.ELOOP, "a link is in the place of a folder of the run", os.fspath(folder))


def write_json(path: PathLike, content: object, *, indent: int | None = 2) -> None:
    """A JSON file, written atomically; NaN and infinity as Python writes them."""
    publish(path, json.dumps(content, indent=indent) + "\n", flush=True)


def read_json(path: PathLike) -> dict[str, Any]:
    """The JSON object in a file; empty where the file is missing, damaged, or holds something else."""
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def read_json_lines(path: PathLike) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file, one a line; other lines, and a file that is not there, give none."""
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError, RecursionError):
                if isinstance(found := json.loads(line), dict):
                    yield found


def try_lock(fd: int) -> bool:
    """Lock an open file exclusively if it is free. It stays locked while any process has this descriptor."""
    # Not the filelock package: it takes thirty times as long to load, and hides the descriptor that a child inherits.
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def room_for_sockets(temporary: str) -> int:
    """How many bytes a temporary folder's path may still grow before multiprocessing's sockets find no place below it.

    A socket's path has at most 107 bytes on Linux, 103 elsewhere (unix(7)); with a longer one, processes that hand
    tensors to one another wait for ever.
    """
    return (107 if sys.platform == "linux" else 103) - len(os.fsencode(temporary)) - len(_SOCKET)


def cache_folder(environ: Mapping[str, str], name: str) -> str | None:
    """This user's cache folder for one kind of thing (XDG base directories); None without a home. Not created."""
    base, home = environ.get("XDG_CACHE_HOME", ""), environ.get("HOME", "")
    if not os.path.isabs(base):  # the specification says to ignore relative paths
        base = os.path.join(home, ".cache") if home else ""
    return os.path.join(base, "trainkit", name) if base else None
