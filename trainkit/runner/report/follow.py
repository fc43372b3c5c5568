"""Follow files that grow: logs as bytes, line files as whole lines."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHUNK = 1 << 18


class Tail:
    """What is appended to one file, from its beginning; the file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: Any = None

    def read(self) -> bytes:
        """The next bytes, at most 256 KiB; empty when there is nothing new."""
        if self._file is None:
            try:
                self._file = self._path.open("rb", buffering=0)
            except FileNotFoundError:
                return b""
        data: bytes = self._file.read(CHUNK)
        return data

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()


class Records:
    """Objects of a JSON-lines file as they are appended. A torn last line waits, a broken one is skipped."""

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)
        self._rest = b""

    def read(self) -> Iterator[dict[str, Any]]:
        """Those that are complete by now."""
        while data := self._tail.read():
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                with contextlib.suppress(ValueError):  # a torn line that a restarted writer has appended to
                    record = json.loads(line)
                    if isinstance(record, dict):
                        yield record

    def close(self) -> None:
        """Let go of the file."""
        self._tail.close()


def last_lines(path: Path, count: int) -> list[str]:
    """The end of a text file, at most 64 KiB of it; empty when it is not there."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - (1 << 16)))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return text.rstrip().splitlines()[-count:] if text.strip() else []
