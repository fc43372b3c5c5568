"""Numbers with their nouns, for the sentences of a plan."""

from __future__ import annotations


def counted(number: int, word: str, plural: str = "s") -> str:
    """``1 rank``, ``2 ranks``; plural: what the noun ends with when there are several."""
    return f"{number} {word}" if number == 1 else f"{number} {word}{plural}"
