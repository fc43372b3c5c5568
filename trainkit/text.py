"""Numbers with their nouns and sizes with their units, for the sentences of plans and findings."""

from __future__ import annotations

KIB, MIB, GIB = 2**10, 2**20, 2**30


def counted(number: int, word: str, plural: str = "s") -> str:
    """``1 rank``, ``2 ranks``; plural: what the noun ends with when there are several."""
    return f"{number} {word}" if number == 1 else f"{number} {word}{plural}"


def format_size(size: int) -> str:
    """Bytes as ``64 MiB`` or ``1.5 GiB``."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}" if size < 100 * unit else f"{size / unit:.0f} {name}"
    return f"{size} bytes"
