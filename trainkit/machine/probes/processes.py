"""Who a process is: its owner and its command, as /proc tells."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

from trainkit.machine.facts import GpuProcess

LONGEST = 200  # characters of a command that a person still reads


def described(pid: int, *, memory: int | None, graphics: bool) -> GpuProcess:
    """The process with what can be found out; a driver gives pids of the host, which a container may not see."""
    return GpuProcess(pid, owner(pid), command(pid), None if memory is None else int(memory), graphics)


def owner(pid: int) -> str:
    """The user's name, or its number where it has no name here; empty where there is no such process."""
    try:
        uid = os.stat(f"/proc/{pid}").st_uid  # noqa: PTH116 - one system call
    except OSError:
        return ""
    return user_name(uid)


def user_name(uid: int) -> str:
    """The name of a user, or its number where it has no name here."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def command(pid: int) -> str:
    """The command line, secret values masked, cut to what a person reads."""
    from trainkit.recipe.layers.secrets import mask_words

    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
        name = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return ""
    text = " ".join(mask_words(words)) if words else name
    return "".join(letter if letter.isprintable() else "?" for letter in text[:LONGEST])  # a terminal would obey it
