"""When a run counts as hanging, and which ranks are slow: rules over step times. Standard library only."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from trainkit.decode import DecodeError, decode
from trainkit.files import publish, read_record
from trainkit.heartbeat import CHECKPOINT, EVALUATION, PHASES, STEPS
from trainkit.runner.rundir.records import PACES, Name, RankKey, Seconds, run_of

LEAST_SECONDS = 120.0  # the lowest limit, if the recipe sets none
STEPS_LONG, PHASES_LONG = 20, 3  # the limit in median steps, and in the longest times of the same phase
FEW = 5  # steps, too few for a median
FEW_PACES = 10  # steps, too few for a pace
SLOWER = 1.3  # times the median of all ranks
SHARE = 0.1  # the least excess over the median, as a share of a step: less delays no other rank


def median(values: Collection[float]) -> float:
    """The lower one of the two values in the middle."""
    # Loading Python's statistics module takes longer than loading the whole guardian.
    return sorted(values)[(len(values) - 1) // 2]


class Limits(NamedTuple):
    """The plan's limits in seconds. after: None to learn it from step times, 0 for no watch.

    start: for phases that have not ended once, such as the first checkpoint. ends: whether a hang ends the run.
    """

    after: float | None = None
    start: float = 1800.0
    ends: bool = False


class PhaseTiming(NamedTuple):
    """How long a rank has not moved, and how long its phases take. moved: when it last did, by a monotonic clock.

    phase: None for a program without a heartbeat: only its processor time and output are known. longest: the most
    seconds that each phase has taken. steps: seconds of the latest steps. may: the limit, if it does not depend on the
    rank's step times. pause: the longest time between two collectives, before the first optimizer step and after the
    start-up; steady: whether there have been many of them.
    """

    rank: int
    moved: float
    phase: int | None = None
    longest: Sequence[float] = ()
    steps: Sequence[float] = ()
    may: float | None = None
    pause: float = 0.0
    steady: bool = False

    def limit(self, limits: Limits) -> float:
        """Seconds without a move after which the rank counts as hanging."""
        if self.may is not None:
            return self.may
        if self.phase is None:
            return max(limits.start, limits.after or 0.0) if limits.after is None else limits.after
        longest = self.longest[self.phase] or self.pause
        if not longest:
            return max(limits.start, limits.after or 0.0)
        # Checkpoints and evaluations may take longer over time, and the recipe's limit is for steps.
        if limits.after is not None and self.phase not in (CHECKPOINT, EVALUATION):
            return limits.after
        usual = median(self.steps) if len(self.steps) >= FEW else 0.0
        return max(limits.after or LEAST_SECONDS, STEPS_LONG * usual, PHASES_LONG * longest)


def stalled(ranks: Collection[PhaseTiming], limits: Limits, now: float) -> bool:
    """Whether all of these ranks, at least one, are over their limit."""
    return bool(ranks) and all(now - each.moved > each.limit(limits) for each in ranks)


def is_sure(ranks: Collection[PhaseTiming]) -> bool:
    """Whether all of them have a heartbeat; without one a hang is only reported, and does not end the run."""
    return all(each.phase is not None and (any(each.longest) or each.steady) for each in ranks)


def where(phase: int | None, step: int) -> str:
    """``backward of step 14``: the current step, from 1; ``evaluation after step 2``: the last finished one."""
    if phase is None:
        return ""
    if phase in (CHECKPOINT, EVALUATION):
        return f"{PHASES[phase]} after step {step}"
    return f"step {step + 1}" if phase == STEPS else f"{PHASES[phase]} of step {step + 1}" if phase else "the start-up"


class Pace(NamedTuple):
    """Medians of a rank's latest steps, in seconds. own: without waiting for other ranks; 0 if unknown."""

    host: Name
    step: Seconds
    own: Seconds


BY_RANK: Any = Mapping[RankKey, Pace]


def pace_of(host: str, steps: Sequence[tuple[float, float]]) -> Pace | None:
    """The pace by a rank's latest steps, as `read_paces` has them; None for too few."""
    if len(steps) < FEW_PACES:
        return None
    return Pace(host, *(round(median([each[part] for each in steps]), 6) for part in (0, 1)))


def stragglers(paces: Mapping[int, Pace]) -> list[dict[str, Any]]:
    """Ranks whose own time for a step is over 1.3 times the median of all, the slowest first.

    The lower median counts, so that of two ranks the slower one is found.
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


def saved_paces(attempt_dir: str) -> dict[int, Pace]:
    """The paces of all ranks as they were saved last; none of a single rank."""
    known = read_record(os.path.join(attempt_dir, PACES), BY_RANK, below=run_of(attempt_dir))
    return {int(rank): pace for rank, pace in (known or {}).items()}


def save_paces(attempt_dir: str, own: Mapping[int, Pace], kept: Iterable[Mapping[str, Any]]) -> None:
    """Write the paces of all ranks, on node 0. kept: messages of the other nodes."""
    found = dict(own)
    for message in kept:
        with contextlib.suppress(DecodeError):  # an invalid message
            found |= {int(rank): pace for rank, pace in decode(BY_RANK, message.get("paces", {})).items()}
    if len(found) > 1:
        with contextlib.suppress(OSError):  # a full disk: the summary lacks a line
            content = json.dumps({rank: found[rank] for rank in sorted(found)}) + "\n"
            publish(os.path.join(attempt_dir, PACES), content, below=run_of(attempt_dir))
