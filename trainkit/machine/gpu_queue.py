"""Runs that wait for GPUs, in order of arrival: a ticket for each, in the folder of the GPUs' locks.

A ticket is a file that is locked for as long as its run waits. It is worth nothing once the lock is gone, however the
process ended, so that nobody has to clean up; and while the process is stopped (Ctrl-Z), for others would wait for it
in vain. It is written before it is locked: whoever finds it locked can read it.
A GPU belongs to the first in line whose ticket names it; it is left alone by all who came later, also by runs that do
not wait. So a run that needs many GPUs does not starve behind others that need one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import posixpath
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

from trainkit.decode import Between, decode
from trainkit.errors import MachineError
from trainkit.files import parse_json, try_lock
from trainkit.machine.facts import Hold
from trainkit.machine.gpu_locks import (
    PATIENCE_SECONDS,
    SETTING,
    STEP_SECONDS,
    Signature,
    folder,
    is_only_name,
    make_folder,
    open_lock,
)

NAME = re.compile(r"ticket-([1-9]\d{0,14})", re.ASCII)
LARGEST = 1 << 16  # bytes of a ticket: thousands of GPUs
LOOK_SECONDS = 1.0  # between looks at all who are before; at the first of them each question looks


class Waiting(NamedTuple):
    """A run in line. number: of its ticket. amount: how many GPUs it waits for, among: which may be these, by UUID."""

    number: int
    pid: int
    user: str
    run: str
    amount: int
    among: frozenset[str]

    @property
    def hold(self) -> Hold:
        """Who it is."""
        return Hold(self.pid, self.user, self.run)


class _Content(NamedTuple):
    """What a ticket says: who waits, as in the lock of a GPU, and for what."""

    pid: Annotated[int, Between(0, 1 << 22)]
    user: str
    run: str
    amount: Annotated[int, Between(1, 1 << 16)]
    among: tuple[str, ...]


def line(environ: Mapping[str, str], *, tidy: bool = False) -> tuple[Waiting, ...]:
    """The runs that wait for GPUs of this machine, in order of arrival.

    tidy: remove the tickets that nobody holds any more, as far as this user may.
    """
    try:
        found = (NAME.fullmatch(name) for name in os.listdir(folder(environ)))  # noqa: PTH208 - names only
        numbers = sorted(int(each[1]) for each in found if each)
    except OSError:
        return ()
    waiting = (_read(_path(number, environ), number, tidy=tidy) for number in numbers)
    return tuple(each for each in waiting if each is not None)


def first_for(waiting: Iterable[Waiting]) -> dict[str, Hold]:
    """Whose each GPU is that runs wait for, by its UUID: the first in line. waiting: in order of arrival."""
    found: dict[str, Hold] = {}
    for each in waiting:
        for uuid in each.among:
            found.setdefault(uuid, each.hold)
    return found


class Ticket:
    """A place in line, kept until it is released or the process ends. Raises MachineError where none can be made."""

    def __init__(self, environ: Mapping[str, str], amount: int, among: Iterable[str], who: Signature) -> None:
        self._environ = environ
        content = _Content(*who, amount, tuple(sorted(among)))
        self.number, self._fd = self._make(json.dumps(content._asdict()).encode())
        self._before = [*self._still_before()]
        self._looked = time.monotonic()

    def before(self) -> list[Waiting]:
        """The runs that came earlier and still wait, in order of arrival. Nobody can join them any more."""
        now = time.monotonic()
        # A look at thousands of tickets takes a while, and all who wait are looking.
        if now - self._looked > LOOK_SECONDS + 0.02 * len(self._before):
            self._before, self._looked = [each for each in self._before if self._waits(each)], now
        while self._before and not self._waits(self._before[0]):
            del self._before[0]
        if not self._before:  # one that was just about to lock its ticket may have been missed
            self._before = [*self._still_before()]
        return self._before

    def release(self) -> None:
        """Leave the line."""
        with contextlib.suppress(OSError):
            Path(_path(self.number, self._environ)).unlink()
        os.close(self._fd)

    def _waits(self, other: Waiting) -> bool:
        return _read(_path(other.number, self._environ), other.number) is not None

    def _still_before(self) -> Iterator[Waiting]:
        return (each for each in line(self._environ) if each.number < self.number)

    def _make(self, content: bytes) -> tuple[int, int]:
        """The number and the descriptor of a new ticket, behind all that are held."""
        name = folder(self._environ)
        try:
            make_folder(name)
            number = 1 + max((each.number for each in line(self._environ, tidy=True)), default=0)
            while True:
                name = _path(number, self._environ)
                with contextlib.suppress(FileExistsError):  # somebody came at the same moment, or was killed
                    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
                    if _hold(fd, name, content):
                        return number, fd
                    os.close(fd)
                number += 1
        except OSError as error:
            raise MachineError(
                f"no place in the line for GPUs can be taken: {error.filename or name}: {error.strerror}",
                hint=f"set {SETTING} to a folder that all users of the GPUs may write to",
            ) from error


def _path(number: int, environ: Mapping[str, str]) -> str:
    return posixpath.join(folder(environ), f"ticket-{number}")


def _hold(fd: int, name: str, content: bytes) -> bool:
    """Write and lock a ticket; False where another run has removed it meanwhile as one that nobody holds."""
    os.fchmod(fd, 0o644)  # whatever the umask says: all users read it
    os.write(fd, content)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not try_lock(fd):  # somebody looks at it just now
        if time.monotonic() > deadline:
            return False
        time.sleep(STEP_SECONDS)
    return is_only_name(fd, name)


def _read(name: str, number: int, *, tidy: bool = False) -> Waiting | None:
    """Who holds a ticket; None where nobody does, its process is stopped, or it is none."""
    try:
        fd = open_lock(name, os.O_RDONLY)
    except OSError:
        return None
    try:
        # Shared, so that two who only look do not take each other for its holder.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if tidy:  # under the lock: whoever was about to take it sees that it is gone
            Path(name).unlink()
    except BlockingIOError:
        with contextlib.suppress(OSError, ValueError):
            content = decode(_Content, parse_json(os.pread(fd, LARGEST, 0)))
            if not _is_stopped(content.pid):
                return Waiting(number, content.pid, content.user, content.run, content.amount, frozenset(content.among))
    except OSError:  # a file system without locks; or the file is another user's, who removes it
        return None
    finally:
        os.close(fd)
    return None


def _is_stopped(pid: int) -> bool:
    """Whether a process is stopped; False where that is not seen (another container's, no /proc)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False
