"""Requests that arrive as signals, and how ranks agree on them at optimizer steps."""

from __future__ import annotations

import signal
from collections.abc import Sequence

# In the order in which they are obeyed when several arrived.
STOPPING = (signal.SIGTERM, signal.SIGINT)
SAVING = signal.SIGUSR1
WATCHED = (*STOPPING, SAVING)


class Requests:
    """Signals seen by this process. Handlers only take note; a repeated signal is the same request."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def listen(self, *numbers: signal.Signals) -> None:
        """Take over these signals. Until then they end the process at once, as they always do."""
        for number in numbers:
            signal.signal(number, lambda seen, frame: self._seen.add(seen))

    def votes(self) -> list[int]:
        """1 for each watched signal that this rank has seen. Travels with the token counts, in one collective."""
        return [int(number in self._seen) for number in WATCHED]

    def settle(self, votes: Sequence[int] | None = None) -> tuple[signal.Signals | None, bool]:
        """What to do after a step: the signal to stop for, and whether to save.

        votes: those of all ranks, summed; None for what this one has seen by now.
        """
        asked = [number for number, count in zip(WATCHED, votes or self.votes(), strict=True) if count]
        if SAVING in asked:
            # The request is granted, and the next one counts again.
            self._seen.discard(SAVING)
        return next((number for number in STOPPING if number in asked), None), SAVING in asked
