"""Keep a rank, and all that it starts, on some of the machine's cores."""

from __future__ import annotations

import os


def keep_to(shares: str, local_rank: int) -> None:
    """Take the cores of a local rank. shares: `0-7,16-23:8-15`, one list a local rank; empty leaves all as it is.

    Raises OSError where the system does not allow it, or has no such cores. The wrapper itself is bound, before it
    starts the program: children inherit the binding, so no thread of the program ever runs elsewhere, and memory that
    it touches first lies on the NUMA node of these cores.
    """
    if shares:
        os.sched_setaffinity(0, cores(shares.split(":")[local_rank]))


def cores(text: str) -> list[int]:
    """The cores that a list in the kernel's form names."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found
