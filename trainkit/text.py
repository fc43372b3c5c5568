"""Numbers with their nouns, sizes with their units, and tables: for the sentences of plans and findings."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

KIB, MIB, GIB = 2**10, 2**20, 2**30
# Control characters but for line ends and tabs, what turns the direction of a text, and bytes that are no UTF-8.
_OBEYED = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\udc80-\udcff]+")


def strip_control(text: str) -> str:
    """The text, its lines and tabs, without anything else that a terminal would obey.

    Names of files, values of recipes and records of runs come from others, and may hold escape sequences.
    """
    if not text.isprintable():
        for char in set(text) - {"\n", "\t"}:
            if not char.isprintable():
                text = text.replace(char, "\ufffd")
    return text


def script_word(text: str) -> str:
    """A word of a POSIX script. What a terminal would obey is made by printf, so that the script may be shown."""

    def made(match: re.Match[str]) -> str:
        octal = "".join(f"\\{byte:03o}" for byte in match[0].encode("utf-8", "surrogateescape"))
        return f"'\"$(printf '{octal}')\"'"

    return _OBEYED.sub(made, shlex.quote(text))  # each of these is within single quotes


def shown_word(text: str) -> str:
    """A word as a person can read it and bash takes it, line ends and control characters as escapes: `$'a\\nb'`."""
    if text.isprintable():
        return shlex.quote(text)
    return "$'" + "".join(map(_escape, text)) + "'"


def _escape(char: str) -> str:
    if "\udc80" <= char <= "\udcff":  # a byte of a file's name that is not UTF-8, as Python keeps it
        return f"\\x{ord(char) - 0xDC00:02x}"
    if char.isprintable():
        return f"\\{char}" if char in "\\'" else char
    return char.encode("unicode_escape").decode("ascii")


def every(steps: float) -> str:
    """``every 100 steps``, ``every 25% of the steps``."""
    return f"every {steps * 100:.3g}% of the steps" if 0 < steps < 1 else f"every {pluralize(int(steps), 'step')}"


def pluralize(number: int, word: str, plural: str = "s") -> str:
    """``1 rank``, ``2 ranks``; plural: what the noun ends with when there are several."""
    return f"{number} {word}" if number == 1 else f"{number} {word}{plural}"


def join_names(names: Sequence[str], most: int = 8) -> str:
    """The names with commas between; of more than `most` the first ones, and how many follow."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def format_size(size: int) -> str:
    """Bytes as ``64 MiB`` or ``1.5 GiB``."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}" if size < 100 * unit else f"{size / unit:.0f} {name}"
    return f"{size} bytes"


def format_rate(value: float) -> str:
    """A rate with a sensible number of digits: ``7.12``, ``431``, ``52.3k``."""
    if value >= 10_000:
        return f"{value / 1000:.1f}k" if value < 1e6 else f"{value / 1e6:.2f}M"
    return f"{value:.0f}" if value >= 100 else f"{value:.2f}"


def format_measure(value: float) -> str:
    """A loss or a metric: ``2.5671``; one that has exploded without its many digits, ``5.185e+21``."""
    return f"{value:.4f}" if abs(value) < 1e7 else f"{value:.4g}"


def format_memory(value: float) -> str:
    """Bytes as MiB or GiB."""
    return f"{value / MIB:.0f} MiB" if value < 10 * GIB else f"{value / GIB:.1f} GiB"


def format_duration(seconds: float) -> str:
    """``42 s``, ``3:07``, ``1:02:30``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_seconds(seconds: float) -> str:
    """``0.034 s``, ``2.1 s``, ``3:07``."""
    return f"{seconds:.3f} s" if seconds < 1 else f"{seconds:.1f} s" if seconds < 60 else format_duration(seconds)


def format_age(seconds: float) -> str:
    """The largest unit of a time, rounded down: ``42 s``, ``3 min``, ``5 h``, ``12 d``."""
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{int(seconds // unit)} {name}"
    return f"{max(0, int(seconds))} s"


def wrapped(text: str, width: int, first: str = "", rest: str = "") -> list[str]:
    """A paragraph as lines of at most `width` columns but for longer words. first, rest: what the lines begin with."""
    return textwrap.TextWrapper(width, first, rest, break_long_words=False, break_on_hyphens=False).wrap(text)


def table(rows: Iterable[Sequence[str]]) -> str:
    """The rows below each other, a line each, with their columns aligned to the left."""
    cells = list(rows)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)
    return "".join(f"{line.rstrip()}\n" for line in lines)


class Column(NamedTuple):
    """A column of a table that fits a terminal.

    least: characters to which its cells may be shortened, keeping their start or end; 0 for never. paint: colours a
    cell that has its full width.
    """

    head: str
    cells: Sequence[str]
    least: int = 0
    keeps: Literal["start", "end"] = "start"
    paint: Callable[[str], str] = str


def shortened(text: str, width: int, keeps: Literal["start", "end"] = "start") -> str:
    """A text of at most `width` characters, with … for what is left out."""
    if len(text) <= width:
        return text
    return f"{text[: width - 1]}…" if keeps == "start" else f"…{text[len(text) - width + 1 :]}"


def fitted_table(columns: Sequence[Column], needed: Sequence[str], extra: Sequence[str], width: int | None) -> str:
    """Columns beside each other in so many characters, never wrapped; in an empty cell is a dash.

    needed, extra: heads of the columns, the most important ones first. Where there is no room, an extra column is left
    out before cells of others are shortened, the last one first; a needed one, where shortening is not enough. Empty
    columns are left out too. width: None for no limit.
    """
    kept = [each for each in columns if any(each.cells)]
    widths = {each.head: max(map(len, (each.head, *each.cells))) for each in kept}
    # A head is never shortened.
    shortest = {each.head: max(each.least, len(each.head)) if each.least else widths[each.head] for each in kept}
    least = {head: min(shortest[head], widths[head]) for head in widths}
    by_importance = [head for head in reversed((*needed, *extra)) if head in widths]
    for at, head in enumerate(by_importance if width is not None else ()):
        full = by_importance[at + 1 :] if head in extra else ()
        room = sum(2 + (widths if each.head in full else least)[each.head] for each in kept) - 2
        if room > (width or 0) and len(kept) > 1:
            kept = [each for each in kept if each.head != head]
    excess = sum(2 + widths[each.head] for each in kept) - 2 - width if width is not None else 0
    for head in by_importance:
        if any(each.head == head for each in kept):
            cut = max(0, min(excess, widths[head] - least[head]))
            widths[head] -= cut
            excess -= cut
    lines = ["  ".join(each.head.ljust(widths[each.head]) for each in kept).rstrip()]
    for row in range(len(kept[0].cells) if kept else 0):
        cells = ((each, shortened(each.cells[row] or "-", widths[each.head], each.keeps)) for each in kept)
        lines.append("  ".join(each.paint(cell.ljust(widths[each.head])) for each, cell in cells).rstrip())
    return "".join(f"{line}\n" for line in lines)
