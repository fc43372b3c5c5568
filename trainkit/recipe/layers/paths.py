"""How the pure core reads files: a protocol, and a dictionary that satisfies it."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from typing import Protocol


class Files(Protocol):
    """What resolving needs of a file system. Paths are absolute, or relative to the process's working folder."""

    def read(self, path: str) -> bytes:
        """The file's bytes. Raises OSError (FileNotFoundError, IsADirectoryError, PermissionError)."""
        ...

    def exists(self, path: str) -> bool:
        """Whether there is a file at the path."""
        ...

    def shipped(self) -> Mapping[str, str]:
        """Path of each shipped preset and recipe by name (``strategy/fsdp``, ``recipes/quickstart``)."""
        ...


def absolute(path: str, base: str) -> str:
    """The path from a folder, without `.` and `..`; an absolute one as it is."""
    return posixpath.normpath(posixpath.join(base, path))


def seen_from(cwd: str, path: str) -> str:
    """How an absolute path is shown: from the working folder where it lies below it, else as it is."""
    start = cwd.rstrip("/") + "/"
    return path[len(start) :] if path.startswith(start) else path


class MemoryFiles:
    """Files held in a dictionary: absolute path to content."""

    def __init__(self, contents: Mapping[str, str | bytes], shipped: Mapping[str, str] | None = None) -> None:
        self._contents = {posixpath.normpath(path): content for path, content in contents.items()}
        self._shipped = dict(shipped or {})

    def read(self, path: str) -> bytes:
        """The content; FileNotFoundError where there is none."""
        content = self._contents.get(posixpath.normpath(path))
        if content is None:
            raise FileNotFoundError(path)
        return content.encode() if isinstance(content, str) else content

    def exists(self, path: str) -> bool:
        """Whether the dictionary has the path."""
        return posixpath.normpath(path) in self._contents

    def shipped(self) -> Mapping[str, str]:
        """The names given at construction."""
        return self._shipped
