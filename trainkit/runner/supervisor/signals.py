"""Signals: which end a run, which go to its ranks, and how a loop is woken by them."""

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
    except ValueError:  # real-time signals have no name
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
