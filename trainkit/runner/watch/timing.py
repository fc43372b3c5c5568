"""When a run counts as one that hangs: pure rules over what is known of its ranks. Standard library only."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from trainkit.stamps import CHECKPOINT, EVALUATION, PHASES, STEPS

LEAST_SECONDS = 120.0  # that a run may stand still, where the recipe leaves it open
STEPS_LONG, PHASES_LONG = 20, 3  # as many median steps, or the longest of the same phase
FEW = 5  # steps of which a median says little


def median(values: Collection[float]) -> float:
    """Of at least one value, the lower one of the two in the middle."""
    # Python's own module of statistics takes longer to load than all of the guardian.
    return sorted(values)[(len(values) - 1) // 2]


class Limits(NamedTuple):
    """What the plan says. after: None where the run's own pace decides, 0 for no watch. Seconds.

    start: for what has not happened once in this run: the first step, the first checkpoint. ends: whether the run ends.
    """

    after: float | None = None
    start: float = 1800.0
    ends: bool = False


class Standing(NamedTuple):
    """A rank that may be standing still. moved: when it was last seen to move; times are of one monotonic clock.

    phase: None for a program that writes no stamps, of which only its use of the processor and its output are seen.
    longest: seconds that each phase has taken at most; steps: seconds of the latest ones. may: seconds that it may
    stand still, where that does not depend on its own pace. pause: the longest time between two collectives, where no
    optimizer has stepped yet and they are no start-up's; steady: whether they have gone on for long.
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
        """Seconds after which standing still is too long."""
        if self.may is not None:
            return self.may
        if self.phase is None:
            return max(limits.start, limits.after or 0.0) if limits.after is None else limits.after
        longest = self.longest[self.phase] or self.pause
        if not longest:
            return max(limits.start, limits.after or 0.0)
        # Checkpoints and evaluations grow, and are no steps that the recipe can have meant.
        if limits.after is not None and self.phase not in (CHECKPOINT, EVALUATION):
            return limits.after
        usual = median(self.steps) if len(self.steps) >= FEW else 0.0
        return max(limits.after or LEAST_SECONDS, STEPS_LONG * usual, PHASES_LONG * longest)


def stalled(ranks: Collection[Standing], limits: Limits, now: float) -> bool:
    """Whether none of these ranks has moved for as long as it may. False where there is none."""
    return bool(ranks) and all(now - each.moved > each.limit(limits) for each in ranks)


def is_sure(ranks: Collection[Standing]) -> bool:
    """Whether all of them say themselves when they move; of others it is reported, and nothing is ended for it."""
    return all(each.phase is not None and (any(each.longest) or each.steady) for each in ranks)


def where(phase: int | None, step: int) -> str:
    """``backward of step 14``, counted from 1: the step being made; ``evaluation after step 2``, which is done."""
    if phase is None:
        return ""
    if phase in (CHECKPOINT, EVALUATION):
        return f"{PHASES[phase]} after step {step}"
    return f"step {step + 1}" if phase == STEPS else f"{PHASES[phase]} of step {step + 1}" if phase else "the start-up"
