"""Standard output and error that cannot fail on a character, and stand in for themselves where they are closed."""

from __future__ import annotations

import codecs
import io
import os
import sys

# What a terminal that knows only ASCII shows for the characters that trainkit itself writes.
_PLAIN = {
    "\N{MULTIPLICATION SIGN}": "x",
    "\N{RIGHTWARDS ARROW}": "->",
    "\N{HORIZONTAL ELLIPSIS}": "...",
    "·": "-",
    "\N{FULL BLOCK}": "#",
    "\N{LIGHT SHADE}": ".",
    "\N{DEGREE SIGN}": "",
}
_ERRORS = "trainkit"


def prepare() -> None:
    """Make both streams safe to write to, whatever the locale and the caller's redirections."""
    codecs.register_error(_ERRORS, _nearest)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the caller (`>&-`)
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115 - lives as long as we do
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_ERRORS)


def write_script(text: str) -> None:
    """Write a text that a program will read to standard output: in UTF-8, names of files byte for byte."""
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))


def _nearest(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    char = error.object[error.start]
    if "\udc80" <= char <= "\udcff":  # a byte of a file's name that is no UTF-8: Python keeps it so
        return bytes((ord(char) - 0xDC00,)), error.start + 1
    return _PLAIN.get(char, char.encode("ascii", "backslashreplace").decode("ascii")), error.start + 1
