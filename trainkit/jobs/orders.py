"""End a run, have it save, or join it, wherever it runs: by signals on this machine, else through the scheduler."""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trainkit.errors import MachineError, UsageError
from trainkit.jobs.batch import read_plan
from trainkit.jobs.records import HELD, Submission, asked, hosts_of, require_own, take_back, update_status
from trainkit.jobs.records import ask as leave_word
from trainkit.jobs.states import RunState, state_of
from trainkit.runner.rundir.layout import RunLayout
from trainkit.runner.rundir.listing import read_status
from trainkit.runner.supervisor.processes import ProcessId, is_stopped, signal_holder
from trainkit.schedulers import kubectl, slurm, ssh
from trainkit.schedulers.client import answer_or, ask
from trainkit.schedulers.hostlist import expand
from trainkit.schedulers.interface import Answer, Job, JobState, Query, RefusedError

BETWEEN_SECONDS = 0.3
NOT_HERE = "it runs on another machine, which is reached through its scheduler alone, and it has none"


def cancel(layout: RunLayout, *, now: bool, environ: Mapping[str, str]) -> str:
    """End a run; what was done, for people. UsageError for one that has ended, and has nothing in Kubernetes."""
    submission = require_own(layout)
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
    job = _own_job(layout, submission, environ)
    told_before = asked(layout)
    leave_word(layout, "cancel")
    try:
        return _cancel_job(layout, submission, job, environ, now=now)
    except (MachineError, UsageError):
        if not told_before:  # else the next signal of Slurm's would be taken for it, and end the run for good
            take_back(layout)
        raise


def _own_job(layout: RunLayout, submission: Submission, environ: Mapping[str, str]) -> JobState:
    """What Slurm knows of a run's job. MachineError where its number is another job's by now, or in this cluster."""
    number = submission.job
    found = _told(slurm.states(Job(number, submission.cluster)), environ).get(number)
    if found is not None and not found.is_of(layout.id, layout.name, layout.root.stat().st_uid):
        what = f"job {number} is not that of {layout.root}: it is {found.name} of {found.user}"
        raise MachineError(what, hint=f"the run was submitted on {submission.host}: give the command there")
    if found is None or found.state == "ended":
        if not submission.cluster:
            _require_cluster(submission, environ, f"the run was submitted on {submission.host}: give the command there")
        raise UsageError(f"job {number} has ended meanwhile", hint="`trainkit status` says how")
    return found


def _require_cluster(submission: Submission, environ: Mapping[str, str], hint: str) -> None:
    """MachineError where another cluster answers by itself than the one that has the job."""
    home = submission.cluster or submission.controller
    answers = answer_or(slurm.controller(), "", environ) or submission.controller
    if home and answers != home:
        raise MachineError(
            f"job {submission.job} was submitted to the cluster {home}, and {answers} answers here", hint=hint
        )


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


def _cancel_job(
    layout: RunLayout, submission: Submission, job: JobState, environ: Mapping[str, str], *, now: bool
) -> str:
    """Have Slurm end a job; what was done, for people."""
    number, cluster = submission.job, submission.cluster
    if not now and job.state == "running":
        _told(slurm.send(number, "TERM", script=True, cluster=cluster), environ)
        word = state_of(layout).word
        return f"ending job {number} ({word})" + (": it saves a checkpoint first" if word == "running" else "")
    _told(slurm.cancel(number, cluster=cluster), environ)
    if job.state == "queued":
        account = {"state": "ended", "outcome": "cancelled", "exit_code": 143, "why": "cancelled in the queue"}
        update_status(layout, **account, ended=time.time())
    return f"cancelled job {number}"


def save(layout: RunLayout, environ: Mapping[str, str]) -> str:
    """Have a run save; what was done, for people. UsageError for one that does not run."""
    submission, found = require_own(layout), _living(layout)
    if found.word not in ("running", "unknown"):
        raise UsageError(f"{layout.root} is {found.word}: there is nothing to save yet", hint="wait until it runs")
    if submission is not None and submission.scheduler == "kubernetes":
        pod, python = _pod(found, submission.job), read_plan(layout, own=True).commands[0].wrapper[0]
        _told(kubectl.save(submission.job, pod, str(python)), environ)
    elif submission is not None and submission.scheduler == "ssh":
        _signal_submitter(layout, submission, signal.SIGUSR1)
    elif submission is None or ((status := read_status(layout)) and status.host == os.uname().nodename):
        _signal_here(layout, signal.SIGUSR1)
    else:
        _own_job(layout, submission, environ)
        _told(slurm.send(submission.job, slurm.SAVE, script=True, cluster=submission.cluster), environ)
    if read_plan(layout).program.kind == "builtin":
        return f"{layout.root} saves a checkpoint at its next step"
    return f"{layout.root} is asked to save a checkpoint by SIGUSR1, which its program may not know"


def attach_command(
    layout: RunLayout,
    node: int,
    words: Sequence[str],
    ssh_words: Callable[[RunLayout], Sequence[str]],
    environ: Mapping[str, str],
    *,
    terminal: bool,
) -> tuple[tuple[str, ...], Mapping[str, str]]:
    """The command that runs another one on a node of a run, and its variables. UsageError where there is no such node.

    ssh_words: how its hosts are reached, by its recipe.
    """
    submission, found = require_own(layout), _living(layout)
    if submission is None:
        if node:
            raise UsageError(f"{layout.root} is no submitted run: it has no node {node} to be reached")
        return tuple(words), environ
    hosts = hosts_of(layout, own=True) if submission.scheduler == "ssh" else expand(found.nodes)
    if submission.scheduler == "ssh" and not hosts:
        raise MachineError(f"{layout.plan} is damaged, or another user's: nobody knows the hosts of the run")
    if node >= len(hosts):
        what = f"{layout.root} has no node {node}" if hosts else f"job {submission.job} is {found.word}"
        wait = found.why or "wait until it runs"
        raise UsageError(what, hint=f"its nodes are {found.nodes}, numbered from 0" if hosts else wait)
    if submission.scheduler == "kubernetes":
        return kubectl.attach(submission.job, hosts[node], words, terminal=terminal), environ
    if submission.scheduler == "ssh":
        return ssh.attach(ssh_words(layout), hosts[node], words, terminal=terminal), environ
    again = shlex.join(("trainkit", "attach", str(layout.root), f"--node={node}", "--", *words))
    _require_cluster(submission, environ, f"srun reaches no other cluster: give `{again}` where that one answers")
    job = _told(slurm.number(submission.job), environ) if "_" in submission.job else submission.job
    argv = slurm.attach(job, hosts[node], words, terminal=terminal)
    return argv, slurm.without_settings(environ, argv[0])


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
    status = read_status(layout)
    if status is None or status.host != os.uname().nodename:
        where = f"on {status.host}" if status and status.host else "nobody knows where"
        raise MachineError(f"{layout.root} runs {where}: {NOT_HERE}", hint="signal it there")
    process = status.pids.process("trainkit")
    if process is None or not _reached(process, layout.lock, layout, number):
        raise UsageError(f"{layout.root} does not run, or its trainkit is gone and its guardian ends it")


def _signal_submitter(layout: RunLayout, submission: Submission, number: int) -> None:
    """A signal to the trainkit that holds a run without a scheduler; it passes it on."""
    if submission.host != os.uname().nodename:
        what = f"{layout.root} is held by trainkit on {submission.host}"
        raise MachineError(what, hint=f"give the command there: ssh {submission.host}")
    process = submission.process
    if process is not None and process.runs and is_stopped(process.pid):  # it would hear of it only when it goes on
        what = f"process {process.pid}, which holds {layout.root}, is stopped (Ctrl-Z)"
        raise MachineError(what, hint=f"let it go on (fg, or kill -CONT {process.pid}), and give the command again")
    if process is None or not _reached(process, layout.root / HELD, layout, number):
        raise UsageError(f"{layout.root} is held by nobody any more: its nodes are ending")


def _reached(process: ProcessId, lock: Path, layout: RunLayout, number: int) -> bool:
    """A signal to the trainkit of a run; whether it is the one that the run directory names."""
    try:
        return signal_holder(process, str(lock), str(layout.root), number)
    except PermissionError as error:
        what = f"process {process.pid} of {layout.root} cannot be signalled: {error.strerror}"
        raise MachineError(what) from error


def _told(query: Query[Answer], environ: Mapping[str, str]) -> Answer:
    try:
        return ask(query, environ)
    except RefusedError as error:
        if any(each in str(error) for each in slurm.ENDED):
            raise UsageError("the job has ended meanwhile", hint="`trainkit status` says how") from error
        raise MachineError(f"{query.argv[0]} refuses: {error}") from error
