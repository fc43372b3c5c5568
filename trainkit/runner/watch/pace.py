"""How long a rank's steps take, and how much of that is its own time; who is slower than the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from trainkit.runner.rundir.records import Name, RankKey, Seconds
from trainkit.runner.watch.timing import median
from trainkit.stamps import read_paces

FEW = 10  # steps of which nothing is said
SLOWER = 1.3  # times the median of all ranks
SHARE = 0.1  # of a step that the difference makes at least: less holds nobody up


class Pace(NamedTuple):
    """Medians of a rank's latest steps, in seconds. own: outside of what waits for other ranks; 0 where unknown."""

    host: Name
    step: Seconds
    own: Seconds


BY_RANK: Any = Mapping[RankKey, Pace]


def pace_of(host: str, page: bytes) -> Pace | None:
    """From a rank's page; None where it has made too few steps."""
    steps = read_paces(page) if page else []
    if len(steps) < FEW:
        return None
    return Pace(host, *(round(median([each[part] for each in steps]), 6) for part in (0, 1)))


def stragglers(paces: Mapping[int, Pace]) -> list[dict[str, Any]]:
    """Ranks whose own time for a step is over 1.3 times the median of all, the slowest first.

    Of an even number of ranks the lower median counts, so that of two ranks the slower one can be seen.
    """
    known = {rank: pace for rank, pace in paces.items() if pace.own > 0}
    if len(known) < 2:
        return []
    usual = median([pace.own for pace in known.values()])
    step = median([pace.step for pace in known.values()])
    slow = [
        {"rank": rank, "host": pace.host, "own_seconds": pace.own, "median_seconds": usual}
        for rank, pace in known.items()
        if pace.own > SLOWER * usual and pace.own - usual > SHARE * step
    ]
    return sorted(slow, key=lambda each: -float(str(each["own_seconds"])))
