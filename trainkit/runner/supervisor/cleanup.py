"""End the remaining processes and containers of a run, and remove what killed ones leave outside the run directory.

Only what provably belongs to the run is removed: a name that DeepSpeed derives from the run's rendezvous, or a file
or socket folder that a process of the run held open when it was killed, with a name that a library generates.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from trainkit.runner.rundir.records import RankRecord
from trainkit.runner.supervisor.channel import Spec
from trainkit.runner.supervisor.processes import (
    LINUX,
    PAUSE,
    TRACKER_SECONDS,
    ProcessId,
    descendants,
    end_tree,
    is_alive,
    spawn,
    tree_of,
)

SHARED_MEMORY = "/dev/shm"  # noqa: S108  where shm_open() puts its files
# Buffers of torch, Python, NCCL and DeepSpeed: never a data set that a user staged there.
OWN_NAMES = re.compile(r"torch_\d+_|psm_|wnsm_|sem\.mp-|mp-|nccl-|cuda\.shm\.|deepspeed_allreduce_buffer_")
SOCKET_FOLDER = re.compile(r"pymp-\w+")
ENGINE_SECONDS = 30.0  # a hanging daemon must not block the run
# What an engine prints about a container that no longer exists (docker container rm).
GONE = ("no such container", "already in progress")


def kill_descendants(groups: Iterable[int] = (), spare: Collection[int] = ()) -> tuple[tuple[int, ...], set[str]]:
    """KILL everything below this process.

    groups: process groups to kill where the system does not report which process descends from which. spare:
    descendants that do not belong to the run. Returns the processes that survived KILL, and the paths that the killed
    ones held.
    """
    held = set[str]()
    for group in groups if not LINUX else ():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if group > 1:
                os.killpg(group, signal.SIGKILL)
    return end_tree(
        lambda: [pid for pid in descendants(os.getpid()) if pid not in spare],
        before_kill=lambda victims: held.update(held_by(victims)),
    ), held


def kill_group(group: int) -> None:
    """KILL the rest of a process group, and remove what it held outside the run directory.

    Its first process must be a zombie that has not been reaped: otherwise the number may already mean another group.
    """
    held = set[str]()

    def living() -> list[int]:
        found = []
        for name in os.listdir("/proc") if LINUX else ():
            with contextlib.suppress(ValueError, ProcessLookupError):  # no process, or no more
                if os.getpgid(int(name)) == group and is_alive(int(name)):
                    found.append(int(name))
        return found

    end_tree(living, before_kill=lambda victims: held.update(held_by(victims)), patience=TRACKER_SECONDS)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
    remove(held)


def end_containers(
    argv: Sequence[str], environ: Mapping[str, str], meanwhile: Callable[[], object] = lambda: None
) -> str:
    """Run the engine's command that ends a run's containers; the error, empty if none is left.

    meanwhile: called repeatedly, because an engine may take longer than other nodes wait for a heartbeat.
    """
    if not argv:
        return ""
    nothing, (reader, writer) = os.open(os.devnull, os.O_RDWR), os.pipe()
    try:
        pid = spawn(argv, environ, (nothing, writer, writer), new_session=True)
    except OSError as error:
        os.close(reader)
        return f"{argv[0]} cannot be started: {error.strerror}"
    finally:
        os.close(writer)
        os.close(nothing)

    def pause(seconds: float) -> None:
        meanwhile()
        time.sleep(seconds)

    os.set_blocking(reader, False)
    code, until, output = None, time.monotonic() + ENGINE_SECONDS, b""
    with os.fdopen(reader, "rb", buffering=0) as said:
        while code is None and time.monotonic() < until:
            output += said.read(4096) or b""
            code = _exit_of(pid)
            pause(PAUSE if code is None else 0)
        if code is None and (process := ProcessId.of(pid)) is not None:
            end_tree(tree_of(process), wait=pause)
            _exit_of(pid)
        output += said.read(4096) or b""
    text = output.decode("utf-8", "replace").strip()
    left = [line for line in text.splitlines() if line not in argv and not any(each in line.lower() for each in GONE)]
    if code == 0 or (text and code is not None and not left):
        return ""
    why = f"no answer within {ENGINE_SECONDS:g} s" if code is None else text or f"exit code {code}"
    return f"{' '.join(argv)}: {why}"


def _exit_of(pid: int) -> int | None:
    with contextlib.suppress(ChildProcessError):  # reaped elsewhere, so the code is lost
        found, status = os.waitpid(pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if found else None
    return 0


def end_run_containers(
    spec: Spec,
    wrappers: Iterable[int],
    environ: Mapping[str, str],
    say: Callable[[str], object],
    meanwhile: Callable[[], object],
) -> set[str]:
    """End a run's containers, if it has any; returns what its ranks held outside the run directory.

    wrappers: pids of the ranks' running wrappers: in a container they may be children of the engine's daemon.
    """
    if not spec.container:
        return set()
    wrappers = [*wrappers]
    held = held_by([*wrappers, *descendants(*wrappers)])
    if wrong := end_containers(spec.end, environ, meanwhile):
        say(f"warning: a container may still exist: {wrong}")
    return held


def remove_leftovers(records: Iterable[RankRecord], held: Iterable[str]) -> None:
    """Remove the shared memory that ranks leave under the run's own names, and what killed processes held."""
    buffers = (path for each in records if each.rendezvous for path in deepspeed_buffers(each.rendezvous, [each.rank]))
    remove({*held, *buffers})


def deepspeed_buffers(rendezvous: str, ranks: Iterable[int]) -> list[str]:
    """Paths of DeepSpeed's CPU all-reduce buffers (shm.cpp: prefix, uid, MASTER_ADDR, MASTER_PORT, rank)."""
    return [f"{SHARED_MEMORY}/deepspeed_allreduce_buffer_{os.getuid()}_{rendezvous}_{rank}" for rank in ranks]


def held_by(pids: Iterable[int]) -> set[str]:
    """Shared-memory files and socket folders that these living processes hold."""
    sockets = dict(_socket_folders())
    found = set[str]()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has just ended, with or without its own clean-up
            found |= _mapped(pid)
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError, KeyError):  # just closed, or not one of these sockets
                    found.add(sockets[os.readlink(f"/proc/{pid}/fd/{name}")])
    return found


def remove(paths: Iterable[str]) -> list[str]:
    """Remove those that exist, are ours, and are mapped by no process; returns the removed ones."""
    candidates = set[str]()
    for path in paths:
        with contextlib.suppress(OSError):
            if os.lstat(path).st_uid == os.getuid():
                candidates.add(path)
    for name in os.listdir("/proc") if candidates else ():
        if name.isdigit():
            with contextlib.suppress(OSError):
                candidates -= _mapped(int(name))
    for path in candidates:
        folder, name = os.path.split(path)
        with contextlib.suppress(OSError):
            parent = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                _remove_below(parent, name)
            finally:
                os.close(parent)
    return sorted(candidates)


def _remove_below(parent: int, name: str) -> None:
    """Remove a file, or a folder of files; parent: a descriptor, so that no link leads elsewhere. Raises OSError."""
    if not stat.S_ISDIR(os.lstat(name, dir_fd=parent).st_mode):
        os.unlink(name, dir_fd=parent)
        return
    folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        for each in os.listdir(folder):
            with contextlib.suppress(OSError):
                os.unlink(each, dir_fd=folder)
    finally:
        os.close(folder)
    os.rmdir(name, dir_fd=parent)


def _mapped(pid: int) -> set[str]:
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="surrogateescape") as file:
        paths = {line.split(None, 5)[5].rstrip("\n") for line in file if SHARED_MEMORY in line}
    return {path for path in paths if OWN_NAMES.match(os.path.basename(path))}


def _socket_folders() -> Iterator[tuple[str, str]]:
    """``socket:[inode]`` and multiprocessing's temporary folder, for listeners that have one."""
    with contextlib.suppress(OSError), open("/proc/net/unix", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            fields = line.split(None, 7)
            folder = os.path.dirname(fields[7].rstrip("\n")) if len(fields) == 8 else ""
            if SOCKET_FOLDER.fullmatch(os.path.basename(folder)):
                yield f"socket:[{fields[6]}]", folder
