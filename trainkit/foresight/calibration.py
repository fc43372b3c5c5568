"""What runs took beside what was foreseen of them, and what follows from it for the next on the same device."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

from trainkit.foresight.speed import WORK, Pace

MOST = 64  # records of a device that are kept, the newest
LEAST = 6  # records from which rates are fitted; fewer only scale the data sheet's
ROUNDS = 400  # of the fit


class Record(NamedTuple):
    """A run. Bytes and seconds; 0 where it was not measured. work: as of :func:`trainkit.foresight.speed.work_of`.

    foreseen: seconds of a step by the rates of the data sheet. beside: what the driver counted beside torch's.
    """

    seconds: float = 0.0
    foreseen: float = 0.0
    beside: int = 0
    allocated: int = 0
    allocated_foreseen: int = 0
    work: Mapping[str, float] = {}


def device_key(name: str, driver: str, torch: str) -> str:
    """The name of a device's file."""
    return hashlib.sha256("\n".join((name, driver, torch)).encode()).hexdigest()[:16]


def records_of(data: Mapping[str, Any]) -> list[Record]:
    """The records of a device's file, as far as they can be read."""
    found = data.get("records")
    kept = [each for each in found if isinstance(each, Mapping)] if isinstance(found, list) else []
    return [Record(**{name: each[name] for name in Record._fields if name in each}) for each in kept]


def beside(records: Sequence[Record]) -> int | None:
    """Bytes of a process beside what torch allocates; None where no run was measured."""
    found = [each.beside for each in records if each.beside > 0]
    return int(median(found)) if found else None


def calibrated(pace: Pace, records: Sequence[Record]) -> Pace:
    """The rates as they were measured; of a few runs the data sheet's, scaled."""
    timed = [each for each in records if each.seconds > 0 and each.foreseen > 0]
    if not timed:
        return pace
    if len(timed) >= LEAST and pace.adds:
        return _fitted(pace, timed)
    slower = median(each.seconds / each.foreseen for each in timed)
    flops = {name: rate / slower for name, rate in pace.flops.items()}
    rates = replace(pace, flops=flops, bandwidth=pace.bandwidth / slower, dispatch=pace.dispatch * slower)
    return replace(rates, measured=True)


def _fitted(pace: Pace, timed: Sequence[Record]) -> Pace:
    """Rates with which the relative errors of the runs' times are least, none of them below zero."""
    # Coordinate descent of non-negative least squares, from the data sheet's rates on; each run weighs alike.
    rows = [[each.work.get(name, 0.0) / each.seconds for name in WORK] for each in timed]
    costs = [1 / pace.flops["fp32"], 1 / pace.flops["bf16"], 1 / pace.bandwidth, pace.dispatch]
    for _ in range(ROUNDS):
        for place in range(len(WORK)):
            square = sum(row[place] ** 2 for row in rows)
            if not square:
                continue
            rest = [1 - sum(cost * value for cost, value in zip(costs, row, strict=True)) for row in rows]
            change = sum(row[place] * left for row, left in zip(rows, rest, strict=True)) / square
            costs[place] = max(0.0, costs[place] + change)
    full, half, moved, operators = (max(each, 1e-18) for each in costs)
    flops = {"fp32": 1 / full, "bf16": 1 / half, "fp16": 1 / half}
    return replace(pace, flops=flops, bandwidth=1 / moved, dispatch=operators, measured=True)
