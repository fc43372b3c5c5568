"""The user's terminal: the program's output unchanged, trainkit's own lines, and a live line."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from trainkit.colour import Colour
from trainkit.files import open_regular
from trainkit.text import strip_control

Stream = Literal["out", "err"]
CHUNK = 4096  # bytes that a pipe takes without blocking once select() reports it writable
ERASE, ERASE_ABOVE = b"\r\x1b[2K", b"\x1b[A\x1b[2K"


def lead_output(log: Path, below: Path) -> None:
    """Lead standard output and error to the end of a file of a run directory. Raises OSError."""
    fd = open_regular(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, below=below)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(fd, stream.fileno())
    os.close(fd)


class Terminal:
    """Standard output and error, each a terminal, a pipe or a file. The live line is drawn only at column 0."""

    def __init__(self, environ: Mapping[str, str], out: int = 1, err: int = 2) -> None:
        self.prefix = ""  # of trainkit's own lines: names the node
        self._fds: dict[Stream, int] = {"out": out, "err": err}
        self._environ = environ
        self.look()
        self._at_start = True  # the terminal's current line is empty, apart from the live line
        self._drawn = ""
        self._broken: set[Stream] = set()
        self._patient_until = float("inf")

    def look(self) -> None:
        """See what the descriptors are: at the beginning, and after they were led elsewhere."""
        self._is_terminal: dict[Stream, bool] = {stream: os.isatty(fd) for stream, fd in self._fds.items()}
        self._can_redraw = self._is_terminal["err"] and self._environ.get("TERM", "dumb") not in ("dumb", "")
        self._colour = Colour(self._fds["err"], self._environ)

    def program(self, stream: Stream, data: bytes) -> None:
        """Output of the main rank, unchanged."""
        if data:
            self._put(stream, data)

    def say(self, text: str) -> None:
        """A line of trainkit's own on standard error, never inside a line of the program."""
        newline = "" if self._at_start or not self._is_terminal["err"] else "\n"
        shown = self._colour.labels(strip_control(text))
        self._put("err", f"{newline}{self.prefix}{shown}\n".encode("utf-8", "replace"))

    def live(self, line: Callable[[int], str]) -> bool:
        """Draw the live line, made for a width in columns, if the program has finished its own line.

        In a narrow terminal it may have several rows. Returns False if there is no terminal: print plain lines instead.
        """
        if not self._can_redraw:
            return False
        text = line(self._width())
        if self._at_start and text != self._drawn:
            self._write("err", self._erasing() + text.replace("\n", "\r\n").encode("ascii", "replace"))
            self._drawn = text
        return True

    @property
    def height(self) -> int:
        """Of the terminal, in rows."""
        return self._size().lines or 24

    def _width(self) -> int:
        """Of the terminal, in columns."""
        return self._size().columns or 80

    def _size(self) -> os.terminal_size:
        """Of the terminal itself: what the variables COLUMNS and LINES say may be of another."""
        try:
            return os.get_terminal_size(self._fds["err"])
        except OSError:
            return os.terminal_size((0, 0))

    def _erasing(self) -> bytes:
        """What erases the live line. A terminal that was made narrower meanwhile has broken its rows."""
        width = self._width()
        rows = sum(max(1, -(-len(row) // width)) for row in self._drawn.split("\n"))
        return ERASE + ERASE_ABOVE * (rows - 1)

    def abandon(self, seconds: float) -> None:
        """From now on, drop output that a stalled reader has not taken after so many seconds.

        Called from a signal handler.
        """
        self._patient_until = time.monotonic() + seconds

    def _put(self, stream: Stream, data: bytes) -> None:
        if self._is_terminal[stream]:
            if self._drawn:
                self._write("err", self._erasing())
                self._drawn = ""
            self._at_start = data.endswith(b"\n")
        self._write(stream, data)

    def _write(self, stream: Stream, data: bytes) -> None:
        view = memoryview(data)
        while view and stream not in self._broken:
            while not select.select([], [self._fds[stream]], [], 0.1)[1]:
                if time.monotonic() > self._patient_until:
                    self._broken.add(stream)
                    return
            try:
                view = view[os.write(self._fds[stream], view[:CHUNK]) :]
            except BlockingIOError:
                continue
            except OSError:  # the reader has gone (`| head`): the run continues, its logs are complete
                self._broken.add(stream)
