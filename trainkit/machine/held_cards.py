"""Which cards runs hold: a folder with a file for each card that a run has taken, locked as long as the run lasts.

The holder locks the file and writes into it who it is; whoever can lock the file knows that the card is free. A
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
from collections.abc import Mapping
from dataclasses import replace

from trainkit.machine.facts import Gpu, Hold

FOLDERS = ("/run/lock", "/var/tmp", "/tmp")  # noqa: S108 - the first that every user may write to; shared on purpose
SETTING = "TRAINKIT_CARD_LOCKS"


def with_holders(gpus: tuple[Gpu, ...], environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The cards and their MIG instances, each with who holds it."""
    return tuple(
        replace(
            gpu,
            held_by=holder(gpu.uuid, environ),
            instances=tuple(replace(part, held_by=holder(part.uuid, environ)) for part in gpu.instances),
        )
        for gpu in gpus
    )


def folder(environ: Mapping[str, str]) -> str:
    """The folder of card locks: one for all users of a machine. Containers that share cards may be given one too."""
    if chosen := environ.get(SETTING):
        return chosen
    base = next((path for path in FOLDERS if os.access(path, os.W_OK | os.X_OK)), FOLDERS[-1])
    return posixpath.join(base, "trainkit-cards")


def path(uuid: str, environ: Mapping[str, str]) -> str:
    """The lock file of a card."""
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
    """Who holds a card; None for a free one."""
    try:
        fd = open_lock(path(uuid, environ), os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            written = json.loads(os.pread(fd, 1 << 16, 0))
            return Hold(int(written["pid"]), str(written["user"]), str(written["run"]))
        return Hold(0, "", "")  # it is just about to write
    except OSError:  # a file system without locks: no card can be held there
        return None
    finally:
        os.close(fd)
    return None


def user_name(uid: int) -> str:
    """The name of a user, or its number where it has no name here (in a container)."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
