"""What a run is doing: by its own files where they know, else by the scheduler. An unknown state is no failure."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit.errors import ExitCode, MachineError
from trainkit.files import read_json
from trainkit.jobs.records import Submission, asked, hosts_of, is_held, read_submission
from trainkit.runner.report.exit_status import KILLED
from trainkit.runner.rundir.layout import RunLayout
from trainkit.runner.rundir.listing import is_running
from trainkit.schedulers import ssh
from trainkit.schedulers.client import ask
from trainkit.schedulers.interface import JobState, RefusedError
from trainkit.schedulers.registry import SCHEDULERS

NAMES = {"slurm": "Slurm", "kubernetes": "Kubernetes"}  # for people
GONE = ("Invalid job id", "NotFound")  # in the words of a scheduler that knows a job no more
STOPPED = 128 + signal.SIGTERM
# How a job has ended by the scheduler's word alone -> what that is called of a run, and the exit code where it has 0.
BY_SCHEDULER = {
    "cancelled": ("cancelled", STOPPED),
    "time_limit": ("timed_out", STOPPED),
    "preemption": ("preempted", STOPPED),
    "node_failure": ("node_lost", KILLED),
    "out_of_memory": ("failed", KILLED),
}

# Whose failure it was, by status.json -> the same.
BY_FAILURE = {"hang": "hung", "node": "node_lost", "signal": "cancelled"}


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
    step: int | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing more will happen."""
        return self.word not in ("queued", "starting", "running", "requeued", "unknown")


def state_of(layout: RunLayout) -> RunState:
    """The state of a run. Asks the scheduler only while the run's own files say that it has not ended."""
    status, submission = read_json(layout.status), read_submission(layout.root)
    known = _by_files(layout, status, submission)
    if submission is None or submission.scheduler not in SCHEDULERS:
        host = status.get("host")
        if known.is_over or is_running(layout):
            return known
        if host != os.uname().nodename:  # where a lock of another machine may not be seen
            return _changed(known, word="unknown", why=f"by its files {known.word}, on {host}: ask there")
        return _changed(known, word="lost", why="neither trainkit nor its guardian saw the end")
    if known.is_over:
        return known
    if submission.scheduler == "ssh":
        return _held(layout, known, submission)
    try:
        job = ask(SCHEDULERS[submission.scheduler].state(submission.job))
    except (MachineError, RefusedError) as error:
        return _changed(known, word="unknown", why=f"by its files {known.word}; {error}", source=submission.scheduler)
    if job.state == "ended":
        known = _by_files(layout, read_json(layout.status), submission)  # what it has written meanwhile says more
        if known.is_over:
            return known
        if submission.scheduler == "slurm" and (known.word == "requeued" or not layout.attempts):
            return _changed(known, **_ended_unbegun(layout, job), source=submission.scheduler)
    return by_scheduler(known, job, submission)


def _ended_unbegun(layout: RunLayout, job: JobState) -> dict[str, Any]:
    """How a job has ended whose script has not come to start an attempt."""
    if asked(layout) == "cancel" or job.why == "cancelled":
        return {"word": "cancelled", "why": "cancelled before the run began", "exit_code": STOPPED}
    said = f"see {layout.root}/job.out" if _size(layout.root / "job.out") else "it has said nothing"
    how = job.reason or job.why
    why = f"the job ended before trainkit began ({how}): {said}; do its nodes see {layout.root}?"
    return {"word": "failed", "why": why, "exit_code": int(ExitCode.MACHINE)}


def _size(path: Path) -> int:
    """In bytes; 0 where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _held(layout: RunLayout, known: RunState, submission: Submission) -> RunState:
    """A run without a scheduler: its files know it, for as long as somebody holds it."""
    known = _changed(known, nodes=",".join(map(ssh.bare, hosts_of(layout))))
    if submission.host != os.uname().nodename or is_held(layout) or is_running(layout):
        return known
    return _changed(known, word="lost", why=f"process {submission.job} on {submission.host}, which held it, has ended")


def _by_files(layout: RunLayout, status: dict[str, Any], submission: Submission | None) -> RunState:
    state, code = str(status.get("state") or ""), status.get("exit_code")
    word = state
    if state == "ended":
        # A job may yet be queued again: it says so last.
        word = str(status.get("outcome") or "")
        if not word and (submission is None or (submission.scheduler == "ssh" and not is_held(layout))):
            word = "done" if code == 0 else BY_FAILURE.get(str(status.get("failure")), "failed")
        word = word or "running"
    try:
        at = layout.status.stat().st_mtime
    except OSError:
        at = None
    attempt = status.get("attempt")
    return RunState(
        word or "unknown",
        str(status.get("why") or ""),
        code if isinstance(code, int) else None,
        at=at,
        job=submission.job if submission and submission.scheduler != "ssh" else "",
        attempt=attempt if isinstance(attempt, int) else 1,
        step=newest_logged_step(layout),
    )


def by_scheduler(known: RunState, job: JobState, submission: Submission) -> RunState:
    """What the files say of a run that has not ended, and what the scheduler says of its job."""
    source, name = submission.scheduler, NAMES.get(submission.scheduler, submission.scheduler)
    if job.state == "queued":
        word = "requeued" if known.word == "requeued" or job.restarts else "queued"
        return _changed(known, word=word, why=job.reason, source=source)
    if job.state == "ended":
        word, code = BY_SCHEDULER.get(job.why, ("done" if job.exit_code == 0 else "failed", job.exit_code))
        why = f"{name}: {job.why.replace('_', ' ') or job.reason or 'ended'}"
        return _changed(known, word=word, why=why, exit_code=job.exit_code or code, source=source, nodes=job.nodes)
    if job.state == "unknown" and any(each in job.reason for each in GONE):
        return _changed(known, word="lost", why=f"{name} knows job {submission.job} no more", source=source)
    if job.state == "unknown":
        return _changed(known, word="unknown", why=f"by its files {known.word}; {job.reason}", source=source)
    if source == "kubernetes" and known.word == "queued":  # the run's own files are on a volume, seldom here
        return _changed(known, word="running", nodes=job.nodes, source=source, attempt=job.restarts + 1)
    word = "starting" if known.word == "queued" else known.word
    return _changed(known, word=word, nodes=job.nodes, source="status.json")


def _changed(known: RunState, **changed: Any) -> RunState:
    from dataclasses import replace

    return replace(known, **changed)


def newest_logged_step(layout: RunLayout) -> int | None:
    """The last step in metrics.jsonl; None where none is there."""
    from trainkit.files import parse_json
    from trainkit.runner.report.progress import last_lines

    try:
        lines = last_lines(layout.metrics, 5)
    except OSError:
        return None
    for line in reversed(lines):
        try:
            step = parse_json(line.encode()).get("step")
        except (ValueError, AttributeError):
            continue
        if isinstance(step, int):
            return step
    return None


def age(seconds: float | None) -> str:
    """How long ago, for people."""
    from trainkit.text import format_duration

    return "" if seconds is None else f"{format_duration(max(0.0, time.time() - seconds))} ago"
