"""Files that are written whole or not at all, locks, and this user's cache folders. Standard library only.

Every rank uses it. The hook in a user's program loads this file by its path, for trainkit may not be importable there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

_SOCKET = "/pymp-12345678/listener-12345678"  # multiprocessing's socket below the temporary folder
PathLike = str | os.PathLike[str]
LARGEST = 1 << 25  # bytes of a file that is read whole; the plan or manifest of thousands of ranks takes a tenth
RECORD = 1 << 22  # bytes of a record or a plan: for ten thousand ranks it takes a tenth, and more is slow to parse
_LONGEST = 1 << 22  # bytes of a line
_DEEPEST = 64  # levels of lists and mappings: a recipe has 32 at most, and its plan a few more
Record = TypeVar("Record")


@contextlib.contextmanager
def _folder_of(path: PathLike, below: PathLike | None) -> Iterator[tuple[int | None, str]]:
    """The folder of a path as a descriptor, and the name in it; without `below` no descriptor and the path itself.

    below: a folder above it. OSError if it, or a folder on the way down, is a link: another user who may write there
    could replace a folder by one at any time.
    """
    if below is None:
        yield None, os.fspath(path)
        return
    way, name = os.path.split(os.path.relpath(path, below))
    fd = _open_folder(below)
    try:
        for part in filter(None, way.split(os.sep)):
            if part == os.pardir:
                raise OSError(errno.EPERM, "the path leads out of the folder of the run", os.fspath(path))
            deeper = _open_folder(part, fd)
            os.close(fd)
            fd = deeper
        yield fd, name
    except OSError as error:
        error.filename = os.fspath(path)  # not only the name in the folder
        raise
    finally:
        os.close(fd)


def _open_folder(name: PathLike, parent: int | None = None) -> int:
    """A folder as a descriptor. Raises OSError, also for a link."""
    try:
        return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    except NotADirectoryError:
        if stat.S_ISLNK(os.lstat(name, dir_fd=parent).st_mode):
            raise OSError(errno.ELOOP, "a link is in the place of a folder of the run", os.fspath(name)) from None
        raise


def open_regular(
    path: PathLike, flags: int = os.O_RDONLY, mode: int = 0o666, *, links: bool = False, below: PathLike | None = None
) -> int:
    """Open a file that another user may have put there. Raises OSError for a FIFO, a socket, or a device.

    For writing also for a file with a second name: nothing else must be changed. links: whether the path may be a link,
    as a path that the user named. below: a folder below which no folder may be a link.
    """
    writes = flags & (os.O_WRONLY | os.O_RDWR)
    with _folder_of(path, below) as (folder, name):
        # Looked at first: opening alone makes some devices act. O_NONBLOCK: a FIFO would wait for its other end.
        with contextlib.suppress(FileNotFoundError):
            _refuse_special(os.stat(name, dir_fd=folder, follow_symlinks=links), path)
        flags |= os.O_CLOEXEC | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW)
        fd = os.open(name, flags, mode, dir_fd=folder)
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
    """Whether the path exists, following links. Raises OSError if that is unknown, also for links in a circle.

    Path.exists calls those missing, and from Python 3.14 on also what it may not see.
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
        raise OSError(errno.ENXIO, "not a regular file", os.fspath(path))


def read_whole(
    path: PathLike, most: int = LARGEST, *, links: bool = False, own: bool = False, below: PathLike | None = None
) -> bytes:
    """A regular file's bytes. Raises OSError, also for more than `most` bytes, and for a link unless `links`.

    own: raise PermissionError for a file of another user (not for root), since its content decides what is done.
    below: as for :func:`open_regular`.
    """
    with os.fdopen(open_regular(path, links=links, below=below), "rb") as file:
        if own and os.geteuid() not in (0, os.fstat(file.fileno()).st_uid):
            raise PermissionError(errno.EPERM, "the file is another user's", os.fspath(path))
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), os.fspath(path))
    return content


def read_end(path: PathLike, size: int, *, below: PathLike | None = None) -> bytes:
    """The last bytes of a regular file; empty if it cannot be read. below: as for :func:`open_regular`."""
    try:
        with os.fdopen(open_regular(path, below=below), "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - size))
            return file.read()
    except OSError:
        return b""


def parse_json(content: str | bytes) -> Any:
    """Parse JSON. Raises ValueError, also for a value nested so deeply that it cannot be trainkit's.

    Recursive functions such as repr then have enough stack for what is returned.
    """
    try:
        found = json.loads(content)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    text = content if isinstance(content, str) else content.decode("latin-1")
    if text.count("[") + text.count("{") < _DEEPEST:  # counting is faster than walking through the values
        return found
    level = [found]
    for _ in range(_DEEPEST):
        inside = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        if not (level := [value for values in inside for value in values]):
            return found
    raise ValueError("nested too deeply")


def publish(
    path: PathLike, content: str | bytes, *, flush: bool = False, mode: int = 0o666, below: PathLike | None = None
) -> None:
    """Write beside the target, then rename: readers see the old file or the new one.

    flush: wait for the disk, so that this holds after a power cut, too. mode: before the umask. below: as for
    :func:`open_regular`.
    """
    with _folder_of(path, below) as (folder, target):
        way, name = os.path.split(target)
        # In a folder that others may write to, a guessable name could be planted as a link to a file of ours.
        scratch = os.path.join(way, f".{name}.{os.urandom(8).hex()}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(scratch, flags, mode, dir_fd=folder)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content)
                if flush:
                    # Before the rename: a file system may write the new name to disk before the content (fsync(2)).
                    file.flush()
                    os.fsync(fd)
            os.replace(scratch, target, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(scratch, dir_fd=folder)
            raise


def publish_or_overwrite(path: PathLike, content: str, *, flush: bool = False, below: PathLike | None = None) -> None:
    """The same for a small file; on a full disk it is overwritten in place, and readers may see it torn.

    OSError if there is no such file yet.
    """
    try:
        publish(path, content, flush=flush, below=below)
    except OSError:
        fd = open_regular(path, os.O_WRONLY, below=below)
        try:
            os.ftruncate(fd, os.pwrite(fd, content.encode("utf-8", "surrogateescape"), 0))
        finally:
            os.close(fd)


def make_folder(path: PathLike, *, below: PathLike) -> bool:
    """Make a folder; False if it exists. OSError if something else, or a link, has its name."""
    with _folder_of(path, below) as (parent, name):
        try:
            os.mkdir(name, dir_fd=parent)
        except FileExistsError:
            os.close(_open_folder(name, parent))
            return False
    return True


def names_in(path: PathLike, *, below: PathLike) -> list[str]:
    """The sorted names in a folder. Raises OSError, also for a link in its place or on the way."""
    with _folder_of(os.path.join(path, "any"), below) as (folder, _):
        return sorted(os.listdir(folder))


def remove_file(path: PathLike, *, below: PathLike) -> None:
    """Remove a file, unless it is gone. Raises OSError."""
    with contextlib.suppress(FileNotFoundError), _folder_of(path, below) as (folder, name):
        os.unlink(name, dir_fd=folder)


def refuse_links(*folders: PathLike) -> None:
    """Raise OSError if a link has replaced one of these folders: it may lead to another user's files."""
    for folder in folders:
        if os.path.islink(folder):
            raise OSError(errno.ELOOP, "a link is in the place of a folder of the run", os.fspath(folder))


def remove_tree(path: PathLike, *, below: PathLike | None = None) -> None:
    """Remove a folder with its contents; a file or link in its place is removed itself. Raises OSError.

    shutil.rmtree opens its argument first: a FIFO would block it, and a link leads elsewhere.
    below: as for :func:`open_regular`.
    """
    import shutil

    with _folder_of(path, below) as (folder, name):
        if stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode):
            shutil.rmtree(name, dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)


def write_json(path: PathLike, content: object, *, indent: int | None = 2, below: PathLike | None = None) -> None:
    """Publish a JSON file; NaN and infinity as Python writes them."""
    publish(path, json.dumps(content, indent=indent) + "\n", flush=True, below=below)


def read_json(
    path: PathLike, most: int = RECORD, *, own: bool = False, below: PathLike | None = None
) -> dict[str, Any]:
    """The JSON object in a file; empty if it is missing, damaged, larger than `most` bytes, or not an object.

    own, below: as for :func:`read_whole`.
    """
    try:
        content = parse_json(read_whole(path, most, own=own, below=below))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def load_record(path: PathLike, kind: type[Record], *, own: bool = False, below: PathLike | None = None) -> Record:
    """A JSON file as a named tuple (trainkit/decode.py). Raises OSError, and ValueError if it is damaged.

    own, below: as for :func:`read_whole`.
    """
    from trainkit.decode import decode

    found: Record = decode(kind, parse_json(read_whole(path, RECORD, own=own, below=below)))
    return found


def read_record(path: PathLike, kind: type[Record], *, below: PathLike | None = None) -> Record | None:
    """The same; None if the file is missing or damaged."""
    try:
        return load_record(path, kind, below=below)
    except (OSError, ValueError):
        return None


def read_json_lines(path: PathLike) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file, one a line; other lines are ignored, and a missing file has none."""
    with contextlib.suppress(OSError), os.fdopen(open_regular(path), "rb") as file:
        while line := file.readline(_LONGEST):
            if len(line) == _LONGEST:  # trainkit writes no such line, and it may have gigabytes
                return
            with contextlib.suppress(ValueError):
                if isinstance(found := parse_json(line), dict):
                    yield found


def try_lock(fd: int) -> bool:
    """Lock an open file exclusively if it is free. It stays locked while any process has the descriptor."""
    # Not the filelock package: it takes thirty times as long to load, and hides the descriptor that a child inherits.
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def hold_lock(path: PathLike) -> int:
    """Make a file and wait for its lock, kept while any process has the returned descriptor. Raises OSError."""
    fd = open_regular(path, os.O_RDWR | os.O_CREAT)
    # Not lockf, whose locks belong to a process: a child inherits this one with the descriptor (flock(2)).
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


def is_locked(path: PathLike) -> bool | None:
    """Whether a process of this machine holds a file's lock; None if unknown, False if there is no such file.

    Read permission is enough: the file may be another user's, or on a read-only disk.
    """
    try:
        fd = open_regular(path)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        # Shared, so that two processes that only look do not take each other for a holder.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return None
    finally:
        os.close(fd)
    return False


def room_for_sockets(temporary: str) -> int:
    """How many bytes longer a temporary folder's path may be before multiprocessing's sockets no longer fit below it.

    A socket's path has at most 107 bytes on Linux, 103 elsewhere (unix(7)); with a longer one, processes that pass
    tensors to each other hang.
    """
    return (107 if sys.platform == "linux" else 103) - len(os.fsencode(temporary)) - len(_SOCKET)


def cache_folder(environ: Mapping[str, str], name: str) -> str | None:
    """This user's cache folder for one kind of thing (XDG base directories); None without a home. Not created."""
    base, home = environ.get("XDG_CACHE_HOME", ""), environ.get("HOME", "")
    if not os.path.isabs(base):  # the specification says to ignore relative paths
        base = os.path.join(home, ".cache") if home else ""
    return os.path.join(base, "trainkit", name) if base else None
