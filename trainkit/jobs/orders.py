"""End a run, have it save, or join it, wherever it runs: by signals on this machine, else through the scheduler."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence

from trainkit.errors import MachineError, UsageError
from trainkit.files import read_json
from trainkit.jobs.batch import read_plan
from trainkit.jobs.records import Submission, asked, hosts_of, is_held, read_submission, take_back, update_status
from trainkit.jobs.records import ask as leave_word
from trainkit.jobs.states import RunState, state_of
from trainkit.runner.rundir.layout import RunLayout
from trainkit.runner.rundir.listing import is_running
from trainkit.runner.supervisor.processes import is_stopped
from trainkit.schedulers import kubectl, slurm, ssh
from trainkit.schedulers.client import ask
from trainkit.schedulers.hostlist import expand
from trainkit.schedulers.interface import Answer, Query, RefusedError

BETWEEN_SECONDS = 0.3
NOT_HERE = "it runs on another machine, which is reached through its scheduler alone, and it has none"


def cancel(layout: RunLayout, *, now: bool, environ: Mapping[str, str]) -> str:
    """End a run; what was done, for people. UsageError for one that has ended, and has nothing in Kubernetes."""
    submission = read_submission(layout.root)
    if submission is not None and submission.scheduler == "kubernetes":
        return _remove(layout, submission.job, now=now, environ=environ)
    _living(layout)
    if submission is None:
        number = signal.SIGKILL if now else signal.SIGTERM
        _signal_here(layout, number)
        return f"ending {layout.root}" + ("" if now else ": it saves a checkpoint first")
    if submission.scheduler == "ssh":
        _signal_submitter(layout, submission, signal.SIGINT if now else signal.SIGTERM)
        if now:  # a second one kills
            time.sleep(BETWEEN_SECONDS)
            _signal_submitter(layout, submission, signal.SIGINT)
        return f"ending {layout.root}" + ("" if now else ": it saves a checkpoint first")
    told_before = asked(layout)
    leave_word(layout, "cancel")
    try:
        return _cancel_job(layout, submission.job, environ, now=now)
    except (MachineError, UsageError):
        if not told_before:  # else the next signal of Slurm's would be taken for it, and end the run for good
            take_back(layout)
        raise


def _remove(layout: RunLayout, job: str, *, now: bool, environ: Mapping[str, str]) -> str:
    """Remove all that a run has in Kubernetes, where it stays when the run has ended, too; and write down the end."""
    found = state_of(layout)
    removed = _told(kubectl.cancel(job, now=now), environ)
    if not found.is_over:
        why = "killed by request" if now else "cancelled"
        update_status(layout, state="ended", outcome="cancelled", exit_code=143, why=why, ended=time.time())
        return f"ending {job} ({found.word})" + ("" if now else ": its pods are told to save a checkpoint")
    if not removed:
        raise _ended(layout, found)
    if found.source != "status.json":  # from now on nobody else knows it
        how = {"outcome": found.word, "exit_code": found.exit_code, "why": found.why}
        update_status(layout, state="ended", ended=time.time(), **how)
    return f"{layout.root} is {found.word.replace('_', ' ')}; removed {', '.join(removed)}"


def _cancel_job(layout: RunLayout, number: str, environ: Mapping[str, str], *, now: bool) -> str:
    """Have Slurm end a job; what was done, for people."""
    job = _told(slurm.state(number), environ)
    if job.state == "ended":
        raise UsageError(f"job {number} has ended meanwhile", hint="`trainkit status` says how")
    if not now and job.state == "running":
        _told(slurm.send(number, "TERM", script=True), environ)
        word = state_of(layout).word
        return f"ending job {number} ({word})" + (": it saves a checkpoint first" if word == "running" else "")
    _told(slurm.cancel(number), environ)
    if job.state == "queued":
        account = {"state": "ended", "outcome": "cancelled", "exit_code": 143, "why": "cancelled in the queue"}
        update_status(layout, **account, ended=time.time())
    return f"cancelled job {number}"


def save(layout: RunLayout, environ: Mapping[str, str]) -> str:
    """Have a run save; what was done, for people. UsageError for one that does not run."""
    found, submission = _living(layout), read_submission(layout.root)
    if found.word not in ("running", "unknown"):
        raise UsageError(f"{layout.root} is {found.word}: there is nothing to save yet", hint="wait until it runs")
    if submission is not None and submission.scheduler == "kubernetes":
        pod, python = _pod(found, submission.job), read_plan(layout).commands[0].wrapper[0]
        _told(kubectl.save(submission.job, pod, str(python)), environ)
    elif submission is not None and submission.scheduler == "ssh":
        _signal_submitter(layout, submission, signal.SIGUSR1)
    elif submission is None or read_json(layout.status).get("host") == os.uname().nodename:
        _signal_here(layout, signal.SIGUSR1)
    else:
        _told(slurm.send(submission.job, "USR1", script=False), environ)
    if read_plan(layout).program.kind == "builtin":
        return f"{layout.root} saves a checkpoint at its next step"
    return f"{layout.root} is asked to save a checkpoint by SIGUSR1, which its program may not know"


def attach_words(layout: RunLayout, node: int, words: Sequence[str], *, terminal: bool) -> tuple[str, ...]:
    """The command that runs another one on a node of a run. UsageError where there is no such node."""
    found, submission = _living(layout), read_submission(layout.root)
    if submission is None:
        if node:
            raise UsageError(f"{layout.root} is no submitted run: it has no node {node} to be reached")
        return tuple(words)
    hosts = hosts_of(layout) or expand(found.nodes)
    if node >= len(hosts):
        what = f"{layout.root} has no node {node}" if hosts else f"job {submission.job} is {found.word}"
        wait = found.why or "wait until it runs"
        raise UsageError(what, hint=f"its nodes are {found.nodes}, numbered from 0" if hosts else wait)
    if submission.scheduler == "kubernetes":
        return kubectl.attach(submission.job, hosts[node], words, terminal=terminal)
    if submission.scheduler == "ssh":
        return ssh.attach(submission.argv, hosts[node], words, terminal=terminal)
    job = _told(slurm.number(submission.job), os.environ) if "_" in submission.job else submission.job
    return slurm.attach(job, hosts[node], words, terminal=terminal)


def _pod(found: RunState, job: str) -> str:
    """The pod of node 0."""
    if not found.nodes:
        raise MachineError(f"no pod of {job} runs", hint="`trainkit status` says why")
    return found.nodes.partition(",")[0]


def _living(layout: RunLayout) -> RunState:
    found = state_of(layout)
    if found.is_over:
        raise _ended(layout, found)
    return found


def _ended(layout: RunLayout, found: RunState) -> UsageError:
    hint = "`trainkit runs show` says how it ended"
    return UsageError(f"{layout.root} is {found.word.replace('_', ' ')}", hint=hint)


def _signal_here(layout: RunLayout, number: int) -> None:
    """A signal to trainkit on this machine; it passes on what the ranks are to have."""
    status = read_json(layout.status)
    pids = status.get("pids")
    pid = pids.get("trainkit") if isinstance(pids, dict) else None
    if status.get("host") != os.uname().nodename:
        raise MachineError(f"{layout.root} runs on {status.get('host')}: {NOT_HERE}", hint="signal it there")
    if not is_running(layout) or not isinstance(pid, int) or pid < 2:
        raise UsageError(f"{layout.root} does not run")
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError) as error:
        raise MachineError(f"process {pid} of {layout.root} cannot be signalled: {error.strerror}") from error


def _signal_submitter(layout: RunLayout, submission: Submission, number: int) -> None:
    """A signal to the trainkit that holds a run without a scheduler; it passes it on."""
    if submission.host != os.uname().nodename:
        what = f"{layout.root} is held by trainkit on {submission.host}"
        raise MachineError(what, hint=f"give the command there: ssh {submission.host}")
    if not is_held(layout):
        raise UsageError(f"{layout.root} is held by nobody any more: its nodes are ending")
    if is_stopped(int(submission.job)):  # it would hear of it only when it goes on
        what = f"process {submission.job}, which holds {layout.root}, is stopped (Ctrl-Z)"
        raise MachineError(what, hint=f"let it go on (fg, or kill -CONT {submission.job}), and give the command again")
    os.kill(int(submission.job), number)


def _told(query: Query[Answer], environ: Mapping[str, str]) -> Answer:
    try:
        return ask(query, environ)
    except RefusedError as error:
        raise MachineError(f"{query.argv[0]} refuses: {error}") from error
