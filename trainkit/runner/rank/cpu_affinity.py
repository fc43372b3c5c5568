"""Keep a process, and all that it starts, on some of the machine's cores. Stdlib only: it runs in each rank."""

from __future__ import annotations

import os


def keep_to(shares: str, local_rank: int) -> None:
    """Take the cores of a local rank. shares: `0-7,16-23:8-15`, one list a local rank; empty leaves all as it is.

    Raises OSError where the system does not allow it.
    """
    if shares:
        os.sched_setaffinity(0, numbers(shares.split(":")[local_rank]))


def numbers(text: str) -> list[int]:
    """The cores that a list in the kernel's form names."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found
