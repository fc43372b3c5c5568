"""Colours of a terminal, by the role of a text: a state, a warning, a title."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TextIO

Role = Literal["good", "bad", "busy", "waiting", "stopped", "warning", "note", "title", "dim"]
# The eight colours that every terminal has, in the shades of the user's own theme: no fixed RGB.
_CODES: Mapping[Role, str] = {
    "good": "32",
    "bad": "1;31",
    "busy": "36",
    "waiting": "33",
    "stopped": "35",
    "warning": "1;33",
    "note": "1;36",
    "title": "1",
    "dim": "2",
}
# The role of a run's state (the words of `RunState`).
STATES: Mapping[str, Role] = {
    "done": "good",
    **dict.fromkeys(("failed", "hung", "no_progress", "node_lost", "node_unfit", "lost"), "bad"),
    **dict.fromkeys(("starting", "running"), "busy"),
    **dict.fromkeys(("queued", "requeued", "unknown"), "waiting"),
    **dict.fromkeys(("cancelled", "timed_out", "preempted"), "stopped"),
}


class Colour:
    """Paints text for one stream.

    NO_COLOR (any value but an empty one) turns it off, else FORCE_COLOR turns it on; else it is on where the stream is
    a terminal that is not TERM=dumb. What programs read (--json) is never painted.
    """

    def __init__(self, stream: TextIO, environ: Mapping[str, str]) -> None:
        capable = stream.isatty() and environ.get("TERM", "") not in ("", "dumb")
        self.is_on = not environ.get("NO_COLOR") and (bool(environ.get("FORCE_COLOR")) or capable)

    def paint(self, text: str, role: Role) -> str:
        """The text in the colour of a role, or as it is. Strip control characters and pad columns before."""
        return f"\x1b[{_CODES[role]}m{text}\x1b[0m" if self.is_on and text else text
