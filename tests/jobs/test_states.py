"""What a run is doing, where its own files do not say that it has ended: by what the scheduler knows of its job."""

from __future__ import annotations

import pytest

from trainkit.jobs.records import Submission
from trainkit.jobs.states import RunState, by_scheduler
from trainkit.schedulers.interface import JobState


def ended(code: int | None = None, **known: str) -> JobState:
    return JobState("ended", exit_code=code, **known)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("scheduler", "known", "job", "word", "why", "code"),
    [
        ("slurm", "queued", JobState("queued", "Priority"), "queued", "Priority", None),
        ("slurm", "requeued", JobState("queued", "BeginTime"), "requeued", "BeginTime", None),
        # Slurm has queued it again before the run could write so.
        ("slurm", "running", JobState("queued", "BeginTime", restarts=1), "requeued", "BeginTime", None),
        ("slurm", "queued", JobState("running"), "starting", "", None),
        ("slurm", "running", JobState("running"), "running", "", None),
        ("kubernetes", "queued", JobState("running"), "running", "", None),
        ("slurm", "running", ended(0), "done", "Slurm: ended", 0),
        ("slurm", "running", ended(7, reason="NonZeroExitCode"), "failed", "Slurm: NonZeroExitCode", 7),
        ("slurm", "running", ended(None, why="cancelled"), "cancelled", "Slurm: cancelled", 143),
        ("slurm", "running", ended(None, why="node_failure"), "node_lost", "Slurm: node failure", 137),
        ("slurm", "running", ended(0, why="time_limit"), "timed_out", "Slurm: time limit", 143),
        ("slurm", "running", ended(125, why="out_of_memory"), "failed", "Slurm: out of memory", 125),
        # Nobody may take for a failure what is only not known.
        ("slurm", "running", JobState("unknown", "no answer"), "unknown", "by its files running; no answer", None),
        ("slurm", "running", JobState("unknown", "Invalid job id"), "lost", "Slurm knows job 17 no more", None),
    ],
)
def test_the_state_of_a_run_by_its_files_and_its_scheduler(
    scheduler: str, known: str, job: JobState, word: str, why: str, code: int | None
) -> None:
    found = by_scheduler(RunState(known), job, Submission(scheduler, "17", ()))
    assert (found.word, found.why, found.exit_code) == (word, why, code)
