"""A run that was started from Python: the command line's own, in a process of its own, followed from here."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

from trainkit.decode import decode
from trainkit.errors import Diagnostic, ExitCode, MachineError, RecipeError, TrainkitError, UsageError
from trainkit.files import parse_json, read_json
from trainkit.runner.rundir.layout import RunLayout

if TYPE_CHECKING:
    from trainkit.launch_plan.model import Plan
    from trainkit.schedulers.jobs.standing import Standing

LOOK_SECONDS = 0.1  # between two looks at the metrics of a run that is iterated over
SHOW_SECONDS = 0.5  # between two pictures in a notebook
ERRORS = {each.__name__: each for each in (RecipeError, UsageError, MachineError)}
CHUNK = 1 << 16


class RunError(TrainkitError):
    """A run did not succeed. run: the run; its `directory` has the logs. code: its exit code, as of the command."""

    exit_code = ExitCode.FAILED

    def __init__(self, diagnostics: Diagnostic, run: Run, code: int) -> None:
        super().__init__(diagnostics)
        self.run, self.code = run, code


class Command:
    """A command of trainkit's in a process of its own, which tells its errors and, for `run`, the run directory.

    words: of the command line. output: a file for both streams; None leaves them where this process has them.
    tells: whether it is `run`, which tells the run directory. answers: whether standard output is kept for `answer`.
    The process ends with this one, in order, however this one ends; Ctrl-C in a terminal reaches only this one.
    """

    def __init__(
        self,
        words: Sequence[str],
        folder: str,
        output: IO[bytes] | None = None,
        *,
        tells: bool = False,
        answers: bool = False,
    ) -> None:
        self._output = output
        near, far = socket.socketpair()
        with far:
            fd = str(far.fileno())
            command, *rest = words
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "trainkit.api.child",
                    fd,
                    command,
                    *(("--tell", fd) if tells else ()),
                    *rest,
                ],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if answers else output,
                stderr=output,
                pass_fds=(far.fileno(),),
                start_new_session=True,
            )
        # A number, not a socket: a run whose `Run` nobody keeps goes on, until this process ends.
        self._channel = near.detach()
        self._unread = b""

    def messages(self) -> Iterator[dict[str, Any]]:
        """What the command tells, until it closes its side."""
        while data := os.read(self._channel, CHUNK):
            *lines, self._unread = (self._unread + data).split(b"\n")
            yield from map(parse_json, lines)

    def answer(self, look: Callable[[], object] = lambda: None, *, may_fail: bool = False) -> str:
        """Standard output to its end, and then the end of the process.

        look: called every so often meanwhile. may_fail: whether an answer may come with an exit code other than 0.
        """
        parts: list[bytes] = []
        with self.interruptible():
            assert self._process.stdout is not None
            with self._process.stdout as out:
                while True:
                    if select.select([out], [], [], SHOW_SECONDS)[0]:
                        if not (data := os.read(out.fileno(), CHUNK)):
                            break
                        parts.append(data)
                    look()
            errors = [error_of(message) for message in self.messages()]
            code = self.wait()
        if code and not (may_fail and parts and not errors):
            said = f": {shown}" if (shown := _end_of(self._output)) else "; its errors are shown above"
            raise errors[0] if errors else TrainkitError(f"the command ended with {code}{said}")
        return b"".join(parts).decode()

    @property
    def code(self) -> int | None:
        """The exit code, as a shell has it; None while the command runs."""
        found = self._process.poll()
        return None if found is None else found if found >= 0 else 128 - found

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait for the end, at most so many seconds; the exit code, None where it still runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
            self.close()
        return self.code

    def close(self) -> None:
        """Let go of the connection, which ends the command if it still runs."""
        if self._channel >= 0:
            os.close(self._channel)
            self._channel = -1

    def end(self, *numbers: int) -> None:
        """End it in order by these signals, and wait; Ctrl-C meanwhile kills every process of a run."""
        pending = list(numbers)
        while self.code is None:
            try:
                while pending:
                    self._process.send_signal(pending.pop(0))
                self.wait()
            except KeyboardInterrupt:
                pending = [signal.SIGINT]
        self.close()

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """In this context Ctrl-C, or a notebook's interrupt, first ends the command in order and is then raised."""
        try:
            yield
        except KeyboardInterrupt:
            self.end(signal.SIGINT)
            raise


def error_of(message: Mapping[str, Any]) -> TrainkitError:
    """The error that a command has told."""
    return readable(ERRORS[message["error"]](decode(Diagnostic, each) for each in message["diagnostics"]))


def message_of(error: TrainkitError) -> dict[str, Any]:
    """The same, as it is told. An error of no kind that a caller may catch counts as one of the machine."""
    kind = next((name for name, each in ERRORS.items() if isinstance(error, each)), "MachineError")
    return {"error": kind, "diagnostics": [asdict(each) for each in error.diagnostics]}


def readable(error: TrainkitError, more: str = "") -> TrainkitError:
    """The error with its diagnostics as the command line shows them: in a notebook alone, else below the traceback.

    more: text that follows them.
    """
    from trainkit.cli.diagnostics import render_diagnostics

    if not hasattr(error, "_render_traceback_"):
        text = f"{render_diagnostics(error.diagnostics)}{more}".rstrip("\n")
        error.add_note(text)
        # IPython asks an error for it: where trainkit refuses something, its own frames are of no use.
        error._render_traceback_ = lambda: [f"{type(error).__name__}", text]  # type: ignore[attr-defined]
    return error


class Run:
    """A run, from its start on: iterate over it for the metrics, `wait()` for its end, `stop()` it.

    In a notebook iterating and waiting show progress and curves, and the run as a cell's last line shows them as they
    are. As a context it is waited for at the end, and stopped where the block raises.
    It ends, in order, with the process that has started it.
    """

    def __init__(self, command: Command, directory: Path, output: IO[bytes] | None) -> None:
        self._command, self._layout, self._output = command, RunLayout(directory), output
        self._picture = Picture()

    @classmethod
    def start(cls, words: Sequence[str], folder: str, *, quiet: bool) -> Self:
        """Start `trainkit run` with these words in a folder; returns when the run begins, or waits for GPUs.

        quiet: keep what the command line would show. Raises what refuses the run: RecipeError, UsageError,
        MachineError.
        """
        output: IO[bytes] | None = tempfile.TemporaryFile(mode="ab+") if quiet else None  # noqa: SIM115
        command = Command(["run", *words], folder, output, tells=True)
        with command.interruptible():
            for message in command.messages():
                if "run" in message:
                    return cls(command, Path(message["run"]), output)
                command.wait()
                raise error_of(message)
            command.wait()
        shown = _end_of(output)
        raise readable(
            TrainkitError(f"trainkit run ended with {command.code} before a run began{shown and f': {shown}'}")
        )

    @property
    def directory(self) -> Path:
        """The run directory."""
        return self._layout.root

    @property
    def standing(self) -> Standing:
        """How it stands now: state, step, loss, time left and more, as `trainkit status` has it."""
        from trainkit.runner.rundir.listing import read_run
        from trainkit.schedulers.jobs.standing import standing_of

        return standing_of(read_run(self.directory))

    @property
    def state(self) -> str:
        """`starting`, `running`; `done`, `failed`, `cancelled`, …"""
        from trainkit.schedulers.jobs.run_state import state_of

        return state_of(self._layout).word

    @property
    def exit_code(self) -> int | None:
        """As of the command line; None while it runs."""
        return self._command.code

    @property
    def plan(self) -> Plan:
        """What it executes."""
        from trainkit.runner.rundir.listing import read_plan

        return read_plan(self._layout)

    @property
    def summary(self) -> dict[str, Any]:
        """Everything known at its end (summary.json); empty before."""
        return read_json(self._layout.summary)

    @property
    def output(self) -> str:
        """What the command line has shown so far, where it is kept (`quiet`); else empty."""
        return _end_of(self._output, everything=True)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The records of metrics.jsonl, from the first on, as they come, until the run ends. Raises as `wait`."""
        from trainkit.runner.report.progress import Tail

        tail = Tail(self._layout.metrics, kept=False)
        while True:
            with self._command.interruptible():
                is_over = self._command.code is not None  # before the last look
                records = [each for each in tail.records() if "step" in each]
            yield from records  # an interrupt of the loop's body is the caller's
            with self._command.interruptible():
                if is_over and not records:
                    break
                self._show()
                if not records:
                    self._command.wait(LOOK_SECONDS)
        self.wait()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for its end.

        Raises RunError if it did not succeed, TimeoutError if it has not ended after so many seconds. An interrupt
        (Ctrl-C) ends the run in order, a second one kills it, and KeyboardInterrupt is raised.
        """
        until = None if timeout is None else time.monotonic() + timeout
        with self._command.interruptible():
            while self._command.wait(self._pause(until)) is None:
                if until is not None and time.monotonic() >= until:
                    raise TimeoutError(f"{self!r} has not ended after {timeout:g} s")
                self._show()
            self._show(at_end=True)
        if self._command.code != 0:
            raise self._failure()

    def stop(self, *, now: bool = False) -> None:
        """End it in order, as `trainkit cancel` does on this machine, and wait. now: kill what it has started."""
        self._command.end(signal.SIGTERM, *([signal.SIGINT] if now else ()))
        self._show(at_end=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.wait()
        else:
            self.stop()

    def __repr__(self) -> str:
        return f"<run {self._layout.name} {self._layout.short_id}: {self.state}>"

    def _repr_html_(self) -> str:
        from trainkit.api.inline import html_of

        return html_of(self.standing, _end_of(self._output))

    def _pause(self, until: float | None) -> float | None:
        """Seconds to the next look; None for none before the end."""
        left = None if until is None else max(0.0, until - time.monotonic())
        if not in_notebook():
            return left
        return SHOW_SECONDS if left is None else min(left, SHOW_SECONDS)

    def _show(self, *, at_end: bool = False) -> None:
        self._picture.show(self._repr_html_, at_end=at_end)

    def _failure(self) -> RunError:
        """Why it did not succeed, as the command line says it."""
        from trainkit.runner.report.exit_status import Verdict
        from trainkit.runner.report.failure import describe_failure

        code = self._command.code or 0
        status = read_json(self._layout.status)
        told, attempts = f"the run ended with exit code {code}", self._layout.attempts
        with contextlib.suppress(KeyError, TypeError):  # killed before it could write one down
            verdict = Verdict(**{name: status[name] for name in Verdict._fields})
            if attempts and verdict.failure:
                told = describe_failure(verdict, attempts[-1], None)
        what, _, why = told.partition("\n")
        error = RunError(Diagnostic("error", what, hint=f"its directory is {self.directory}"), self, code)
        readable(error, why)
        return error


class Picture:
    """What a cell of a notebook shows of something that goes on, drawn again in its place; elsewhere nothing."""

    def __init__(self) -> None:
        self._display: Any = None
        self._shown = 0.0

    def show(self, html: Callable[[], str], *, at_end: bool = False) -> None:
        """Draw it, at most every so many seconds."""
        if not in_notebook() or (not at_end and time.monotonic() - self._shown < SHOW_SECONDS):
            return
        from IPython.display import HTML, display

        picture = HTML(html())
        if self._display is None:
            self._display = display(picture, display_id=True)
        else:
            self._display.update(picture)
        self._shown = time.monotonic()


def shown_answer(words: Sequence[str], folder: str, *, quiet: bool) -> str:
    """What a command answers that runs for long and may fail; meanwhile a notebook shows its last lines.

    quiet: keep what the command line would show.
    """
    from trainkit.api.inline import said

    picture = Picture()
    with tempfile.TemporaryFile(mode="ab+") if quiet else contextlib.nullcontext() as output:
        command = Command(words, folder, output, answers=True)
        answer = command.answer(lambda: picture.show(lambda: said(_end_of(output))), may_fail=True)
        picture.show(lambda: said(_end_of(output)), at_end=True)
    return answer


def _end_of(output: IO[bytes] | None, *, everything: bool = False) -> str:
    """What a command has shown; unless everything is wanted, the last of it."""
    if output is None:
        return ""
    size = os.fstat(output.fileno()).st_size
    begin = 0 if everything else max(0, size - CHUNK)
    return os.pread(output.fileno(), size - begin, begin).decode("utf-8", "replace")


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, which shows HTML. IPython is never imported for that."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")


def told(message: Mapping[str, Any]) -> bytes:
    """A message as a line."""
    return json.dumps(message).encode() + b"\n"
