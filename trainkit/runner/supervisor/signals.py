"""What trainkit does on signals while a run is on: tell the guardian at once, even while a terminal blocks."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from trainkit.runner.report.exit_status import signal_name

STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)

Tell = Callable[[dict[str, object]], None]


class Orders:
    """Signals received, in order, and what the guardian is told of them."""

    def __init__(self, tell: Tell, on_stop: Callable[[], None]) -> None:
        self.stopped_by: int | None = None
        self.insists = False  # a second Ctrl-C
        self.on_resize: Callable[[], None] = lambda: None  # of the terminal
        self._tell = tell
        self._on_stop = on_stop

    def take(self, number: int, _frame: FrameType | None) -> None:
        """The handler. Sending from here, not from the loop, works while the loop is blocked in a write."""
        if number in PASSED_ON:
            self._tell({"do": "signal", "signal": number})
        elif number == signal.SIGWINCH:
            self.on_resize()
        elif self.stopped_by is None:
            self.stopped_by = number
            self._on_stop()
            self._tell({"do": "stop", "signal": number, "why": f"trainkit received {signal_name(number)}"})
        elif number == signal.SIGINT:
            self.insists = True
            self._tell({"do": "kill"})


@contextmanager
def handled(orders: Orders) -> Iterator[None]:
    """Handle signals for the time of a run. A HUP that nohup made ignored stays ignored."""
    wanted = [*STOP, *PASSED_ON, signal.SIGWINCH]
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        wanted.remove(signal.SIGHUP)
    before: dict[signal.Signals, Any] = {number: signal.signal(number, orders.take) for number in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
