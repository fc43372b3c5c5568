"""End the containers of a run by the engine's own command: their processes may be children of a daemon."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from trainkit.runner.supervisor.channel import Spec
from trainkit.runner.supervisor.cleanup import held_by
from trainkit.runner.supervisor.processes import descendants, send_signal, spawn

Say = Callable[[str], object]
SECONDS = 30.0  # for the engine; a daemon that hangs must not hold the run
PAUSE = 0.02
# What an engine says of a container that has gone by itself (docker container rm).
GONE = ("no such container", "already in progress")


def end_containers(
    argv: Sequence[str], environ: Mapping[str, str], meanwhile: Callable[[], object] = lambda: None
) -> str:
    """Run the engine's command to its end; what went wrong, empty where nothing is left.

    meanwhile: called again and again, for an engine may be slower than other nodes are patient.
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
    os.set_blocking(reader, False)
    code, until, said = None, time.monotonic() + SECONDS, b""
    while code is None and time.monotonic() < until:
        with contextlib.suppress(BlockingIOError):
            said += os.read(reader, 4096)
        code = _exit_of(pid)
        meanwhile()
        time.sleep(PAUSE if code is None else 0)
    if code is None:
        send_signal([pid], signal.SIGKILL)
    with contextlib.suppress(BlockingIOError):
        said += os.read(reader, 4096)
    os.close(reader)
    words = said.decode("utf-8", "replace").strip()
    left = [line for line in words.splitlines() if line not in argv and not any(each in line.lower() for each in GONE)]
    if code == 0 or (words and code is not None and not left):
        return ""
    why = f"no answer within {SECONDS:g} s" if code is None else words or f"exit code {code}"
    return f"{' '.join(argv)}: {why}"


def end_boxed(
    spec: Spec,
    wrappers: Iterable[int],
    environ: Mapping[str, str],
    say: Say,
    meanwhile: Callable[[], object],
) -> set[str]:
    """End a run's containers, if it has any; what its ranks held outside the run directory.

    wrappers: pids of its ranks' that run, wherever they descend from.
    """
    if not spec.container:
        return set()
    held = held_by([pid for wrapper in wrappers for pid in (wrapper, *descendants(wrapper))])
    if wrong := end_containers(spec.end, environ, meanwhile):
        say(f"warning: a container may be left: {wrong}")
    return held


def _exit_of(pid: int) -> int | None:
    with contextlib.suppress(ChildProcessError):  # reaped elsewhere, and its code with it
        found, status = os.waitpid(pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if found else None
    return 0
