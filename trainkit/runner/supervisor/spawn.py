"""Start a process with exactly the session, group, descriptors and signals that it should have."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from trainkit.runner.supervisor.process_tree import die_with_parent


class Streams(NamedTuple):
    """Descriptors that become 0, 1 and 2 of the new process."""

    stdin: int
    stdout: int
    stderr: int


class SpawnOptions(NamedTuple):
    """The new process's session, its process group (0: its own), and what reaches it from outside."""

    new_session: bool = False
    group: int | None = None
    dies_with_parent: bool = False
    ignore: tuple[int, ...] = ()  # signals that stay ignored; all others start with their default action


def spawn(
    argv: Sequence[str],
    environment: Mapping[str, str],
    streams: Streams,
    options: SpawnOptions,
    inherit: Sequence[int] = (),
) -> int:
    """The pid of the started program. Raises the OSError that exec met in the child (not found, not executable).

    Not subprocess.Popen: its import costs half the start-up of a rank's wrapper.
    """
    parent = os.getpid()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _set_up(streams, options, inherit, parent)
            os.execvpe(argv[0], list(argv), dict(environment))
        except OSError as error:
            os.write(writer, str(error.errno).encode())
        finally:
            os._exit(127)
    os.close(writer)
    with os.fdopen(reader, "rb") as report:
        failure = report.read()  # empty when exec closed the pipe
    if not failure:
        return pid
    os.waitpid(pid, 0)
    number = int(failure)
    raise OSError(number, os.strerror(number), argv[0])


def _set_up(streams: Streams, options: SpawnOptions, inherit: Sequence[int], parent: int) -> None:
    """In the child, before exec."""
    if options.new_session:
        os.setsid()
    elif options.group is not None:
        os.setpgid(0, options.group)
    if options.dies_with_parent:
        die_with_parent(signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the request was in place
            os._exit(128 + signal.SIGKILL)
    # Copies above 2 first: a source may itself be 0, 1 or 2.
    for target, copy in enumerate([os.dup(fd) for fd in streams]):
        os.dup2(copy, target)
    for fd in inherit:
        os.set_inheritable(fd, True)
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        with contextlib.suppress(OSError, ValueError):  # KILL and STOP take no action but their own
            signal.signal(number, signal.SIG_IGN if number in options.ignore else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
