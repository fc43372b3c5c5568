"""Lists of CPU cores as the kernel writes them, and a process kept on some of them (CPU pinning).

Standard library only: every rank's wrapper uses it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence


def keep_to(shares: str, local_rank: int) -> None:
    """Pin this process to the cores of a local rank. shares: `0-7,16-23:8-15`, one list a local rank; empty for none.

    Raises OSError where the system does not allow it, or has no such cores.
    """
    # The wrapper itself is bound, before it starts the program: children inherit the binding, so no thread of the
    # program ever runs elsewhere, and memory that it touches first is on the NUMA node of these cores.
    if shares:
        os.sched_setaffinity(0, core_list(shares.split(":")[local_rank]))


def core_list(text: str) -> tuple[int, ...]:
    """The cores that a list names: ``0-3,8`` (linux/Documentation/admin-guide/kernel-parameters, cpu lists)."""
    ranges = (part.partition("-") for part in text.strip().split(",") if part)
    return tuple(core for first, _, last in ranges for core in range(int(first), int(last or first) + 1))


def core_ranges(cores: Sequence[int]) -> str:
    """Cores as the kernel lists them: ``0-3,8``."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][-1] + 1:
            parts[-1].append(core)
        else:
            parts.append([core])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
