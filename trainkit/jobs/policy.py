"""Whether a job is queued again after an attempt. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainkit.text import counted

# How an attempt was asked to end, or whose failure it was -> what `cluster.requeue.after` calls it.
KINDS = {
    "time_limit": "time_limit",
    "preemption": "preemption",
    "node": "node_failure",
    "unfit": "node_failure",
    "hang": "hang",
}
# The same -> how the run has ended where it is not queued again.
OUTCOMES = {
    "time_limit": "timed_out",
    "preemption": "preempted",
    "node": "node_lost",
    "unfit": "node_unfit",
    "hang": "hung",
    "cancel": "cancelled",
}


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """How an attempt ended. failure: as of the verdict; asked: by whom it was asked to end, empty for nobody.

    hosts: that are to blame. steps: of the newest checkpoint when each attempt so far began, and now. preemptions: how
    many of these attempts were preempted, or queued again by hand.
    """

    exit_code: int
    failure: str = ""
    why: str = ""
    asked: str = ""
    hosts: tuple[str, ...] = ()
    steps: Sequence[int] = ()
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """requeue: whether the job is queued again. outcome: in a word; why: for people. exclude: hosts to keep off."""

    requeue: bool
    outcome: str
    why: str
    exclude: tuple[str, ...] = ()


def decide(end: AttemptEnd, after: Sequence[str], without_progress: int) -> Decision:
    """What follows. after, without_progress: as of `cluster.requeue`."""
    if end.exit_code == 0 and end.asked != "cancel":
        return Decision(False, "done", "")
    if end.asked == "requeued":
        return Decision(True, "requeued", "it was queued again by scontrol")
    cause = end.asked or (end.failure if end.failure in KINDS else "failure")
    outcome = OUTCOMES.get(cause, "failed")
    if cause == "cancel" or KINDS.get(cause, cause) not in after:
        return Decision(False, outcome, end.why)
    stuck = attempts_without_progress(end.steps)
    if not any(end.steps):  # who is preempted before the first checkpoint has not failed to make one
        stuck -= end.preemptions
    if stuck >= without_progress:
        what = f"{counted(stuck, 'attempt')} brought no newer checkpoint than that of step {end.steps[-1]}"
        return Decision(False, "no_progress", f"{end.why}; {what}, so that it is not queued again")
    return Decision(True, outcome, end.why, end.hosts if cause in ("node", "unfit", "hang") else ())


def attempts_without_progress(steps: Sequence[int]) -> int:
    """How many of the last attempts began and ended with the same newest checkpoint."""
    count = 0
    for before, after in zip(reversed(steps[:-1]), reversed(steps[1:]), strict=True):
        if after > before:
            break
        count += 1
    return count
