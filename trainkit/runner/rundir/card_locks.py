"""Take the cards of a run, all or none, so that no two runs of this machine use one card without knowing it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import time
from collections.abc import Mapping, Sequence

from trainkit.errors import MachineError
from trainkit.machine.held_cards import folder, holder, open_lock, path
from trainkit.runner.locks import try_lock

# A reader of the lock (`trainkit gpus`, another run's probe) has it for an instant; a run has it for good.
PATIENCE_SECONDS = 0.3
STEP_SECONDS = 0.01


class Cards:
    """The cards of one run. They stay taken while any process has these descriptors open."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.fds: list[int] = []
        self._paths: list[str] = []
        self._environ = environ

    def take(self, uuids: Sequence[str], *, shared: bool = False) -> str | None:
        """Take all of them; else none, and the UUID of one that another run holds.

        shared: cards of others are left out instead. Raises MachineError where locks cannot be made.
        """
        for uuid in sorted(set(uuids)):  # in one order, so that of two runs after the same cards one gets them
            if self._lock(path(uuid, self._environ)):
                continue
            if not shared:
                self.release()
                return uuid
        return None

    def sign(self, user: str, run: str) -> None:
        """Say who holds the cards, for those who look. run: the run's directory, empty while there is none."""
        content = json.dumps({"pid": os.getpid(), "user": user, "run": run}).encode()
        with contextlib.suppress(OSError):  # a full disk: the cards are taken, only not signed
            for fd in self.fds:
                os.ftruncate(fd, os.pwrite(fd, content, 0))

    def release(self) -> None:
        """Let the cards go, and leave no file behind."""
        for fd, name in zip(self.fds, self._paths, strict=True):
            with contextlib.suppress(OSError):  # a folder whose files only their owners may remove
                os.unlink(name)
            os.close(fd)
        self.fds.clear()
        self._paths.clear()

    def _lock(self, name: str) -> bool:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            fd = self._open(name)
            if (locked := try_lock(fd)) and _is_only_name(fd, name):
                self.fds.append(fd)
                self._paths.append(name)
                return True
            os.close(fd)
            if locked:  # its holder removed it just now: open the next one
                continue
            if time.monotonic() > deadline:
                return False
            time.sleep(STEP_SECONDS)

    def _open(self, name: str) -> int:
        """The file of whichever user made it, or a new one that all users may lock."""
        try:
            _make_folder(folder(self._environ))
            for _ in range(100):
                with contextlib.suppress(FileNotFoundError):
                    return open_lock(name, os.O_RDWR)
                with contextlib.suppress(FileExistsError):
                    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                    os.fchmod(fd, 0o666)  # whatever the umask says
                    return fd
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN), name)
        except OSError as error:
            raise MachineError(
                f"the lock of a card cannot be made: {error.filename or name}: {error.strerror}",
                hint="set TRAINKIT_CARD_LOCKS to a folder that all users of the cards may write to",
            ) from error


def taken_by(uuid: str, environ: Mapping[str, str]) -> str:
    """Who holds a card, for a message."""
    held = holder(uuid, environ)
    return f"the run {held.run or 'that pid ' + str(held.pid) + ' starts'} ({held.user})" if held else "another run"


def _is_only_name(fd: int, name: str) -> bool:
    """Whether the open file is at that path and nowhere else: what is written into it then reaches no other's file."""
    try:
        found = os.stat(name, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(fd), found) and found.st_nlink == 1


def _make_folder(name: str) -> None:
    """For all users: each may add files, only their owners may remove them."""
    try:
        os.mkdir(name)
    except FileExistsError:
        return
    except FileNotFoundError:
        os.makedirs(name, exist_ok=True)
    os.chmod(name, 0o777 | stat.S_ISVTX)  # noqa: S103 - shared, as /tmp is
