"""Copy a program's output to its log and, for the main rank, to the console. A broken console stops neither."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import stat
import sys

CHUNK = 1 << 18
KEPT = 2500  # bytes of the end of the output that could not be logged
# The largest pipe that Linux grants without privileges (/proc/sys/fs/pipe-max-size, pipe(7)):
PIPE_CAPACITY = 1 << 20  # a program that prints much should not wait until its wrapper is scheduled


class Copier:
    """Copies one of a program's two streams."""

    def __init__(self, source: int, log: int, console: int | None) -> None:
        self.source = source
        self.lost = 0  # bytes that could not be logged …
        self.lost_end = b""  # … the last of them …
        self.refusal = ""  # … and why
        self._log = log
        self._console = console

    def copy(self) -> bool:
        """Copy the output so far. False at the end of the stream."""
        try:
            data = os.read(self.source, CHUNK)
        except BlockingIOError:
            return True
        except OSError as error:
            if error.errno != errno.EIO:  # a pseudo-terminal's end of file
                raise
            return False
        if data:
            self.write(data)
        return bool(data)

    def write(self, data: bytes) -> None:
        """Write to log and console, as if the program had written it."""
        try:
            write_all(self._log, data)
        except OSError as error:  # a full disk must not end a training run; the loss is reported at the end
            self.lost += len(data)
            self.lost_end = (self.lost_end + data)[-KEPT:]
            self.refusal = error.strerror or ""
        if self._console is not None:
            try:
                write_all(self._console, data)
            except OSError:  # the reader is gone: the log continues
                self._console = None


def write_all(fd: int, data: bytes) -> None:
    """Write every byte, also to a non-blocking descriptor."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            select.select([], [fd], [])


def open_channel(console: int | None) -> tuple[int, int]:
    """(read end, end for the program): a pseudo-terminal if the console is a terminal, else a pipe."""
    if console is not None and os.isatty(console):
        import termios

        master, slave = os.openpty()
        attributes = termios.tcgetattr(slave)
        attributes[1] &= ~termios.OPOST  # the real terminal turns \n into \r\n; this one must not
        termios.tcsetattr(slave, termios.TCSANOW, attributes)
        copy_window_size(console, master)
        return master, slave
    reader, writer = os.pipe()
    with contextlib.suppress(ImportError, AttributeError, OSError):
        import fcntl

        fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, PIPE_CAPACITY)
    return reader, writer


def copy_window_size(source: int, target: int) -> None:
    """Give one terminal the rows and columns of another."""
    import fcntl
    import termios

    with contextlib.suppress(OSError):
        fcntl.ioctl(target, termios.TIOCSWINSZ, fcntl.ioctl(source, termios.TIOCGWINSZ, b"\0" * 8))


def holds_input(fd: int) -> bool:
    """Whether there is input: a file that is not empty, or bytes in a pipe."""
    import fcntl
    import termios

    try:
        place = os.fstat(fd)
        if stat.S_ISREG(place.st_mode):
            return place.st_size > os.lseek(fd, 0, os.SEEK_CUR)
        if not stat.S_ISFIFO(place.st_mode):
            return False
        waiting = fcntl.ioctl(fd, termios.FIONREAD, bytes(4))
    except OSError:  # closed, or without an answer
        return False
    return int.from_bytes(waiting, sys.byteorder) > 0
