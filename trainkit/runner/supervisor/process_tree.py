"""What Linux offers a supervisor of processes: subreaper, parent-death signal, pidfds, descendants."""

from __future__ import annotations

import os
import sys

LINUX = sys.platform == "linux"
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> bool:
    if not LINUX:
        return False
    import ctypes

    return bool(ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) == 0)


def become_subreaper() -> bool:
    """Orphaned descendants become children of this process, not of init. False where the system has no such thing."""
    return _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(signal_number: int) -> bool:
    """Ask for a signal when the parent (the thread that forked) ends. Survives exec."""
    return _prctl(PR_SET_PDEATHSIG, signal_number)


def open_pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None where it is gone or the system has no pidfds."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def parent_and_state(pid: int) -> tuple[int, str] | None:
    """Parent pid and state letter of a process, from /proc; None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return int(fields[1]), fields[0].decode()


def command_line(pid: int) -> bytes:
    """argv of a process, NUL-separated; empty when it is gone."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


def descendants(ancestor: int) -> list[int]:
    """Every living process below this one, parents before children, without zombies. Empty where there is no /proc.

    All of /proc is read: the `children` files are documented to be unreliable while processes come and go.
    """
    if not LINUX:
        return []
    children: dict[int, list[tuple[int, str]]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (found := parent_and_state(int(name))) is not None:
            children.setdefault(found[0], []).append((int(name), found[1]))
    order: list[int] = []
    queue = [ancestor]
    while queue:
        for pid, state in children.get(queue.pop(0), []):
            queue.append(pid)
            if state not in "ZX":
                order.append(pid)
    return order


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    if LINUX:
        found = parent_and_state(pid)
        return found is not None and found[1] not in "ZX"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def exit_of_child(pid: int) -> int | None:
    """Exit code of a child that has ended (minus the signal that killed it), None while it runs.

    The zombie stays where the system allows (not on macOS before Python 3.13): until it is reaped, its pid and its
    group's id are not given to another process.
    """
    if hasattr(os, "waitid"):
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    reaped, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if reaped else None
