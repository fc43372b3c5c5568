"""What a rank that makes no step says when it is asked: which collectives it has joined. Standard library only.

Waiting for a card keeps a processor busy: a program that hangs so seems to evaluate. Its flight recorder knows better.
And a program without an optimizer makes no steps at all: it moves while it joins collectives.
"""

from __future__ import annotations

import contextlib
import os
import stat

from trainkit.files import read_record, remove_file
from trainkit.runner.rundir.records import run_of
from trainkit.stamps import Flight

EVERY_SECONDS = 2.0  # between two questions, at least
FEW = 5  # collectives that a program joins while it starts up
STEADY = 20  # looks, a second apart, at which it had joined more: it does nothing else


def order(place: str, path: str) -> bool:
    """Have a program write what its flight recorder has to a path; whether it has been asked. place: of its pipe.

    An empty path: have it say how many collectives it has joined (`Page.joined`).
    """
    if not place or "\n" in path:
        return False
    with contextlib.suppress(OSError):
        orders = os.open(place, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            is_pipe = stat.S_ISFIFO(os.fstat(orders).st_mode)  # what has the wrapper's number there may be a file
            return is_pipe and os.write(orders, os.fsencode(f"{path}\n")) > 0
        finally:
            os.close(orders)
    return False


class Question:
    """Put to one rank, again and again while it makes no step. path: where the answer comes, in an attempt."""

    def __init__(self, path: str) -> None:
        self._path, self._run = path, run_of(os.path.dirname(path))
        self._asked = self._waits = 0.0

    def waits(self, place: str, since: float, every: float, now: float) -> float:
        """Seconds that it has waited in one collective, by its latest answer; 0 while there is none.

        place: of its pipe for orders. since: of its last step; answers from before it say nothing. every: seconds.
        """
        if self._asked < since:
            self._waits = 0.0
        elif (found := read_record(self._path, Flight, below=self._run)) and found.groups:
            self.remove()
            waiting = (each.seconds for group in found.groups.values() for each in group.waiting)
            self._waits = max(waiting, default=0.0)
        if now - self._asked > max(every, EVERY_SECONDS):
            self._asked = now
            self.remove()
            order(place, self._path)
        return self._waits

    def remove(self) -> None:
        """Leave no answer behind."""
        with contextlib.suppress(OSError):
            remove_file(self._path, below=self._run)


class Joins:
    """The collectives that a rank joins, by the number that it says. moved: when that was last seen to change."""

    def __init__(self) -> None:
        self.moved = 0.0
        self._number = self._looks = 0
        self._longest = 0.0  # between two changes

    def see(self, number: int, now: float) -> None:
        """Take in the newest number."""
        if number != self._number:
            if self._number:
                self._longest = max(self._longest, now - self.moved)
            self._number, self.moved = number, now
            self._looks += 1

    @property
    def is_steady(self) -> bool:
        """Whether it has joined collectives for long."""
        return self._looks >= STEADY

    def pause(self, after: float | None) -> float:
        """The longest time between two of them; 0 where they may be those of a start-up. after: as in `Limits`."""
        known = self.is_steady or (after is not None and self._number > FEW)
        return max(self._longest, EVERY_SECONDS) if known else 0.0
