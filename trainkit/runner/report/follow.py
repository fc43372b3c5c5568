"""What the user sees of a running run: the main rank's logs and the run's metrics, followed as they grow."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from trainkit.runner.report.console import Stream, Terminal
from trainkit.runner.report.progress_line import Progress, live_line, plain_line
from trainkit.runner.rundir.layout import RunLayout

CHUNK = 1 << 18
PLAIN_SECONDS = 1.0  # between two lines of progress where there is no live line …
PLAIN_SHARE = 0.02  # … and at least this share of the time so far, so that a long run's log stays short
AT_ONCE = 64  # chunks of output before anything else gets its turn
TAIL_BYTES = 1 << 16


class Tail:
    """What is appended to one file, from its beginning; the file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: Any = None
        self._rest = b""

    def read(self) -> bytes:
        """The next bytes, at most 256 KiB; empty when there is nothing new."""
        if self._file is None:
            try:
                self._file = self._path.open("rb", buffering=0)
            except FileNotFoundError:
                return b""
        data: bytes = self._file.read(CHUNK)
        return data

    def records(self) -> Iterator[dict[str, Any]]:
        """Objects of a JSON-lines file that are complete by now. A torn last line waits, a broken one is skipped."""
        while data := self.read():
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                with contextlib.suppress(ValueError):  # a torn line that a restarted writer has appended to
                    record = json.loads(line)
                    if isinstance(record, dict):
                        yield record

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()


class Relay:
    """Shows the main rank's output (its pseudo-terminal's, where it has one) and how far the run is."""

    def __init__(self, layout: RunLayout, attempt: int, console: Terminal) -> None:
        self.progress = Progress()
        self.shown_rank: int | None = None
        self._console = console
        self._logs = layout.attempt(attempt)
        self._tails: dict[Stream, Tail] = {}
        self._metrics = Tail(layout.metrics)
        self._begin = self._said = time.monotonic()
        self._unsaid = ""

    def follow_logs(self, rank: int, streams: tuple[Stream, ...]) -> None:
        """Show the logs of this rank from their beginning."""
        self.shown_rank = rank
        self._tails = {stream: Tail(self._logs.log(rank, stream)) for stream in streams}

    def pass_on(self, fd: int) -> int | None:
        """Show what the pseudo-terminal brings; the number of bytes, None when its other side is closed."""
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return 0
        except OSError:  # EIO: the other side is closed
            return None
        self.shown_rank = 0
        self._console.program("out", data)
        return len(data) or None

    def turn(self, most: int | None = AT_ONCE) -> None:
        """Show what is new. most: chunks of output, None for all."""
        for stream, tail in self._tails.items():
            for data in islice(iter(tail.read, b""), most):
                self._console.program(stream, data)
        for record in self._metrics.records():
            self.progress = self.progress.take(record, time.monotonic())
            line = plain_line(self.progress, record)
            if line:
                self._unsaid = line
                if not self._draw():
                    self._say_plain(due="evaluation" in line)
        if self.progress.latest is not None:
            self._draw()

    def finish(self) -> None:
        """Show the rest."""
        self.turn(None)
        if self.progress.latest is None or not self._draw():
            self._say_plain(due=True)
        elif self._unsaid:
            self._console.say(self._unsaid)  # the live line is erased by what follows; its last state stays
        for tail in (*self._tails.values(), self._metrics):
            tail.close()

    def _draw(self) -> bool:
        now = time.monotonic()
        return self._console.live(lambda width: live_line(self.progress, now, width))

    def _say_plain(self, *, due: bool) -> None:
        now = time.monotonic()
        due = due or now - self._said >= max(PLAIN_SECONDS, PLAIN_SHARE * (now - self._begin))
        if due and self._unsaid:
            self._console.say(self._unsaid)
            self._said, self._unsaid = now, ""


def last_lines(path: Path, count: int | None = None) -> list[str]:
    """The end of a text file, at most 64 KiB of it and so many lines; empty when it is not there."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").rstrip().splitlines()
    except OSError:
        return []
    return lines if count is None else lines[-count:]
