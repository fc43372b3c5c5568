"""Processes and signals: start a program, find its descendants, prove which process a pid means, end a process tree."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import FrameType
from typing import Annotated, Any, NamedTuple

from trainkit.decode import Between, Like

LINUX = sys.platform == "linux"
STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# For the ranks only (a checkpoint request): a launcher without a handler would be killed by them.
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
TRACKER_SECONDS = 3.0  # multiprocessing's resource tracker cleans up once its users are gone, and then ends
STUBBORN_SECONDS = 10.0  # a process in uninterruptible sleep survives KILL for as long as it sleeps
PAUSE = 0.02


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
    """Start a program; its pid. Raises the OSError of exec in the child (not found, not executable).

    streams: descriptors that become 0, 1 and 2. group: the process group to join, 0 for a new one. inherit: more
    descriptors to keep. ignore: signals that stay ignored; all others get their default action. open_files: the soft
    limit of open files, 0 for this process's own.
    """
    # Not subprocess.Popen: its import takes half of a wrapper's start-up time.
    parent = os.getpid()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if new_session:
                os.setsid()
            elif group is not None:
                os.setpgid(0, group)
            if dies_with_parent:
                die_with_parent()
                if os.getppid() != parent:  # the parent ended before the request took effect
                    os._exit(128 + signal.SIGKILL)
            # Duplicate above 2 first: a source may itself be 0, 1 or 2.
            for target, copy in enumerate([os.dup(fd) for fd in streams]):
                os.dup2(copy, target)
            for fd in inherit:
                os.set_inheritable(fd, True)
            if open_files:
                import resource  # needed by no other process

                resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
            signal.set_wakeup_fd(-1)
            for number in signal.valid_signals():
                with contextlib.suppress(OSError, ValueError):  # the actions of KILL and STOP cannot be changed
                    signal.signal(number, signal.SIG_IGN if number in ignore else signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            os.execvpe(argv[0], list(argv), dict(environment))
        except OSError as error:
            os.write(writer, str(error.errno).encode())
        finally:
            os._exit(127)
    os.close(writer)
    with os.fdopen(reader, "rb") as report:
        if not (failure := report.read()):  # exec closed the pipe: the program runs
            return pid
    os.waitpid(pid, 0)
    raise OSError(int(failure), os.strerror(int(failure)), argv[0])


def become_subreaper() -> None:
    """Orphaned descendants become children of this process, not of init (Linux only)."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent (the thread that forked) ends. Survives exec (prctl(2))."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if LINUX:
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def open_pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None if it is gone or the system has no pidfds."""
    with contextlib.suppress(AttributeError, OSError):
        return os.pidfd_open(pid)
    return None


def end_tree(
    members: Callable[[], Collection[int]],
    *,
    ask: Callable[[], object] = lambda: None,
    grace: float = 0.0,
    wait: Callable[[float], object] = time.sleep,
    before_kill: Callable[[Collection[int]], object] = lambda _: None,
    patience: float = STUBBORN_SECONDS,
) -> tuple[int, ...]:
    """End processes: ask them, wait for the grace time, then KILL until only zombies are left.

    members: returns the pids that still run; called repeatedly, because a process may fork before it is killed. ask:
    how they are asked to end. patience: seconds from the first KILL to giving up. Returns the processes that survived
    KILL.
    """
    ask()
    until = time.monotonic() + grace
    while time.monotonic() < until and members():
        wait(PAUSE)
    began = time.monotonic()
    while (left := members()) and (passed := time.monotonic() - began) < patience:
        victims = [pid for pid in left if passed >= TRACKER_SECONDS or not _is_tracker(pid)]
        before_kill(victims)
        send_signal(victims, signal.SIGKILL)
        wait(PAUSE)
    return tuple(left)


def tree_of(root: ProcessId) -> Callable[[], list[int]]:
    """The members of a process tree, for `end_tree`, with those that were once seen below the root and outlive it."""
    known = {root}

    def members() -> list[int]:
        below = descendants(*(each.pid for each in known if each.runs))
        known.update(found for pid in below if (found := ProcessId.of(pid)))
        return [each.pid for each in known if each.runs]

    return members


def _is_tracker(pid: int) -> bool:
    """Whether it is, or may be, multiprocessing's resource tracker: during exec() a process has no command line."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read()
            return not words or b"multiprocessing.resource_tracker" in words
    except OSError:  # the process is gone
        return False


def send_signal(pids: Collection[int], number: int) -> None:
    """Send a signal to each process that still runs."""
    for pid in pids:
        if pid > 1:  # kill() takes 0 and below for groups, and -1 for every process
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


def reap() -> dict[int, int]:
    """Reap all children that have ended; their exit codes (minus the signal) by pid."""
    exits = dict[int, int]()
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            exits[found[0]] = os.waitstatus_to_exitcode(found[1])
    return exits


def descendants(*ancestors: int) -> list[int]:
    """Every living process below these, parents before children, without zombies. Empty without /proc."""
    children: dict[int, list[tuple[int, str]]] = {}
    # All of /proc is read: the `children` files are documented as unreliable while processes start and end.
    for name in os.listdir("/proc") if LINUX else ():
        if name.isdigit() and (found := _parent_and_state(int(name))) is not None:
            children.setdefault(found[0], []).append((int(name), found[1]))
    order: list[int] = []
    queue = [*ancestors]
    while queue:
        for pid, state in children.get(queue.pop(0), []):
            queue.append(pid)
            if state not in "ZX":
                order.append(pid)
    return order


def descends_from(ancestor: int, pid: int) -> bool:
    pid = parent_of(pid)
    while pid > 1 and pid != ancestor:
        pid = parent_of(pid)
    return pid == ancestor > 1


def parent_of(pid: int) -> int:
    """The pid of a process's parent; 0 when it is gone."""
    if LINUX:
        return (_parent_and_state(pid) or (0, ""))[0]
    return int(_ps(pid, "ppid") or 0)


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    if LINUX:
        found = _parent_and_state(pid)
        return found is not None and found[1] not in "ZX"
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)  # another user's process
    return True


def is_stopped(pid: int) -> bool:
    """Whether the process is stopped by STOP or by a debugger."""
    return LINUX and (_parent_and_state(pid) or (0, ""))[1] in ("T", "t")


def stat_fields(pid: int) -> list[bytes] | None:
    """The fields of /proc/PID/stat from the state on (proc(5)); None if the process is gone or there is no /proc."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()  # the name before it may contain spaces and parentheses
    except OSError:
        return None


def _parent_and_state(pid: int) -> tuple[int, str] | None:
    fields = stat_fields(pid)
    return None if fields is None else (int(fields[1]), fields[0].decode())


Pid = Annotated[int, Between(1, 1 << 22)]  # PID_MAX_LIMIT of Linux; smaller elsewhere


class ProcessId(NamedTuple):
    """A process, identified beyond its number: pids are reused, a start time within one boot of the machine is not.

    started: in the system's own units, as :func:`started`; boot: as :func:`boot_id`.
    """

    pid: Pid
    started: Annotated[str, Like(r"[\w: ]{1,64}", "a time")]
    boot: Annotated[str, Like(r"[\w-]{0,64}", "the id of a boot")] = ""

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        began = started(pid)
        return cls(pid, began, boot_id()) if began else None

    @property
    def runs(self) -> bool:
        """Whether exactly this process runs, on this machine since its last boot; a zombie does not."""
        if not LINUX:
            return is_alive(self.pid) and started(self.pid) == self.started
        fields = stat_fields(self.pid)
        return (
            fields is not None and fields[0] not in (b"Z", b"X") and fields[19].decode() == self.started
        ) and self.boot == boot_id()


def started(pid: int) -> str:
    """When a process started: clock ticks since boot on Linux, else as ps prints it; empty if it is gone."""
    if LINUX:
        fields = stat_fields(pid)
        return fields[19].decode() if fields is not None else ""
    return _ps(pid, "lstart")


def command_line(pid: int) -> tuple[str, ...]:
    """The arguments of a process; none if it is gone. Without /proc an argument with spaces counts as several."""
    if LINUX:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
            return tuple(os.fsdecode(file.read()).rstrip("\0").split("\0"))
        return ()
    return tuple(_ps(pid, "command").split())


def module_of(words: Sequence[str]) -> str:
    """What a Python command line runs: the module of `-m`, or the name of the script; empty for anything else."""
    if LINUX and not re.search("python|pypy", os.path.basename("".join(words[:1]))):
        return ""
    rest = iter(words[1:])
    for word in rest:
        if not word.startswith("-"):
            name = os.path.basename(word)
            if LINUX or name == "trainkit":  # without /proc it may be the rest of a path with a space
                return name
        elif found := re.match(r"-[a-zA-Z]*?([cmXW])(.*)", word, re.DOTALL):
            value = found[2] or next(rest, "")
            if found[1] in "cm":
                return value if found[1] == "m" else ""
        elif word == "--check-hash-based-pycs":
            next(rest, "")
    return ""


def _ps(pid: int, column: str) -> str:
    import subprocess  # without /proc

    argv = ("ps", "-ww", "-o", f"{column}=", "-p", str(pid))
    return subprocess.run(argv, capture_output=True, text=True, errors="surrogateescape", check=False).stdout.strip()


@lru_cache(maxsize=1)
def boot_id() -> str:
    """The id of the machine's current boot; empty if the system has none."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def owner_of(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        if LINUX:
            return os.stat(f"/proc/{pid}").st_uid
    return int(found) if not LINUX and (found := _ps(pid, "uid")) else None


def signal_holder(process: ProcessId, lock: str, run_dir: str, number: int) -> bool:
    """Send a signal to the trainkit of a run; False if the process is not that one, or has ended.

    A pid from a file is proved first: it is the same process, it belongs to this user (or to any user, for root), it
    runs trainkit (`python -m trainkit`, or the console script), and it has the run's lock open or the run directory
    among its arguments.
    """
    pidfd = open_pidfd(process.pid)
    try:
        words = command_line(process.pid)
        if not process.runs or os.geteuid() not in (0, owner_of(process.pid)):
            return False
        if module_of(words).partition(".")[0] != "trainkit":
            return False
        if run_dir not in words and not _has_open(process.pid, lock):
            return False
        if pidfd is not None:
            signal.pidfd_send_signal(pidfd, number)  # the process that was checked, even if its number has been reused
        else:
            os.kill(process.pid, number)
    except ProcessLookupError:
        return False
    finally:
        if pidfd is not None:
            os.close(pidfd)
    return True


def _has_open(pid: int, path: str) -> bool:
    """Whether a process has a file open; True if the system cannot tell."""
    if not LINUX:
        return True
    with contextlib.suppress(OSError):
        wanted = os.stat(path, follow_symlinks=False)
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # just closed
                if os.path.samestat(os.stat(f"/proc/{pid}/fd/{name}"), wanted):
                    return True
    return False


def memory_kills(counters: str = "/proc/vmstat") -> int:
    """How many processes the kernel of this machine has killed because memory, or a cgroup's memory, ran out."""
    try:
        with open(counters, encoding="ascii") as file:  # oom_kill, since Linux 4.13
            return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), 0)
    except OSError:
        return 0


def exit_of_child(pid: int) -> int | None:
    """Exit code of a child that has ended (minus the signal that killed it), None while it runs."""
    # The zombie stays if the system allows (not on macOS before Python 3.13): until it is reaped, its pid and its
    # group's id are not reused.
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
    except ValueError:  # a real-time signal has no name
        return f"signal {number}"


_OWN_REASON: list[str] = []  # why this process sent TERM to itself


def end_self(why: str) -> None:
    """End this process in an orderly way, by TERM, because the process that submitted the run is gone."""
    _OWN_REASON.append(why)
    os.kill(os.getpid(), signal.SIGTERM)


def reason_of_signal(number: int) -> tuple[str, str]:
    """Why trainkit ends after a signal, and whose failure that is, as in `exit_status.Verdict`."""
    return (_OWN_REASON[0], "submitter") if _OWN_REASON else (f"trainkit received {signal_name(number)}", "signal")


def wakeup(numbers: Iterable[int]) -> int:
    """A descriptor with the numbers of received signals to read: they wake a loop and interrupt no code."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, lambda *_: None)  # a handler only has to exist
    return reader


@contextlib.contextmanager
def handled(numbers: Iterable[int], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle signals in a `with` block. If nohup ignores HUP, it stays ignored."""
    taken = [each for each in numbers if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN]
    before: dict[int, Any] = {number: signal.signal(number, handler) for number in taken}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
