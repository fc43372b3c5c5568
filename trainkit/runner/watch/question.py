"""Whether a rank that computes, and makes no step, waits in a collective all the same. Standard library only.

Waiting for a card keeps a processor busy: a program that hangs so seems to evaluate. Its flight recorder knows better.
"""

from __future__ import annotations

import contextlib
import os

from trainkit.files import read_json

EVERY_SECONDS = 2.0  # between two questions, at least


def order(place: str, path: str) -> bool:
    """Have a program write what its flight recorder has to a path; whether it has been asked. place: of its pipe."""
    if not place or "\n" in path:
        return False
    with contextlib.suppress(OSError):
        orders = os.open(place, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return os.write(orders, os.fsencode(f"{path}\n")) > 0
        finally:
            os.close(orders)
    return False


class Question:
    """Put to one rank, again and again while it makes no step. path: where the answer comes."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._asked = self._waits = 0.0

    def waits(self, place: str, since: float, every: float, now: float) -> float:
        """Seconds that it has waited in one collective, by its latest answer; 0 while there is none.

        place: of its pipe for orders. since: of its last step; answers from before it say nothing. every: seconds.
        """
        if self._asked < since:
            self._waits = 0.0
        elif groups := read_json(self._path).get("groups"):
            self.remove()
            self._waits = max((each[2] for group in groups.values() for each in group["waiting"]), default=0.0)
        if now - self._asked > max(every, EVERY_SECONDS):
            self._asked = now
            self.remove()
            order(place, self._path)
        return self._waits

    def remove(self) -> None:
        """Leave no answer behind."""
        with contextlib.suppress(OSError):
            os.unlink(self._path)
