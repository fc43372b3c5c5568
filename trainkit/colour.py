"""Colours of a terminal, by the role of a text: a state, a warning, a title."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from io import StringIO
from typing import Literal, TextIO

Role = Literal["good", "bad", "busy", "waiting", "stopped", "warning", "note", "title", "dim"]
# Of the eight colours that every terminal has, in the shades of the user's own theme: no fixed RGB. As rich names them.
STYLES: Mapping[Role, str] = {
    "good": "green",
    "bad": "bold red",
    "busy": "cyan",
    "waiting": "yellow",
    "stopped": "magenta",
    "warning": "bold yellow",
    "note": "bold cyan",
    "title": "bold",
    "dim": "dim",
}
_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "magenta": "35", "cyan": "36"}
# The role of a run's state (the words of `RunState`).
STATES: Mapping[str, Role] = {
    "done": "good",
    **dict.fromkeys(("failed", "hung", "no_progress", "node_lost", "node_unfit", "lost"), "bad"),
    **dict.fromkeys(("starting", "running"), "busy"),
    **dict.fromkeys(("queued", "requeued", "unknown"), "waiting"),
    **dict.fromkeys(("cancelled", "timed_out", "preempted"), "stopped"),
}
# Words that begin a line of trainkit's own: with a colon behind them, or as the first column of doctor's page.
LABELS: Mapping[str, Role] = {
    **dict.fromkeys(("error", "blocker", "problem"), "bad"),
    "warning": "warning",
    **dict.fromkeys(("note", "next", "fix"), "note"),
    "ok": "good",
    "skipped": "dim",
}
_LABEL = re.compile(rf"^( *)({'|'.join(LABELS)})(?=:|  )", re.MULTILINE)


class Colour:
    """Paints text for one stream, or for a descriptor.

    NO_COLOR (any value but an empty one) turns it off, else FORCE_COLOR turns it on; else it is on where the stream is
    a terminal that is not TERM=dumb. What programs read (--json) is never painted.
    """

    def __init__(self, stream: TextIO | int, environ: Mapping[str, str]) -> None:
        is_terminal = os.isatty(stream) if isinstance(stream, int) else stream.isatty()
        capable = is_terminal and environ.get("TERM", "") not in ("", "dumb")
        self.is_on = not environ.get("NO_COLOR") and (bool(environ.get("FORCE_COLOR")) or capable)

    def paint(self, text: str, role: Role) -> str:
        """The text in the colour of a role, or as it is. Strip control characters and pad columns before."""
        codes = ";".join(_CODES[word] for word in STYLES[role].split())
        return f"\x1b[{codes}m{text}\x1b[0m" if self.is_on and text else text

    def labels(self, text: str) -> str:
        """Lines of trainkit's own with their labels in colour: `warning: …`, `next: …`."""
        return _LABEL.sub(lambda found: found[1] + self.paint(found[2], LABELS[found[2]]), text) if self.is_on else text


NO_COLOUR = Colour(StringIO(), {})
