"""Whole files appear at once or not at all."""

from __future__ import annotations

import os


def write_atomically(path: str | os.PathLike[str], content: str | bytes, *, mode: int = 0o666) -> None:
    """Write beside the target, flush to disk, rename over it. Readers see the old file or the new one."""
    _publish(path, content, mode, flush=True)


def publish(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Like :func:`write_atomically`, but without waiting for the disk: for what matters while the machine is up."""
    _publish(path, content, 0o666, flush=False)


def overwrite(path: str | os.PathLike[str], content: str) -> None:
    """Rewrite a file in its own place, which takes no room: the last resort on a full disk. Readers may see it torn."""
    data = content.encode("utf-8", "surrogateescape")
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.ftruncate(fd, os.pwrite(fd, data, 0))
    finally:
        os.close(fd)


def _publish(path: str | os.PathLike[str], content: str | bytes, mode: int, *, flush: bool) -> None:
    target = os.fspath(path)
    folder, name = os.path.split(target)
    temporary = os.path.join(folder, f".{name}.{os.getpid()}")
    data = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            if flush:
                file.flush()
                os.fsync(fd)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
