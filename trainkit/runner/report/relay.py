"""What the user sees of a running run: the main rank's output and its progress."""

from __future__ import annotations

import os
import time

from trainkit.runner.report.console import Console, Stream
from trainkit.runner.report.follow import Records, Tail
from trainkit.runner.report.progress_line import Progress, live_line, plain_line
from trainkit.runner.rundir.layout import RunLayout

PLAIN_SECONDS = 1.0  # between two lines of progress where there is no live line …
PLAIN_SHARE = 0.02  # … and at least this share of the time so far, so that a long run's log stays short
AT_ONCE = 64  # chunks of output before anything else gets its turn


class Relay:
    """Follows the main rank's logs (its pseudo-terminal, where it has one) and metrics.jsonl."""

    def __init__(self, layout: RunLayout, attempt: int, console: Console) -> None:
        self.progress = Progress()
        self.shown_rank: int | None = None
        self._console = console
        self._logs = layout.attempt(attempt)
        self._tails: dict[Stream, Tail] = {}
        self._metrics = Records(layout.metrics)
        self._begin = self._said = time.monotonic()
        self._unsaid = ""

    def follow_logs(self, rank: int, streams: tuple[Stream, ...]) -> None:
        """Show the logs of this rank from their beginning."""
        self.shown_rank = rank
        self._tails = {stream: Tail(self._logs.log(rank, stream)) for stream in streams}

    def pass_on(self, fd: int) -> int | None:
        """Show what the pseudo-terminal brings; the number of bytes, None when its other side is closed."""
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return 0
        except OSError:  # EIO: nobody holds the other side any more
            return None
        self.shown_rank = 0
        self._console.program("out", data)
        return len(data) or None

    def turn(self) -> None:
        """Show what is new."""
        self._show_logs(AT_ONCE)
        for record in self._metrics.read():
            self.progress = self.progress.take(record, time.monotonic())
            line = plain_line(self.progress, record)
            if line:
                self._unsaid = line
                if not self._draw():
                    self._say_plain(due="evaluation" in line)
        if self.progress.latest is not None:
            self._draw()

    def finish(self) -> None:
        """Show the rest."""
        self._show_logs(None)
        self.turn()
        if self.progress.latest is None or not self._draw():
            self._say_plain(due=True)
        elif self._unsaid:
            self._console.say(self._unsaid)  # the live line is erased by what follows; its last state stays
        for tail in self._tails.values():
            tail.close()
        self._metrics.close()

    def _show_logs(self, most: int | None) -> None:
        for stream, tail in self._tails.items():
            left = most
            while (left is None or left > 0) and (data := tail.read()):
                self._console.program(stream, data)
                left = None if left is None else left - 1

    def _draw(self) -> bool:
        now = time.monotonic()
        return self._console.live(lambda width: live_line(self.progress, now, width))

    def _say_plain(self, *, due: bool) -> None:
        now = time.monotonic()
        due = due or now - self._said >= max(PLAIN_SECONDS, PLAIN_SHARE * (now - self._begin))
        if due and self._unsaid:
            self._console.say(self._unsaid)
            self._said, self._unsaid = now, ""
