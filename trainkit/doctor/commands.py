"""Run other programs, each within a time limit and with a temporary folder that is removed in the end."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

MOST_OUTPUT = 64 * 1024  # characters of each stream that are kept
REMOVING = 1.0  # seconds in which what was killed may still write


@dataclass(frozen=True, slots=True)
class Done:
    """A command that has ended. code: its exit code, minus the signal; None where it could not be started or hung."""

    code: int | None
    output: str = ""
    errors: str = ""
    why: str = ""  # it has no exit code

    @property
    def fine(self) -> bool:
        """Whether it ended with code 0."""
        return self.code == 0

    @property
    def said(self) -> str:
        """The last line of its output, for evidence; else why there is none."""
        lines = [line.strip() for line in (self.errors or self.output).splitlines() if line.strip()]
        return self.why or (lines[-1] if lines else f"exit code {self.code}, no output")


@dataclass
class Commands:
    """Starts commands in process groups of their own, and ends what still lives when it is closed."""

    environ: Mapping[str, str]
    _living: set[int] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closed: bool = False

    def __call__(self, argv: tuple[str, ...], limit: float, *, environ: Mapping[str, str] | None = None) -> Done:
        """Run to its end, or kill it with all that it started after `limit` seconds."""
        import subprocess  # checks before a run start nothing, and are spared its import

        try:
            process = subprocess.Popen(
                argv,
                env=dict(self.environ if environ is None else environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                encoding="utf-8",
                errors="replace",
            )
        except OSError as error:
            return Done(None, why=f"{argv[0]} cannot be started: {error.strerror}")
        with self._lock:
            self._living.add(process.pid)
            if self._closed:
                _kill_group(process.pid)
        try:
            output, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            _kill_group(process.pid)
            output = errors = ""
            with contextlib.suppress(subprocess.TimeoutExpired):  # what left the group may still hold the pipes
                output, errors = process.communicate(timeout=1)
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
            return Done(None, output, errors, f"{argv[0]} did not end within {limit:g} s")
        finally:
            with self._lock:
                self._living.discard(process.pid)
        return Done(process.returncode, output[-MOST_OUTPUT:], errors[-MOST_OUTPUT:])

    def close(self) -> None:
        """End the commands that still run, and those that a check starts later."""
        with self._lock:
            self._closed = True
            for pid in self._living:
                _kill_group(pid)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has just ended
        os.killpg(pid, signal.SIGKILL)


@contextlib.contextmanager
def private_environment() -> Iterator[Mapping[str, str]]:
    """This process's environment with a temporary folder for the checks alone, removed with all that is left in it.

    A compiler that is killed leaves its files, and Python's search for a temporary folder its trial file.
    """
    import tempfile

    environ = dict(os.environ)
    folder = ""
    with contextlib.suppress(OSError):  # no folder can be written to: then nothing can be left either
        folder = environ["TMPDIR"] = tempfile.mkdtemp(prefix="trainkit-doctor-")
    try:
        yield environ
    finally:
        # Until it is gone: a killed compiler's files may appear after the first attempt.
        end = time.monotonic() + REMOVING
        while folder and os.path.lexists(folder) and time.monotonic() < end:
            shutil.rmtree(folder, ignore_errors=True)
