"""Inside the user's program: how many steps its first optimizer takes, and how long they take.

Standard library only. It is written every few seconds and at the end, so that a killed program is known about, too.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

EVERY_SECONDS = 5.0  # between two writes


class StepCounter:
    """Counts from the first step on. Times are seconds of a monotonic clock, from step to step as they begin.

    The file holds `steps`, `seconds` from the first of them to the last, and `first_seconds` from the first to the
    second, in which most programs compile and warm up.
    """

    def __init__(self, path: str, optimizer: Any, publish: Callable[[str, str], None]) -> None:
        """optimizer: the one that takes its first step now; others are not counted. publish: writes a file whole."""
        self._path, self._optimizer, self._publish = path, id(optimizer), publish
        self._begin = self._latest = self._written = time.monotonic()
        self._steps, self._first = 1, 0.0
        atexit.register(self._write)

    def count(self, optimizer: Any) -> None:
        """Note that an optimizer takes a further step."""
        if id(optimizer) != self._optimizer:
            return
        self._latest = time.monotonic()
        self._steps += 1
        if self._steps == 2:
            self._first = self._latest - self._begin
        if self._latest - self._written >= EVERY_SECONDS:
            self._written = self._latest
            self._write()

    def _write(self) -> None:
        seen = {"steps": self._steps, "seconds": self._latest - self._begin, "first_seconds": self._first}
        with contextlib.suppress(OSError):  # the run's folder is gone or full: the program goes on
            self._publish(self._path, json.dumps(seen))
