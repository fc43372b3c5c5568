"""Signals: which end a run, which go to its ranks, and what trainkit does when it receives one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# For the ranks only (a checkpoint request): a launcher that does not know them would die of them.
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


def signal_name(number: int) -> str:
    """``SIGTERM`` rather than 15."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def wakeup(numbers: Iterable[int]) -> int:
    """A descriptor that brings the number of each of these signals: they wake a loop, and interrupt no code."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, lambda *_: None)  # a handler must only exist
    return reader


@contextmanager
def handled(numbers: Iterable[int], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle signals for a while. A HUP that nohup made ignored stays ignored."""
    taken = [each for each in numbers if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN]
    before: dict[int, Any] = {number: signal.signal(number, handler) for number in taken}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


class Orders:
    """Signals that trainkit received during a run, in order, and what it asks of the guardian then."""

    def __init__(self, send: Callable[[dict[str, object]], None], on_stop: Callable[[], None]) -> None:
        self.stopped_by: int | None = None
        self.insists = False  # a second Ctrl-C
        self.on_resize: Callable[[], None] = lambda: None  # of the terminal
        self._send = send
        self._on_stop = on_stop

    def take(self, number: int, _frame: FrameType | None = None) -> None:
        """The handler. Sending from here, not from the loop, works while the loop is blocked in a write."""
        if number in PASSED_ON:
            self._send({"do": "signal", "signal": number})
        elif number == signal.SIGWINCH:
            self.on_resize()
        elif self.stopped_by is None:
            self.stopped_by = number
            self._on_stop()
            self._send({"do": "stop", "signal": number, "why": f"trainkit received {signal_name(number)}"})
        elif number == signal.SIGINT:
            self.insists = True
            self._send({"do": "kill"})
