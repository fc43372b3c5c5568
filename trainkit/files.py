"""Files whole or not at all, locks, and this user's cache folders. Standard library only: every rank uses it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from typing import Any

_SOCKET = "/pymp-12345678/listener-12345678"  # what multiprocessing makes below the temporary folder
PathLike = str | os.PathLike[str]
LARGEST = 1 << 25  # bytes of a file that is read whole; the plan or manifest of thousands of ranks takes a tenth
_LONGEST = 1 << 22  # bytes of a line


def open_regular(path: PathLike, flags: int = os.O_RDONLY, mode: int = 0o666, *, links: bool = False) -> int:
    """Open a file that somebody else may have put there. Raises OSError for what is none: a FIFO, a socket, a device.

    links: whether the path may be a link, as one may be that a person named. For writing also for a file with a second
    name: what is written must reach no other file.
    """
    writes = flags & (os.O_WRONLY | os.O_RDWR)
    # Looked at first: opening alone makes some devices act. O_NONBLOCK: a FIFO would wait for its other end.
    with contextlib.suppress(FileNotFoundError):
        _refuse_special(os.stat(path, follow_symlinks=links), path)
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW), mode)
    try:
        found = os.fstat(fd)
        _refuse_special(found, path)
        if writes and found.st_nlink > 1:
            raise OSError(errno.EPERM, "the file has a second name", os.fspath(path))
    except OSError:
        os.close(fd)
        raise
    return fd


def is_there(path: PathLike) -> bool:
    """Whether there is something at the path, or at the end of its links. Raises OSError where that cannot be told.

    That of links in a circle, too. Path.exists calls those missing, and from Python 3.14 on also what it may not see.
    """
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _refuse_special(found: os.stat_result, path: PathLike) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EPERM, "not a regular file", os.fspath(path))


def read_whole(path: PathLike, most: int = LARGEST, *, links: bool = False) -> bytes:
    """A regular file's bytes. Raises OSError, also for one of more than `most` bytes, and for a link but with links."""
    with os.fdopen(open_regular(path, links=links), "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), os.fspath(path))
    return content


def parse_json(content: str | bytes) -> Any:
    """What JSON says. Raises ValueError, also for what is nested too deeply to be anything of trainkit's."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def publish(path: PathLike, content: str | bytes, *, flush: bool = False, mode: int = 0o666) -> None:
    """Write beside the target, rename over it: readers see the old file or the new one.

    flush: wait for the disk, so that a power cut leaves one of them too. mode: of which the umask takes away.
    """
    folder, name = os.path.split(os.fspath(path))
    # In a folder that others may write to, a guessable name could be planted as a link to a file of ours.
    scratch = os.path.join(folder, f".{name}.{os.urandom(8).hex()}")
    fd = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
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
        fd = open_regular(path, os.O_WRONLY)
        try:
            os.ftruncate(fd, os.pwrite(fd, content.encode("utf-8", "surrogateescape"), 0))
        finally:
            os.close(fd)


def refuse_links(*folders: PathLike) -> None:
    """OSError where a link has taken the place of a folder that was made as one: it may lead to somebody else's."""
    for folder in folders:
        if os.path.islink(folder):
            raise OSError(errno.ELOOP, "a link is in the place of a folder of the run", os.fspath(folder))


def remove_tree(path: PathLike) -> None:
    """Remove a folder with all that is in it; anything else in its place goes itself. Raises OSError.

    shutil.rmtree opens what it is given before it looks: a FIFO would hold it for ever, and a link leads elsewhere.
    """
    import shutil

    if stat.S_ISDIR(os.lstat(path).st_mode):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def write_json(path: PathLike, content: object, *, indent: int | None = 2) -> None:
    """A JSON file, written atomically; NaN and infinity as Python writes them."""
    publish(path, json.dumps(content, indent=indent) + "\n", flush=True)


def read_json(path: PathLike) -> dict[str, Any]:
    """The JSON object in a file; empty where the file is missing, damaged, or holds something else."""
    try:
        content = parse_json(read_whole(path))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def read_json_lines(path: PathLike) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file, one a line; other lines, and a file that is not there, give none."""
    with contextlib.suppress(OSError), os.fdopen(open_regular(path), "rb") as file:
        while line := file.readline(_LONGEST):
            if len(line) == _LONGEST:  # none of trainkit's, and there may be gigabytes behind it
                return
            with contextlib.suppress(ValueError):
                if isinstance(found := parse_json(line), dict):
                    yield found


def try_lock(fd: int) -> bool:
    """Lock an open file exclusively if it is free. It stays locked while any process has this descriptor."""
    # Not the filelock package: it takes thirty times as long to load, and hides the descriptor that a child inherits.
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def hold_lock(path: PathLike) -> int:
    """Make a file and wait until it is locked; it stays so while any process has the returned descriptor.

    Raises OSError.
    """
    fd = open_regular(path, os.O_RDWR | os.O_CREAT)
    # Not lockf, whose locks belong to a process: a child inherits this one with the descriptor (flock(2)).
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


def is_locked(path: PathLike) -> bool:
    """Whether a process of this machine holds a file's lock; False where there is no such file."""
    try:
        fd = open_regular(path, os.O_RDWR)
    except OSError:
        return False
    try:
        return not try_lock(fd)
    finally:
        os.close(fd)


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
