"""Ask questions of a machine in a child process, so that one that hangs or crashes costs its time limit and no more.

A driver may hang in a call that no signal ends, and a library may crash the process that it is loaded into. A forked
child may do both: it is killed, or left behind where even that is impossible, and what is left is asked in a new one.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

Question = Callable[[], Mapping[str, Any]]


def answers(questions: Mapping[str, Question], seconds: Callable[[str], float]) -> Iterator[tuple[str, Any]]:
    """Each question's name with its answer (a mapping), or with the reason why there is none (a text), in order.

    seconds: how long a question may take, by its name.
    """
    left = dict(questions)
    while left:
        with _asked(left) as child:
            for name in tuple(left):
                del left[name]
                answer, alive = child.next(name, seconds(name))
                yield name, answer
                if not alive:
                    break


class _Child:
    def __init__(self, pid: int, fd: int) -> None:
        self.pid = pid
        self.fd = fd
        self._received = b""

    def next(self, name: str, seconds: float) -> tuple[Any, bool]:
        """The next answer, and whether the child can give more."""
        deadline = time.monotonic() + seconds
        while True:
            size = int.from_bytes(self._received[:8], "big")
            if len(self._received) >= 8 + size and len(self._received) >= 8:
                body, self._received = self._received[8 : 8 + size], self._received[8 + size :]
                return pickle.loads(body), True  # noqa: S301 - our own child wrote it
            if not select.select([self.fd], [], [], max(deadline - time.monotonic(), 0))[0]:
                return f"no answer within {seconds:g} s", False
            data = os.read(self.fd, 1 << 16)
            if not data:
                return self._cause(), False
            self._received += data

    def _cause(self) -> str:
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        code = os.waitstatus_to_exitcode(status)
        return f"the probe crashed ({signal.Signals(-code).name})" if code < 0 else f"the probe ended with code {code}"


@contextlib.contextmanager
def _asked(questions: Mapping[str, Question]) -> Iterator[_Child]:
    """A child that answers the questions in order."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads: the child only asks and ends
        pid = os.fork()
    if pid == 0:
        _answer(questions, writer)
    os.close(writer)
    child = _Child(pid, reader)
    try:
        yield child
    finally:
        os.close(reader)
        if child.pid:
            _end(child.pid)


def _end(pid: int) -> None:
    """Kill and reap; a child that sits in a driver's call cannot be killed, and is not waited for."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 1.0
    while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.001)


def _answer(questions: Mapping[str, Question], fd: int) -> NoReturn:
    try:
        for question in questions.values():
            try:
                answer: Mapping[str, Any] | str = question()
            except Exception as error:  # noqa: BLE001 - a driver's library may raise anything; the reason becomes a fact
                answer = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            body = pickle.dumps(answer)
            message = len(body).to_bytes(8, "big") + body
            while message:
                message = message[os.write(fd, message) :]
    finally:
        os._exit(0)
