"""What follows an attempt: the job is queued again, or the run has ended."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainkit.schedulers.jobs.job_script import AttemptEnd, attempts_without_progress, decide

AFTER = ("time_limit", "preemption", "node_failure", "hang")  # as by default
LOST = AttemptEnd(137, failure="node", why="node 1 (tk2) was lost", hosts=("tk2",), steps=(0, 10))
HUNG = AttemptEnd(124, failure="hang", why="rank 1 hangs", hosts=("tk3",), steps=(0, 10))


@pytest.mark.parametrize(
    ("end", "outcome", "exclude"),
    [
        (AttemptEnd(143, "signal", asked="time_limit", steps=(0, 10)), "timed_out", ()),
        (AttemptEnd(143, "signal", asked="preemption", steps=(0, 10)), "preempted", ()),
        (LOST, "node_lost", ("tk2",)),
        (replace(LOST, failure="unfit"), "node_unfit", ("tk2",)),
        (HUNG, "hung", ("tk3",)),
        # Whoever queued it again wants it so, whatever the recipe says, and also without progress.
        (AttemptEnd(143, "signal", asked="requeued", steps=(5, 5, 5, 5, 5)), "requeued", ()),
    ],
)
def test_what_is_nobodys_fault_is_queued_again_without_the_machines_to_blame(
    end: AttemptEnd, outcome: str, exclude: tuple[str, ...]
) -> None:
    found = decide(end, AFTER, 3)
    assert (found.requeue, found.outcome, found.exclude) == (True, outcome, exclude)


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        (AttemptEnd(0), "done"),
        (AttemptEnd(0, asked="time_limit"), "done"),  # it was asked to end, and had nothing left to do
        (AttemptEnd(7, "rank", "rank 1 exited with code 7", steps=(0, 10)), "failed"),
        (AttemptEnd(143, "signal", asked="cancel", steps=(0, 10)), "cancelled"),
        (AttemptEnd(0, asked="cancel"), "cancelled"),
        (replace(LOST, asked="cancel"), "cancelled"),
    ],
)
def test_an_end_of_its_own_is_the_end_of_the_run(end: AttemptEnd, outcome: str) -> None:
    found = decide(end, AFTER, 3)
    assert (found.requeue, found.outcome, found.why) == (False, outcome, end.why)


@pytest.mark.parametrize(("end", "outcome"), [(LOST, "node_lost"), (HUNG, "hung")])
def test_the_recipe_says_what_a_job_is_queued_again_after(end: AttemptEnd, outcome: str) -> None:
    found = decide(end, ("time_limit",), 3)
    assert (found.requeue, found.outcome) == (False, outcome)
    failed = AttemptEnd(7, "rank", "rank 1 exited with code 7", steps=(0, 10))
    assert decide(failed, (*AFTER, "failure"), 3).requeue


def test_a_run_without_progress_ends_and_says_so() -> None:
    stuck = replace(LOST, steps=(10, 10, 10))
    assert decide(stuck, AFTER, 3).requeue
    found = decide(stuck, AFTER, 2)
    assert (found.requeue, found.outcome) == (False, "no_progress")
    assert found.why == (
        "node 1 (tk2) was lost; 2 attempts brought no newer checkpoint than that of step 10, "
        "so that it is not queued again"
    )


def test_preemptions_before_the_first_checkpoint_are_no_lack_of_progress() -> None:
    taken = AttemptEnd(143, "signal", asked="preemption", steps=(0, 0, 0, 0), preemptions=3)
    assert decide(taken, AFTER, 3).requeue
    hung = replace(HUNG, steps=(0, 0, 0, 0))
    assert decide(replace(hung, preemptions=1), AFTER, 3).requeue
    assert not decide(hung, AFTER, 3).requeue
    assert not decide(replace(taken, steps=(10, 10, 10, 10)), AFTER, 3).requeue  # it had the time for one before


@pytest.mark.parametrize(
    ("steps", "count"), [((), 0), ((0,), 0), ((0, 0), 1), ((0, 10), 0), ((0, 0, 10), 0), ((0, 10, 10, 10), 2)]
)
def test_attempts_without_progress_are_counted_from_the_last(steps: tuple[int, ...], count: int) -> None:
    assert attempts_without_progress(steps) == count
