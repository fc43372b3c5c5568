"""One start of a job, from its script: begins an attempt, passes on what it is asked, and queues the job again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit.errors import ExitCode, MachineError
from trainkit.launch_plan.model import Plan, Variable, bind_words
from trainkit.runner.rundir.layout import RunLayout
from trainkit.runner.rundir.listing import own_checkpoints, read_plan, read_status
from trainkit.runner.rundir.records import Pids, Status
from trainkit.runner.supervisor.processes import ProcessId, signal_holder, signal_name
from trainkit.schedulers.base import Job, JobState, RefusedError
from trainkit.schedulers.client import answer_or, ask
from trainkit.schedulers.jobs.records import (
    Attempt,
    Submission,
    cancel_request,
    make_attempt,
    pending_request,
    read_attempts,
    read_submission,
    update_status,
    write_attempt,
    write_submission,
)
from trainkit.schedulers.registry import SCHEDULERS
from trainkit.text import pluralize, strip_control

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
        return Decision(True, "requeued", "the scheduler has queued it again")
    cause = end.asked or (end.failure if end.failure in KINDS else "failure")
    outcome = OUTCOMES.get(cause, "failed")
    if cause == "cancel" or KINDS.get(cause, cause) not in after:
        return Decision(False, outcome, end.why)
    stuck = attempts_without_progress(end.steps)
    if not any(end.steps):  # who is preempted before the first checkpoint has not failed to make one
        stuck -= end.preemptions
    if stuck >= without_progress:
        what = f"{pluralize(stuck, 'attempt')} brought no newer checkpoint than that of step {end.steps[-1]}"
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


LOOK_SECONDS = 0.2
LINGER_SECONDS = 5.0  # for the step, once trainkit has ended on node 0: a dead node would hold it much longer
PATIENCE = 15.0  # beyond the grace time, for a run that was asked to end
KILL_SECONDS = 60.0  # that the scheduler may take to end a job that is queued again
NOTHING_RUNS = "nothing runs yet that could save a checkpoint"
NEAR_END_SECONDS = 60.0  # Slurm sends its warning up to so much too early (sbatch(1), --signal)


class JobScript:
    """One start of the job."""

    def __init__(self, root: Path, environ: Mapping[str, str]) -> None:
        self._layout, self._environ = RunLayout(root), dict(environ)
        self._plan = read_plan(self._layout, own=True)
        hint = "`trainkit submit RECIPE` submits one, and it starts this"
        if self._plan.job is None:
            raise MachineError(f"{self._layout.plan} is of no job", hint=hint)
        self._terms, self._scheduler = self._plan.job, SCHEDULERS[self._plan.job.scheduler]
        self._job = self._scheduler.own_job(environ)
        if not self._job:
            raise MachineError(f"this is no job of {self._scheduler.title}", hint=hint)
        self._restarts = self._scheduler.restarts(environ)
        self._orders: list[int] = []
        self._asked = ""
        self._ask_at = float("inf")

    def run(self) -> int:
        """Start an attempt and see it through; the exit code of the job."""
        for number in (signal.SIGUSR1, self._scheduler.save_signal, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        submission = read_submission(self._layout.root)
        if self._scheduler.resubmits and submission and submission.job not in ("", self._job):
            say(f"the run goes on as job {submission.job}")
            return 0
        attempt = self._begin()
        code = self._follow(attempt)
        return self._end(attempt, code)

    def _on_signal(self, number: int, _frame: object) -> None:
        self._orders.append(number)

    def _begin(self) -> Attempt:
        """Write down that an attempt begins, and how an earlier one ended whose end nobody has seen."""
        layout, earlier = self._layout, read_attempts(self._layout)
        number = make_attempt(layout)
        newest = newest_step(layout, self._plan)
        excluded = earlier[-1].excluded if earlier else ()
        attempt = Attempt(number, self._job, self._restarts, os.uname().nodename, time.time(), newest, excluded)
        write_attempt(layout, attempt)
        if read_submission(layout.root) is None:  # the scheduler did not say whether it had taken the job
            cluster, controller = self._scheduler.home(str(self._terms.content), self._environ)
            kind = self._scheduler.kind
            write_submission(layout, Submission(kind, self._job, cluster=cluster, controller=controller))
        if earlier:
            cancel_request(layout)  # which was meant for an earlier one
            say(f"attempt {number}, from step {newest}")
        host = {"host": os.uname().nodename, "pids": Pids()}
        update_status(layout, **ended_nowhere(), state="starting", attempt=number, job=self._job, outcome=None, **host)
        return attempt

    def _follow(self, attempt: Attempt) -> int:
        """Start the step, pass on what the job is asked, and wait for its end; the exit code of what starts it."""
        values = {Variable.RUN_DIR: str(self._layout.root)}
        node = (sys.executable, "-P", "-m", "trainkit", "job", "node", str(self._layout.root))
        words, title = bind_words(self._terms.step, values), self._scheduler.title
        if not self._scheduler.starts_step(words, str(self._layout.root)):
            what = f"{self._layout.plan} starts no step of {title}: {' '.join(words[:3])}"
            raise MachineError(what, hint="it was changed since it was submitted: submit the recipe again")
        argv = (*words, *node, "--attempt", str(attempt.number), *self._scheduler.step_words(self._environ))
        try:
            step = subprocess.Popen(argv, env=self._environ, stdin=subprocess.DEVNULL, start_new_session=True)
        except OSError as error:
            what = f"{words[0]} cannot be started: {error.strerror}"
            raise MachineError(what, hint=f"is {title} on PATH here?") from error
        over, near = float("inf"), self._near_end()
        if self._scheduler.loses_signals and pending_request(self._layout):
            self._orders.append(self._scheduler.save_signal)
        while step.poll() is None:
            if time.time() > near:
                self._orders.append(signal.SIGUSR1)
                near = float("inf")
            self._take_orders(step)
            if self._ended(attempt) and not ((here := _node_0(self._layout)) and here.runs):
                over = min(over, time.monotonic() + LINGER_SECONDS)
            # A node that is lost holds srun for minutes; the others have ended by then.
            if time.monotonic() > min(over, self._ask_at + self._plan.grace_seconds + PATIENCE):
                step.kill()
            time.sleep(LOOK_SECONDS)
        code = step.returncode
        return code if code >= 0 else 128 - code

    def _take_orders(self, step: subprocess.Popen[bytes]) -> None:
        """Why the run is to end, if it is: the scheduler has sent a signal, or a user has written a request."""
        while self._orders:
            number = self._orders.pop(0)
            if number == self._scheduler.save_signal and not pending_request(self._layout):
                if not signal_node_0(self._layout, signal.SIGUSR1):
                    say(NOTHING_RUNS)
                continue
            self._asked = self._asked or pending_request(self._layout) or self._reason(number)
            if self._ask_at == float("inf"):
                self._ask_at = time.monotonic()
                who = f"{signal_name(number)} from {self._scheduler.title}"
                say(f"{who} ({self._asked}): asking the run to save and to end")
            self._stop(step)

    def _known(self) -> JobState:
        """What the scheduler says of the job."""
        return answer_or(self._scheduler.state(Job(self._job)), JobState("unknown"), self._environ)

    def _near_end(self) -> float:
        """When the run is to be asked to save because its time is up, where the scheduler does not tell it."""
        ends = None if self._scheduler.warns else self._known().ends
        return float("inf") if ends is None else ends - self._terms.warn_seconds

    def _reason(self, number: int) -> str:
        """What a signal of the scheduler's means: the same one announces the time limit and preemption."""
        known = self._known()
        if known.restarts > self._restarts:
            return "requeued"
        if known.preempted:
            return "preemption"
        if known.why in ("cancelled", "time_limit"):
            return {"cancelled": "cancel"}.get(known.why, known.why)
        near = self._terms.warn_seconds + NEAR_END_SECONDS
        if known.ends is not None and known.ends - time.time() < near:
            return "time_limit"
        return "preemption" if number == signal.SIGUSR1 else "cancel"

    def _stop(self, step: subprocess.Popen[bytes]) -> None:
        """Ask node 0, which is on this host; where it has not come up yet, what starts the step."""
        if not signal_node_0(self._layout, signal.SIGTERM):
            with contextlib.suppress(ProcessLookupError):
                step.send_signal(signal.SIGTERM)

    def _ended(self, attempt: Attempt) -> bool:
        status = read_status(self._layout)
        return status is not None and status.state == "ended" and status.attempt == attempt.number

    def _end(self, attempt: Attempt, code: int) -> int:
        """Decide what follows, write it down, and do it."""
        layout, status = self._layout, read_status(self._layout) or Status()
        if not self._ended(attempt):
            status = status._replace(**self._own_account(code, began=status.state != "starting"))
        attempts = read_attempts(layout)
        end = AttemptEnd(
            status.exit_code or 0,
            status.failure or "",
            status.why or "",
            self._asked,
            tuple(filter(None, (status.blamed or "").split(","))),
            [*(each.step for each in attempts), newest_step(layout, self._plan)],
            sum(each in ("preemption", "requeued") for each in (*(one.asked for one in attempts), self._asked)),
        )
        decision = decide(end, self._terms.requeue, self._terms.without_progress)
        if decision.requeue:
            # Slurm sends TERM to all that is of the script: blocked, it ends no command here, and comes afterwards.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            queued = self._requeue(attempt, decision, status)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            if queued:
                if self._scheduler.ends_script:
                    self._await_end()
                return end.exit_code
        known = status._replace(outcome=decision.outcome, why=decision.why or status.why)
        update_status(layout, **known._asdict())
        if decision.outcome == "cancelled" and self._scheduler.ends_script:  # else it would call the job failed
            answer_or(self._scheduler.cancel(Job(self._job), now=True), (), self._environ)
            time.sleep(KILL_SECONDS)
        return end.exit_code

    def _own_account(self, code: int, *, began: bool) -> dict[str, Any]:
        """How it has ended as far as the script knows: the nodes never met, or node 0 is gone. code: of the step."""
        failure, why = "trainkit", f"the job's step exited with code {code}" if code else "node 0 ended without a word"
        if self._asked and not began:
            code, failure, why = 128 + signal.SIGTERM, "signal", f"asked to end ({self._asked}) before the run began"
        return {"state": "ended", "exit_code": code or 1, "failure": failure, "why": why, "ended": time.time()}

    def _requeue(self, attempt: Attempt, decision: Decision, status: Status) -> bool:
        """Queue the job again; whether the scheduler does."""
        excluded = tuple(dict.fromkeys((*attempt.excluded, *decision.exclude)))
        write_attempt(self._layout, attempt._replace(excluded=excluded, asked=self._asked))
        known = status._replace(state="requeued", outcome=decision.outcome, why=decision.why)
        update_status(self._layout, **known._asdict())
        say(f"queued again: {decision.outcome.replace('_', ' ')} ({decision.why})")
        self._orders.clear()
        scheduler, job = self._scheduler, Job(self._job)
        try:
            if self._asked != "requeued":  # else the scheduler does already
                job = Job(scheduler.requeue(job, str(self._layout.root), self._environ))
        except (MachineError, RefusedError) as error:
            # Where a node has failed, Slurm queues the job again by itself, and may have been quicker.
            if self._known().state != "queued":
                say(f"{scheduler.title} does not queue it again: {error}")
                return False
        if job.id != self._job and (submission := read_submission(self._layout.root)):
            write_submission(self._layout, submission._replace(job=job.id))
        if excluded:
            refused = "it excludes no hosts"
            try:
                if query := scheduler.exclude(job, excluded):
                    refused = ask(query, self._environ) or ""
            except (MachineError, RefusedError) as error:
                refused = str(error)
            if refused:
                say(f"{scheduler.title} may give it {', '.join(excluded)} again: {refused}")
        return True

    def _await_end(self) -> None:
        """The scheduler ends the script. One that leaves by itself may have failed for it."""
        until = time.monotonic() + KILL_SECONDS
        while time.monotonic() < until and signal.SIGTERM not in self._orders and self._asked != "requeued":
            time.sleep(LOOK_SECONDS)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


def signal_node_0(layout: RunLayout, number: int) -> bool:
    """Signal the trainkit of node 0, which tells the other nodes; whether it is there, on this host."""
    process, status = _node_0(layout), read_status(layout)
    if process is None or status is None or status.state == "ended":
        return False
    try:
        return signal_holder(process, str(layout.lock), str(layout.root), number)
    except PermissionError:
        return False


def _node_0(layout: RunLayout) -> ProcessId | None:
    """The trainkit of node 0, of a job on the host of the job script; None before it has come up, and elsewhere."""
    status = read_status(layout)
    return status.pids.process("trainkit") if status and status.host == os.uname().nodename else None


def end_unbegun(root: Path, why: str) -> int:
    """Write down that the job script has ended before it could start trainkit, for good; the job's exit code."""
    account = {"state": "ended", "outcome": "failed", "failure": "trainkit", "why": why, "ended": time.time()}
    update_status(RunLayout(root), **account, exit_code=int(ExitCode.MACHINE), host=os.uname().nodename, pids=Pids())
    return int(ExitCode.MACHINE)


def say(text: str) -> None:
    """A line in the job's output."""
    sys.stderr.write(f"{strip_control(text)}\n")
    sys.stderr.flush()


def ended_nowhere() -> dict[str, None]:
    """The fields of an end, for a run that goes on."""
    return dict.fromkeys(("ended", "exit_code", "failure", "why", "rank", "signal"))


def newest_step(layout: RunLayout, plan: Plan) -> int:
    """The step of the run's newest complete checkpoint; 0 for none."""
    found = own_checkpoints(layout, plan.program.kind)
    return max((each.step for each in found if not each.damage), default=0)
