"""What a run is doing, told in one place for every command: by its own files where they know, else by the scheduler.

An unknown state is no failure, and a run whose state is unknown is never removed.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainkit.errors import ExitCode, MachineError
from trainkit.files import is_there, read_record
from trainkit.runner.report.exit_status import KILLED
from trainkit.runner.rundir.layout import RunLayout
from trainkit.runner.rundir.listing import RunInfo, is_linked, is_running, read_status, remove
from trainkit.runner.rundir.records import Status
from trainkit.schedulers.base import SCRIPT, Answer, Job, JobState, Query, RefusedError, Scheduler, State
from trainkit.schedulers.client import ask
from trainkit.schedulers.jobs.records import (
    DAMAGED,
    SUBMISSION,
    Submission,
    hosts_of,
    is_being_started,
    pending_request,
    read_submission,
)
from trainkit.schedulers.registry import SCHEDULERS

STOPPED = 128 + signal.SIGTERM
STATUS_DAMAGED = "status.json is damaged"
# How a job has ended by the scheduler's word alone -> what that is called of a run, and the exit code where it has 0.
BY_SCHEDULER = {
    "cancelled": ("cancelled", STOPPED),
    "time_limit": ("timed_out", STOPPED),
    "preemption": ("preempted", STOPPED),
    "node_failure": ("node_lost", KILLED),
    "out_of_memory": ("failed", KILLED),
}

# Whose failure it was, by status.json -> the same.
BY_FAILURE = {"hang": "hung", "node": "node_lost", "unfit": "node_unfit", "signal": "cancelled", "submitter": "lost"}


@dataclass(frozen=True, slots=True)
class RunState:
    """word: queued, starting, running, requeued; done, failed, cancelled, timed_out, preempted, node_lost, node_unfit,
    hung, no_progress; lost (nobody saw its end), or unknown (the scheduler does not answer).

    source: who says so. at: when that was written, seconds since the epoch.
    """

    word: str
    why: str = ""
    exit_code: int | None = None
    source: str = "status.json"
    at: float | None = None
    job: str = ""
    nodes: str = ""
    attempt: int = 1

    @property
    def title(self) -> str:
        """The word as people read it."""
        return self.word.replace("_", " ")

    @property
    def is_over(self) -> bool:
        """Whether nothing more will happen."""
        return self.word not in ("queued", "starting", "running", "requeued", "unknown")

    @property
    def is_followed(self) -> bool:
        """Whether the run's files may still say more."""
        return not self.is_over and self.why != STATUS_DAMAGED


class Jobs:
    """What the schedulers know of jobs: each question is asked once, and no cluster again that has not answered."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, str], JobState] = {}
        self._queues: dict[tuple[str, str, int], Mapping[str, State]] = {}
        self._controllers: dict[str, str] = {}
        self._silent: dict[tuple[str, str], str] = {}

    def state(self, submission: Submission, ended_of: int | None = None) -> JobState:
        """Of a run's job; unknown where nobody answers.

        ended_of: the user whose run has ended. All of the user's jobs are asked for at once then, for most runs of a
        list have ended, and the job is gone, unless it has been queued again.
        """
        try:
            if ended_of is None or self._is_in_queue(submission, ended_of):
                return self._state(submission)
            return self._foreign(submission) or JobState("gone")
        except (MachineError, RefusedError) as error:
            return JobState("unknown", str(error))

    def _state(self, submission: Submission) -> JobState:
        scheduler, job = SCHEDULERS[submission.scheduler], Job(submission.job, submission.cluster)
        cluster = (submission.scheduler, submission.cluster)
        if (key := (*cluster, submission.job)) not in self._known:
            found = self._answer(cluster, scheduler.states(job))
            self._known |= {(*cluster, each): state for each, state in found.items()}
        if key not in self._known:
            self._known[key] = self._foreign(submission) or self._past(scheduler, job)
        return self._known[key]

    def _is_in_queue(self, submission: Submission, uid: int) -> bool:
        cluster, job = (submission.scheduler, submission.cluster), Job(submission.job, submission.cluster)
        if (query := SCHEDULERS[submission.scheduler].queue(job, uid)) is None:
            return True
        if (key := (*cluster, uid)) not in self._queues:
            self._queues[key] = self._answer(cluster, query)
        return self._queues[key].get(submission.job, "ended") != "ended"

    def _foreign(self, submission: Submission) -> JobState | None:
        """Unknown, of a job that the scheduler does not have, where another one answers than took it; else None."""
        scheduler, took = submission.scheduler, submission.controller
        who = SCHEDULERS[scheduler].controller() if took else None
        if who is None:
            return None
        if scheduler not in self._controllers:
            self._controllers[scheduler] = self._answer((scheduler, submission.cluster), who)
        if (answers := self._controllers[scheduler]) == took:
            return None
        return JobState("unknown", f"it was submitted to the cluster {took}, and {answers} answers here")

    def _answer(self, cluster: tuple[str, str], query: Query[Answer]) -> Answer:
        if cluster in self._silent:
            raise MachineError(self._silent[cluster])
        try:
            return ask(query)
        except (MachineError, RefusedError) as error:
            self._silent[cluster] = str(error)
            raise

    @staticmethod
    def _past(scheduler: Scheduler, job: Job) -> JobState:
        """Of a job that has left the queue: by the scheduler's accounts, where it keeps any."""
        past = scheduler.past(job)
        try:
            return ask(past) if past else JobState("gone")
        except (MachineError, RefusedError):  # no accounts are kept
            return JobState("gone")


def state_of(layout: RunLayout, jobs: Jobs | None = None) -> RunState:
    """The state of a run. Asks the scheduler only while the run's own files say that it has not ended.

    jobs: that were asked for before.
    """
    status, submission = read_status(layout), read_submission(layout.root)
    known = _by_files(layout, status or Status(), submission)
    if submission is DAMAGED:
        return replace(known, word="unknown", why=f"{SUBMISSION} is damaged: nobody knows which job the run is")
    if status is None and _may_be_there(layout.status):
        known = replace(known, word="unknown", why=STATUS_DAMAGED)
    elif submission is None:
        return _here(layout, known, status or Status())
    if submission is None:
        return known
    scheduler = SCHEDULERS[submission.scheduler]
    if scheduler.starts_nodes:
        return known if known.is_over else _on_hosts(layout, known, status or Status())
    if known.is_over:
        return _queued_again(layout, known, _job_after(layout, submission, jobs or Jobs()), submission)
    job = (jobs or Jobs()).state(submission)
    if not job.is_of(layout.id, layout.name, _owner(layout)):
        why = f"{scheduler.title}'s job {submission.job} here is another one, {job.name} of {job.user}"
        return replace(known, word="unknown", why=f"by its files {known.word}; {why}", source=submission.scheduler)
    if job.state in ("ended", "gone"):
        # What it has written meanwhile says more.
        known = _by_files(layout, read_status(layout) or Status(), submission)
        if known.is_over:
            return known
    if job.state == "ended" and scheduler.shares_folder and (known.word == "requeued" or not layout.attempts):
        return replace(known, **_ended_unbegun(layout, job), source=submission.scheduler)
    return by_scheduler(known, job, submission)


def _job_after(layout: RunLayout, submission: Submission, jobs: Jobs) -> JobState:
    """What is left of the job of a run that has ended; gone where its number is another run's by now."""
    owner = _owner(layout)
    job = jobs.state(submission, ended_of=os.geteuid() if owner is None else owner)
    return job if job.is_of(layout.id, layout.name, owner) else JobState("gone")


def _queued_again(layout: RunLayout, known: RunState, job: JobState, submission: Submission) -> RunState:
    """A run that has ended, where somebody has had its job queued again since; by its files where nobody knows."""
    if job.state == "running" and (job.started or 0.0) > (known.at or 0.0):
        word = "queued"  # which becomes starting
    elif job.state == "queued":
        word = "requeued"
    else:
        return known
    return by_scheduler(replace(known, word=word, why="", exit_code=None), job, submission)


def _owner(layout: RunLayout) -> int | None:
    """The number of the user that a run directory belongs to."""
    try:
        return layout.root.stat().st_uid
    except OSError:
        return None


def _may_be_there(path: Path) -> bool:
    try:
        return is_there(path)
    except OSError:
        return True


def _here(layout: RunLayout, known: RunState, status: Status) -> RunState:
    """A run that was not submitted: by its lock, while its files say that it goes on."""
    if known.is_over:
        return known
    runs, here = is_running(layout), os.uname().nodename
    if status.state in ("queued", "requeued") and status.pids.trainkit is None:  # else it waits for GPUs
        return replace(known, word="unknown", why=f"{SUBMISSION} is missing: its submission may not be over")
    if runs:
        return known if status.state else replace(known, word="starting")
    others = _of_other_nodes(layout)
    if others is not None:
        why = known.why or others.why or ""
        return replace(known, word="lost", why=why, exit_code=others.exit_code)
    if status.host not in (None, here):  # where a lock of another machine may not be seen
        return replace(known, word="unknown", why=f"by its files {known.word}, on {status.host}: ask there")
    if runs is None:
        why = f"by its files {known.word}, and its lock cannot be looked at by this user"
        return replace(known, word="unknown", why=why)
    why = "neither trainkit nor its guardian saw the end" if status.state else "it has not come to start anything"
    return replace(known, word="lost", why=known.why or why)


def _of_other_nodes(layout: RunLayout) -> Status | None:
    """How the run ended, as another node says it: node 0, which ends last, was gone by then; else None."""
    files = [file for attempt in layout.attempts[-1:] for file in sorted(attempt.nodes.glob("*.json"))]
    found = (read_record(file, Status, below=layout.root) for file in files)
    return next((each for each in found if each and each.state == "ended" and each.failure), None)


def prunable(runs: Sequence[RunInfo], keep: int) -> list[RunInfo]:
    """The runs to remove so that the newest `keep` of each name stay; of the others, those that may be removed."""
    jobs = Jobs()
    return [run for run in older(runs, keep) if _may_be_removed(run.layout, jobs)]


def older(runs: Sequence[RunInfo], keep: int) -> list[RunInfo]:
    """All but the newest `keep` of each name."""
    by_name: dict[str, list[RunInfo]] = {}
    for run in sorted(runs, key=lambda run: run.layout.id, reverse=True):
        by_name.setdefault(run.layout.name, []).append(run)
    return [run for newest_first in by_name.values() for run in reversed(newest_first[keep:])]


def _may_be_removed(layout: RunLayout, jobs: Jobs) -> bool:
    """Whether it is one's own, no link leads to it, and nothing will happen to it any more, as far as can be known."""
    if os.geteuid() not in (0, _owner(layout)) or is_linked(layout):
        return False
    if is_running(layout) is not False or is_being_started(layout) is not False:
        return False
    if not state_of(layout, jobs).is_over:
        return False
    submission = read_submission(layout.root)
    if submission is None or SCHEDULERS[submission.scheduler].starts_nodes:
        return True
    return _job_after(layout, submission, jobs).state in ("ended", "gone")


def remove_run(layout: RunLayout) -> bool:
    """Remove a run directory; False where it may be running again by now. Raises OSError."""
    removable = _may_be_removed(layout, Jobs())
    if removable:
        remove(layout)
    return removable


def _ended_unbegun(layout: RunLayout, job: JobState) -> dict[str, Any]:
    """How a job has ended whose script has not come to start an attempt."""
    if pending_request(layout) == "cancel" or job.why == "cancelled":
        return {"word": "cancelled", "why": "cancelled before the run began", "exit_code": STOPPED}
    said = f"see {layout.job_output}" if _size(layout.job_output) else "it has said nothing"
    how = job.reason or job.why
    why = f"the job ended before trainkit began ({how}): {said}; do its nodes see {layout.root}?"
    return {"word": "failed", "why": why, "exit_code": int(ExitCode.MACHINE)}


def _size(path: Path) -> int:
    """In bytes; 0 where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _on_hosts(layout: RunLayout, known: RunState, status: Status) -> RunState:
    """A run that was started through ssh: like one that was not submitted, once its nodes have started."""
    known = replace(known, nodes=",".join(host.rpartition("@")[2] for host in hosts_of(layout)))
    return known if is_being_started(layout) else _here(layout, known, status)


def may_be_requeued(submission: Submission | None) -> bool:
    """Whether a run that has ended may go on: its job says so last, as the outcome. A damaged record may be of any."""
    scheduler = SCHEDULERS.get(submission.scheduler) if submission else None
    return submission is not None and not (scheduler and scheduler.starts_nodes)


def _by_files(layout: RunLayout, status: Status, submission: Submission | None) -> RunState:
    word: str = status.state
    if status.state == "ended":
        word = status.outcome or "running"
        if status.outcome is None and not may_be_requeued(submission):
            word = "done" if status.exit_code == 0 else BY_FAILURE.get(status.failure or "", "failed")
    try:
        at = layout.status.stat().st_mtime
    except OSError:
        at = None
    return RunState(
        word or "unknown",
        status.why or "",
        status.exit_code,
        at=at,
        job=submission.job if submission and may_be_requeued(submission) else "",
        attempt=status.attempt or 1,
    )


def by_scheduler(known: RunState, job: JobState, submission: Submission) -> RunState:
    """What the files say of a run that has not ended, and what the scheduler says of its job."""
    source, scheduler = submission.scheduler, SCHEDULERS[submission.scheduler]
    name = scheduler.title
    if job.state == "queued":
        word = "requeued" if known.word == "requeued" or job.restarts else "queued"
        return replace(known, word=word, why=job.reason, source=source)
    if job.state == "ended":
        word, code = BY_SCHEDULER.get(job.why, ("done" if job.exit_code == 0 else "failed", job.exit_code))
        why = f"{name}: {job.why.replace('_', ' ') or job.reason or 'ended'}"
        return replace(known, word=word, why=why, exit_code=job.exit_code or code, source=source, nodes=job.nodes)
    if job.state == "gone":
        return replace(known, word="lost", why=f"{name} knows job {submission.job} no more", source=source)
    if job.state == "unknown":
        return replace(known, word="unknown", why=f"by its files {known.word}; {job.reason}", source=source)
    if known.word == "queued" and not scheduler.shares_folder:  # the run's own files are elsewhere
        return replace(known, word="running", nodes=job.nodes, source=source, attempt=job.restarts + 1)
    word = "starting" if known.word == "queued" else known.word
    return replace(known, word=word, nodes=job.nodes, source="status.json")


def root_of_job(number: str) -> Path | None:
    """The folder of the runs that a job of this user's is in, as its scheduler knows it; None where none does."""
    for scheduler in schedulers_with_job(number):
        try:
            found = ask(scheduler.states(Job(number)))
        except (MachineError, RefusedError):
            continue
        state = found.get(number) or next(iter(found.values()), JobState("gone"))
        for file in map(Path, state.files[:1]):
            mine = state.uid in (None, os.geteuid())
            if mine and file.is_absolute() and file.name == SCRIPT:
                return file.parent.parent.parent  # of all tasks of an array it is the script of one
    return None


def schedulers_with_job(number: str) -> Iterator[Scheduler]:
    """Those whose jobs may have a number, and have their run directory where it is submitted."""
    for scheduler in SCHEDULERS.values():
        queues = scheduler.shares_folder and not scheduler.starts_nodes
        if queues and re.fullmatch(scheduler.job_id, number, re.ASCII):
            yield scheduler
