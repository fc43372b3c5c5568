"""Processes and signals: started just so, tied to their parent, found below an ancestor; signals received and sent."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

LINUX = sys.platform == "linux"
STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# For the ranks only (a checkpoint request): a launcher that does not know them would die of them.
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def spawn(
    argv: Sequence[str],
    environment: Mapping[str, str],
    streams: Sequence[int],
    *,
    group: int | None = None,
    new_session: bool = False,
    dies_with_parent: bool = False,
    ignore: Collection[int] = (),
    inherit: Sequence[int] = (),
    open_files: int = 0,
) -> int:
    """The pid of the started program. Raises the OSError that exec met in the child (not found, not executable).

    streams: descriptors that become 0, 1 and 2. group: the process group to join, 0 for its own. inherit: more
    descriptors to keep. ignore: signals that stay ignored; all others start with their default action. open_files: the
    soft limit of these, 0 for the one of this process.
    """
    # Not subprocess.Popen: its import costs half the start-up of a rank's wrapper.
    parent = os.getpid()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if new_session:
                os.setsid()
            elif group is not None:
                os.setpgid(0, group)
            _set_up(streams, ignore, inherit, parent if dies_with_parent else None, open_files)
            os.execvpe(argv[0], list(argv), dict(environment))
        except OSError as error:
            os.write(writer, str(error.errno).encode())
        finally:
            os._exit(127)
    os.close(writer)
    with os.fdopen(reader, "rb") as report:
        if not (failure := report.read()):  # exec closed the pipe
            return pid
    os.waitpid(pid, 0)
    raise OSError(int(failure), os.strerror(int(failure)), argv[0])


def _set_up(
    streams: Sequence[int], ignore: Collection[int], inherit: Sequence[int], parent: int | None, files: int
) -> None:
    """Descriptors and signals of the child, and its tie to the parent, before exec. files: that may be open, or 0."""
    if parent is not None:
        die_with_parent()
        if os.getppid() != parent:  # it ended before the request was in place
            os._exit(128 + signal.SIGKILL)
    # Copies above 2 first: a source may itself be 0, 1 or 2.
    for target, copy in enumerate([os.dup(fd) for fd in streams]):
        os.dup2(copy, target)
    for fd in inherit:
        os.set_inheritable(fd, True)
    if files:
        _limit_open_files(files)
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        with contextlib.suppress(OSError, ValueError):  # KILL and STOP take no action but their own
            signal.signal(number, signal.SIG_IGN if number in ignore else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _limit_open_files(soft: int) -> None:
    import resource  # no other process needs it

    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def become_subreaper() -> None:
    """Orphaned descendants become children of this process, not of init, where the system has such a thing."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Have this process killed when its parent (the thread that forked) ends. Survives exec (prctl(2))."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if LINUX:
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def open_pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None where it is gone or the system has no pidfds."""
    with contextlib.suppress(AttributeError, OSError):
        return os.pidfd_open(pid)
    return None


def send_signal(pids: Collection[int], number: int) -> None:
    """A signal to each that is still there."""
    for pid in pids:
        if pid > 1:  # kill() reads 0 and below as groups, -1 as every process
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


def descendants(ancestor: int) -> list[int]:
    """Every living process below this one, parents before children, without zombies. Empty where there is no /proc."""
    children: dict[int, list[tuple[int, str]]] = {}
    # All of /proc is read: the `children` files are documented to be unreliable while processes come and go.
    for name in os.listdir("/proc") if LINUX else ():
        if name.isdigit() and (found := _parent_and_state(int(name))) is not None:
            children.setdefault(found[0], []).append((int(name), found[1]))
    order: list[int] = []
    queue = [ancestor]
    while queue:
        for pid, state in children.get(queue.pop(0), []):
            queue.append(pid)
            if state not in "ZX":
                order.append(pid)
    return order


def descends_from(ancestor: int) -> bool:
    """Whether this process is below another one, as far as the system says."""
    pid = os.getppid()
    while pid > 1 and pid != ancestor:
        pid = (_parent_and_state(pid) or (0, ""))[0] if LINUX else 0
    return pid == ancestor > 1


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    if LINUX:
        found = _parent_and_state(pid)
        return found is not None and found[1] not in "ZX"
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)  # another user's
    return True


def is_stopped(pid: int) -> bool:
    """Whether STOP, or a debugger, holds the process up."""
    return LINUX and (_parent_and_state(pid) or (0, ""))[1] in ("T", "t")


def _parent_and_state(pid: int) -> tuple[int, str] | None:
    """Parent pid and state letter of a process, as proc(5) describes its stat file; None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # the name before may hold spaces and parentheses
    except OSError:
        return None
    return int(fields[1]), fields[0].decode()


def memory_kills(counters: str = "/proc/vmstat") -> int:
    """Processes of this machine that the kernel has ended because memory ran out, also that of a cgroup alone."""
    try:
        with open(counters, encoding="ascii") as file:  # oom_kill, since Linux 4.13
            return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), 0)
    except OSError:
        return 0


def exit_of_child(pid: int) -> int | None:
    """Exit code of a child that has ended (minus the signal that killed it), None while it runs."""
    # The zombie stays where the system allows (not on macOS before Python 3.13): until it is reaped, its pid and its
    # group's id are not given to another process.
    if hasattr(os, "waitid"):
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    reaped, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if reaped else None


def signal_name(number: int) -> str:
    """``SIGTERM`` rather than 15."""
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no name
        return f"signal {number}"


_TOLD: list[str] = []  # why this process ends itself, for who hears of the signal


def end_self(why: str) -> None:
    """Have this process end in order, by TERM, for another reason than that somebody has sent it one."""
    _TOLD.append(why)
    os.kill(os.getpid(), signal.SIGTERM)


def why_told(number: int) -> str:
    """Why trainkit ends, of a signal that it has received."""
    return _TOLD[0] if _TOLD else f"trainkit received {signal_name(number)}"


def wakeup(numbers: Iterable[int]) -> int:
    """A descriptor that brings the number of each of these signals: they wake a loop, and interrupt no code."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, lambda *_: None)  # a handler must only exist
    return reader


@contextlib.contextmanager
def handled(numbers: Iterable[int], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle signals for a while. A HUP that nohup made ignored stays ignored."""
    taken = [each for each in numbers if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN]
    before: dict[int, Any] = {number: signal.signal(number, handler) for number in taken}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
