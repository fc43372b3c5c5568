"""GPUs that runs have taken: a folder with a file for each of them, locked as long as the run lasts.

The holder locks the file and writes into it who it is; whoever can lock the file knows that the GPU is free. A
holder removes its file before it lets go, so that nothing is left behind; one that is killed leaves an unlocked file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import posixpath
import pwd
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NamedTuple

from trainkit.decode import Between, decode
from trainkit.errors import MachineError
from trainkit.files import parse_json, try_lock
from trainkit.machine.facts import Gpu, Hold, MigInstance

FOLDERS = ("/run/lock", "/var/tmp", "/tmp")  # noqa: S108 - the first that every user may write to; shared on purpose
SETTING = "TRAINKIT_CARD_LOCKS"
# A reader of the lock (`trainkit env gpus`, another run's probe) has it for an instant; a run has it for good.
PATIENCE_SECONDS = 0.3
STEP_SECONDS = 0.01


class Signature(NamedTuple):
    """What a holder writes into the lock of a GPU."""

    pid: Annotated[int, Between(0, 1 << 22)]
    user: str
    run: str


def with_holders(gpus: tuple[Gpu, ...], environ: Mapping[str, str], wanted: Mapping[str, Hold]) -> tuple[Gpu, ...]:
    """The GPUs and their MIG instances, each with who holds it. wanted: who waits for it, by its UUID."""

    def parts(gpu: Gpu) -> tuple[MigInstance, ...]:
        return tuple(
            replace(each, held_by=holder(each.uuid, environ), wanted_by=wanted.get(each.uuid)) for each in gpu.instances
        )

    return tuple(
        replace(gpu, held_by=holder(gpu.uuid, environ), wanted_by=wanted.get(gpu.uuid), instances=parts(gpu))
        for gpu in gpus
    )


def folder(environ: Mapping[str, str]) -> str:
    """The folder of GPU locks: one for all users of a machine. Containers that share GPUs may be given one too."""
    if chosen := environ.get(SETTING):
        return chosen
    base = next((path for path in FOLDERS if os.access(path, os.W_OK | os.X_OK)), FOLDERS[-1])
    return posixpath.join(base, "trainkit-cards")


def path(uuid: str, environ: Mapping[str, str]) -> str:
    """The lock file of a GPU."""
    safe = "".join(letter if letter.isalnum() or letter in "-." else "_" for letter in uuid)
    return posixpath.join(folder(environ), safe)


def open_lock(name: str, flags: int) -> int:
    """Open a lock file. Raises OSError for what is none: a link, a FIFO, a device; for writing, a second name too.

    Anybody may put something into the folder, and no other file may be reached through it. The owner is not checked:
    runs of all users take each other's unlocked files.
    """
    # O_NONBLOCK: opening a FIFO would wait for its other end.
    fd = os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    found = os.fstat(fd)
    if stat.S_ISREG(found.st_mode) and (flags == os.O_RDONLY or found.st_nlink <= 1):  # 0: it has just been removed
        return fd
    os.close(fd)
    raise OSError(errno.EPERM, "not a regular file with a single name", name)


def holder(uuid: str, environ: Mapping[str, str]) -> Hold | None:
    """Who holds a GPU; None for a free one."""
    try:
        fd = open_lock(path(uuid, environ), os.O_RDONLY)
    except OSError:
        return None
    try:
        # Shared, so that two who only look do not take each other for a holder.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        with contextlib.suppress(OSError, ValueError):
            return Hold(*decode(Signature, parse_json(os.pread(fd, 1 << 16, 0))))
        return Hold(0, "", "")  # it is just about to write
    except OSError:  # a file system without locks: no GPU can be held there
        return None
    finally:
        os.close(fd)
    return None


class GpuLocks:
    """The GPUs of one run. They stay taken while any process has these descriptors open."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.fds: list[int] = []
        self._paths: list[str] = []
        self._environ = environ

    def take(self, uuids: Sequence[str], *, shared: bool = False) -> str | None:
        """Take all of them; else none, and the UUID of one that another run holds.

        shared: GPUs of others are left out instead. Raises MachineError where locks cannot be made.
        """
        for uuid in sorted(set(uuids)):  # in one order, so that of two runs after the same GPUs one gets them
            if self._lock(path(uuid, self._environ)):
                continue
            if not shared:
                self.release()
                return uuid
        return None

    def sign(self, user: str, run: str) -> None:
        """Say who holds the GPUs, for those who look. run: the run's directory, empty while there is none."""
        content = json.dumps(Signature(os.getpid(), user, run)._asdict()).encode()
        with contextlib.suppress(OSError):  # a full disk: the GPUs are taken, only not signed
            for fd in self.fds:
                os.ftruncate(fd, os.pwrite(fd, content, 0))

    def release(self) -> None:
        """Let the GPUs go, and leave no file behind."""
        for fd, name in zip(self.fds, self._paths, strict=True):
            with contextlib.suppress(OSError):  # a folder whose files only their owners may remove
                Path(name).unlink()
            os.close(fd)
        self.fds.clear()
        self._paths.clear()

    def _lock(self, name: str) -> bool:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            fd = self._open(name)
            if (locked := try_lock(fd)) and is_only_name(fd, name):
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
            make_folder(folder(self._environ))
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
                f"the lock of a GPU cannot be made: {error.filename or name}: {error.strerror}",
                hint="set TRAINKIT_CARD_LOCKS to a folder that all users of the GPUs may write to",
            ) from error


def taken_by(uuid: str, environ: Mapping[str, str]) -> str:
    """Who holds a GPU, for a message."""
    held = holder(uuid, environ)
    return f"the run {held.run or 'that pid ' + str(held.pid) + ' starts'} ({held.user})" if held else "another run"


def user_name(uid: int) -> str:
    """The name of a user, or its number where it has no name here (in a container)."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def is_only_name(fd: int, name: str) -> bool:
    """Whether the open file is at that path and nowhere else: what is written into it then reaches no other's file."""
    try:
        found = Path(name).stat(follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(fd), found) and found.st_nlink == 1


def make_folder(name: str) -> None:
    """For all users: each may add files, only their owners may remove them."""
    try:
        Path(name).mkdir(parents=True)
    except FileExistsError:
        return
    Path(name).chmod(0o777 | stat.S_ISVTX)  # shared, as /tmp is
