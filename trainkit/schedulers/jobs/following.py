"""Follow a run by its files, over all its attempts, to its end: `logs`, and `submit --wait`."""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainkit.errors import MachineError, UsageError
from trainkit.recipe.schema.cluster import Cluster
from trainkit.runner.report.progress import Progress, Tail, plain_line
from trainkit.runner.rundir.layout import AttemptLayout, RunLayout
from trainkit.runner.rundir.listing import is_running, read_plan, read_run, read_status
from trainkit.runner.rundir.records import Status, read_records
from trainkit.runner.supervisor.processes import ProcessId, is_stopped, signal_holder
from trainkit.schedulers.base import Answer, EndedError, Job, JobState, Query, RefusedError, Scheduler, expand
from trainkit.schedulers.client import answer_or, ask
from trainkit.schedulers.jobs.records import (
    SUBMITTER,
    Submission,
    cancel_request,
    hosts_of,
    is_being_started,
    pending_request,
    read_submission,
    request,
    require_own,
    submitted,
    update_status,
)
from trainkit.schedulers.jobs.run_state import RunState, may_be_requeued, state_of
from trainkit.schedulers.registry import SCHEDULERS

LOOK_SECONDS = 0.5
PAUSES = 4  # how much longer than a look the pause after it is at least: one over thousands of logs takes a while
ASK_SECONDS = 15.0  # between questions to the scheduler, whether it still knows the job
SETTLE_SECONDS = 1.0  # for the last lines of a run that has ended
SUMMARY_SECONDS = 20.0  # for trainkit to print its summary then, where it is seen to run


@dataclass(frozen=True, slots=True)
class Wanted:
    """Whose output: of a rank, of a node's launcher, of all ranks, or (by default) what the run itself has shown.

    attempt: of which start; None is the newest, and while one follows each new one as well.
    """

    rank: int | None = None
    node: int | None = None
    every: bool = False
    attempt: int | None = None


class Logs:
    """The files of what is wanted, each from where it was left."""

    def __init__(self, layout: RunLayout, wanted: Wanted) -> None:
        self._layout, self._wanted = layout, wanted
        self._tails: dict[Path, Tail] = {}
        self._rest: dict[Path, bytes] = {}
        self._hosts: dict[tuple[Path, int], str] = {}
        self._asked: set[Path] = set()  # attempts whose records were read in this look
        self._said: set[str] = set()  # what could not be read
        self._first = max(1, len(layout.attempts))
        self._metrics, self._progress = Tail(layout.metrics), Progress()
        self._has_looked = False

    def show(self) -> bool:
        """Print what is new; whether there was anything."""
        any_new = False
        self._asked.clear()
        files = [*self._files()]
        for path, prefix in files:
            tail = self._tails.setdefault(path, Tail(path, kept=not self._wanted.every))
            while data := tail.read():
                any_new = True
                sys.stdout.buffer.write(self._prefixed(path, prefix, data) if prefix else data)
            if tail.refusal and tail.refusal not in self._said:
                self._said.add(tail.refusal)
                sys.stderr.write(f"{tail.refusal}\n")
        if self._wanted == Wanted() and self._layout.job_output not in dict(files):
            any_new = self._show_progress() or any_new
        sys.stdout.flush()
        return any_new

    def finish(self) -> None:
        """Print what is new, and last lines that are not whole."""
        self.show()
        unended = {path: rest for path, rest in self._rest.items() if rest}
        for path, prefix in self._files() if unended else ():
            if path in unended:
                sys.stdout.buffer.write(b"%s %s\n" % (prefix.encode(), unended[path]))
        self._rest.clear()
        sys.stdout.flush()

    def _show_progress(self) -> bool:
        """Print the lines of the progress, which the built-in trainer leaves to the metrics, of the newest attempt."""
        lines: list[str] = []
        for record in self._metrics.records():
            if record.get("event") == "start" and not self._has_looked:
                lines.clear()  # they are of earlier attempts
            self._progress = self._progress.take(record, 0.0)
            lines += filter(None, [plain_line(self._progress, record)])
        self._has_looked = True
        sys.stdout.buffer.write("".join(f"{line}\n" for line in lines).encode())
        return bool(lines)

    def _prefixed(self, path: Path, prefix: str, data: bytes) -> bytes:
        *lines, self._rest[path] = (self._rest.get(path, b"") + data).split(b"\n")
        return b"".join(b"%s %s\n" % (prefix.encode(), line) for line in lines)

    def _files(self) -> Iterator[tuple[Path, str]]:
        wanted = self._wanted
        output = self._layout.job_output
        if wanted == Wanted() and output.exists():
            yield output, ""
            return
        for attempt in self._layout.attempts:
            number = int(attempt.root.name)
            if number < self._first if wanted.attempt is None else number != wanted.attempt:
                continue
            yield from self._of_attempt(attempt)

    def _of_attempt(self, attempt: AttemptLayout) -> Iterator[tuple[Path, str]]:
        wanted = self._wanted
        if wanted.node is not None:
            yield AttemptLayout(attempt.root, wanted.node).launcher_log, ""
        elif wanted.every:
            for path in sorted(attempt.logs.glob("rank-*.*"), key=lambda path: (_rank_of(path), path.suffix)):
                yield path, f"[{_rank_of(path)} {self._host(attempt, _rank_of(path))}]"
        else:
            for stream in ("out", "err"):
                yield attempt.log(wanted.rank or 0, stream), ""

    def _host(self, attempt: AttemptLayout, rank: int) -> str:
        """The host of a rank, by its record."""
        if (attempt.root, rank) not in self._hosts and attempt.root not in self._asked:
            self._asked.add(attempt.root)
            try:
                found = {(attempt.root, each.rank): each.host for each in read_records(str(attempt.root))}
            except OSError:
                found = {}
            self._hosts |= found
        return self._hosts.get((attempt.root, rank), "?")


def _rank_of(path: Path) -> int:
    number = path.stem.removeprefix("rank-")
    return int(number) if number.isdecimal() else 0


def show_logs(layout: RunLayout, wanted: Wanted, *, follow: bool) -> int:
    """Print the output; follow: until the run has ended, whose exit code it returns."""
    if scheduler := _elsewhere(layout):
        if wanted.rank is not None or wanted.attempt is not None:
            what = "output of single ranks and of earlier attempts is in the run directory on the nodes' volume"
            raise UsageError(what, hint="--node N shows what a node says, --all what all say; or read it with `attach`")
        return _show_output(layout, scheduler, None if wanted.every else wanted.node or 0, follow=follow)
    refuse_absent(layout, wanted, follow=follow)
    logs = Logs(layout, wanted)
    if follow:
        return until_end(layout, logs)
    logs.finish()
    return 0


def refuse_absent(layout: RunLayout, wanted: Wanted, *, follow: bool) -> None:
    """UsageError for a rank or a node that the run has none of, or an attempt that is not there (yet, to follow)."""
    try:
        topology = read_plan(layout).topology
        most_of = {"rank": topology.world_size, "node": topology.nodes}
    except MachineError:  # a damaged plan: the logs are shown all the same
        most_of = {}
    numbers = [int(each.root.name) for each in layout.attempts]
    for name, number in (("rank", wanted.rank), ("node", wanted.node)):
        most = most_of.get(name)
        if number is not None and most is not None and number >= most:
            hint = f"its {name}s are 0 to {most - 1}" if most > 1 else f"its only {name} is 0"
            raise UsageError(f"{layout.root} has no {name} {number}", hint=hint)
    if wanted.attempt is not None and wanted.attempt not in numbers and not follow:
        known = f"its only attempt is {numbers[0]}" if len(numbers) == 1 else f"its attempts are {str(numbers)[1:-1]}"
        hint = known if numbers else "it has not started yet"
        raise UsageError(f"{layout.root} has no attempt {wanted.attempt}", hint=hint)


def _elsewhere(layout: RunLayout) -> Scheduler | None:
    """The scheduler that has the output of a run, where this is but the record of one that is not seen from here."""
    known = submitted(layout.root)
    return known[0] if known and not known[0].shares_folder and not layout.attempts else None


def _show_output(layout: RunLayout, scheduler: Scheduler, node: int | None, *, follow: bool) -> int:
    """Print what the pods say: of a node, or (None) of all. follow: until the end, over all starts; its exit code.

    UsageError where the scheduler has nothing of it; MachineError where its command is missing.
    """
    submission = read_submission(layout.root)
    assert submission is not None
    shown = -1  # the start whose output has been shown
    while True:
        found = state_of(layout)
        if found.nodes and found.attempt > shown and (found.word == "running" or found.is_over):
            _print(scheduler.logs(_job_of(submission), node, follow=follow))
            shown = found.attempt
            found = state_of(layout)
        elif not follow:
            raise UsageError(f"{submission.job} is {found.word}: {found.why or 'it has no pods'}", hint=LOST_OUTPUT)
        if not follow:
            return 0
        if found.is_over:
            sys.stderr.write(f"{found.word.replace('_', ' ')}{f': {found.why}' if found.why else ''}\n")
            return found.exit_code if found.exit_code is not None else 1
        time.sleep(OUTPUT_SECONDS)


OUTPUT_SECONDS = 3.0  # between looks for pods
LOST_OUTPUT = "output of pods that are gone is in the run directory on their volume"


def _print(argv: Sequence[str]) -> None:
    sys.stdout.flush()
    try:
        subprocess.run(argv, stdin=subprocess.DEVNULL, check=False)
    except OSError as error:
        what = f"{argv[0]} cannot be started: {(error.strerror or str(error)).lower()}"
        raise MachineError(what, hint=f"run trainkit where {argv[0]} is") from error


def wait_for(layout: RunLayout, *, show: bool) -> int:
    """The run's exit code, once it has ended. show: print what it says meanwhile."""
    if show and (scheduler := _elsewhere(layout)):
        return _show_output(layout, scheduler, 0, follow=True)
    return until_end(layout, Logs(layout, Wanted()) if show else None)


def until_end(layout: RunLayout, logs: Logs | None) -> int:
    """Wait for the end, over all attempts; the run's exit code.

    Where nothing can be known of it, as of a machine that is lost, that is said once, and it is waited for further.
    """
    asked, doubt, said = time.monotonic(), "", ""
    submission = read_submission(layout.root)
    while True:
        began = time.monotonic()
        status = read_status(layout) or Status()
        over = _is_over(status, submission)
        if logs:
            logs.show()
            refuse_unread()
        if over:
            if logs:
                time.sleep(SETTLE_SECONDS)
                while is_running(layout) and time.monotonic() - began < SUMMARY_SECONDS:
                    time.sleep(LOOK_SECONDS)
                logs.finish()
            return status.exit_code or 0
        if time.monotonic() - asked > ASK_SECONDS:
            asked = time.monotonic()
            found = state_of(layout)
            if found.is_over and not _is_over(read_status(layout) or Status(), submission):
                sys.stderr.write(f"{found.word.replace('_', ' ')}: {found.why}\n")
                return found.exit_code if found.exit_code is not None else 1
            before, doubt = doubt, found.why if found.word == "unknown" else ""
            if doubt and doubt == before != said:  # not for one question that was not answered
                said = doubt
                sys.stderr.write(
                    f"the state of the run is unknown: {doubt}\n  next: Ctrl-C ends this, and not the run\n"
                )
                sys.stderr.flush()
        time.sleep(max(LOOK_SECONDS, PAUSES * (time.monotonic() - began)))


def _is_over(status: Status, submission: Submission | None) -> bool:
    """Whether a run has ended for good, as its own files say."""
    return status.state == "ended" and (status.outcome is not None or not may_be_requeued(submission))


def refuse_unread() -> None:
    """BrokenPipeError where nobody can read what is printed any more, though there is nothing to print now."""
    waiting = select.poll()
    waiting.register(1, 0)  # an error is told in any case (poll(2))
    if any(event & select.POLLERR for _, event in waiting.poll(0)):
        raise BrokenPipeError


BETWEEN_SECONDS = 0.3
NOT_HERE = "it runs on another machine, which is reached through its scheduler alone, and it has none"
SectionOf = Callable[[RunLayout], Cluster]  # the cluster that the recipe of a run names


def cancel(layout: RunLayout, section: SectionOf, *, now: bool, environ: Mapping[str, str]) -> str:
    """End a run; what was done, for people. UsageError for one that has ended, and of which nothing stays."""
    submission = require_own(layout)
    scheduler = SCHEDULERS[submission.scheduler] if submission else None
    if submission and scheduler and scheduler.stays:
        return _remove(layout, scheduler, submission, now=now, environ=environ)
    _living(layout)
    if submission is None or scheduler is None:
        _signal_here(layout, signal.SIGKILL if now else signal.SIGTERM)
        return f"ending {layout.root}" + ("" if now else _before_the_end(layout))
    if scheduler.starts_nodes:
        _signal_on_hosts(layout, submission, signal.SIGINT if now else signal.SIGTERM, section, environ)
        if now:  # a second one kills
            time.sleep(BETWEEN_SECONDS)
            with contextlib.suppress(UsageError):  # it has ended by the first
                _signal_on_hosts(layout, submission, signal.SIGINT, section, environ)
        return f"ending {layout.root}" + ("" if now else _before_the_end(layout))
    job = _own_job(layout, submission, environ)
    requested_before = pending_request(layout)
    request(layout, "cancel")
    try:
        return _cancel_job(layout, submission, job, environ, now=now)
    except (MachineError, UsageError):
        if not requested_before:  # else the next signal of the scheduler's would end the run for good
            cancel_request(layout)
        raise


def _before_the_end(layout: RunLayout) -> str:
    """What a run does when it is told to end: a script of the user's own saves only if it handles the signal."""
    if read_run(layout.root).launched.get("program") == "builtin":
        return ": it saves a checkpoint first"
    return ": its program gets SIGTERM, and may save first"


def _job_of(submission: Submission) -> Job:
    return Job(submission.job, submission.cluster)


def _own_job(layout: RunLayout, submission: Submission, environ: Mapping[str, str]) -> JobState:
    """What the scheduler knows of a run's job. MachineError where its number is another job's, or in this cluster."""
    number = submission.job
    found = _told(SCHEDULERS[submission.scheduler].states(_job_of(submission)), environ).get(number)
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
    home, who = submission.cluster or submission.controller, SCHEDULERS[submission.scheduler].controller()
    answers = (answer_or(who, "", environ) if who else "") or submission.controller
    if home and answers != home:
        raise MachineError(
            f"job {submission.job} was submitted to the cluster {home}, and {answers} answers here", hint=hint
        )


def _remove(
    layout: RunLayout, scheduler: Scheduler, submission: Submission, *, now: bool, environ: Mapping[str, str]
) -> str:
    """Remove all that a scheduler has of a run, where it stays when the run has ended; and write down the end."""
    found, job = state_of(layout), submission.job
    removed = _told(scheduler.cancel(_job_of(submission), now=now), environ)
    if not found.is_over:
        why = "killed by request" if now else "cancelled"
        update_status(layout, state="ended", outcome="cancelled", exit_code=143, why=why, ended=time.time())
        return f"ending {job} ({found.word})" + ("" if now else _before_the_end(layout))
    if not removed:
        raise _ended(layout, found)
    if found.source != "status.json":  # from now on nobody else knows it
        how = {"outcome": found.word, "exit_code": found.exit_code, "why": found.why}
        update_status(layout, state="ended", ended=time.time(), **how)
    return f"{layout.root} is {found.word.replace('_', ' ')}; removed {', '.join(removed)}"


def _cancel_job(
    layout: RunLayout, submission: Submission, job: JobState, environ: Mapping[str, str], *, now: bool
) -> str:
    """Have the scheduler end a job; what was done, for people."""
    scheduler, number = SCHEDULERS[submission.scheduler], submission.job
    if not now and job.state == "running":
        _told(scheduler.end(_job_of(submission)), environ)
        word = state_of(layout).word
        return f"ending job {number} ({word})" + (_before_the_end(layout) if word == "running" else "")
    _told(scheduler.cancel(_job_of(submission), now=now), environ)
    if job.state == "queued":
        account = {"state": "ended", "outcome": "cancelled", "exit_code": 143, "why": "cancelled in the queue"}
        update_status(layout, **account, ended=time.time())
    return f"cancelled job {number}"


def save(layout: RunLayout, section: SectionOf, environ: Mapping[str, str]) -> str:
    """Have a run save; what was done, for people. UsageError for one that does not run."""
    submission, found = require_own(layout), _living(layout)
    if found.word not in ("running", "unknown"):
        raise UsageError(f"{layout.root} is {found.word}: there is nothing to save yet", hint="wait until it runs")
    scheduler = SCHEDULERS[submission.scheduler] if submission else None
    here = (status := read_status(layout)) is not None and status.host == os.uname().nodename
    if submission and scheduler and scheduler.starts_nodes:
        _signal_on_hosts(layout, submission, signal.SIGUSR1, section, environ)
    elif submission is None or scheduler is None or (here and scheduler.shares_folder):
        _signal_here(layout, signal.SIGUSR1)
    else:
        python = str(read_plan(layout, own=True).commands[0].wrapper[0])
        if scheduler.shares_folder:
            _own_job(layout, submission, environ)
        _told(scheduler.save(_job_of(submission), expand(found.nodes), python), environ)
    if read_plan(layout).program.kind == "builtin":
        return f"{layout.root} saves a checkpoint at its next step"
    return f"{layout.root} is asked to save a checkpoint by SIGUSR1, which its program may not know"


def attach_command(
    layout: RunLayout,
    node: int,
    words: Sequence[str],
    section: SectionOf,
    environ: Mapping[str, str],
    *,
    terminal: bool,
) -> tuple[tuple[str, ...], Mapping[str, str]]:
    """The command that runs another one on a node of a run, and its variables. UsageError where there is no such node.

    section: of its recipe.
    """
    submission, found = require_own(layout), _living(layout)
    if submission is None:
        if node:
            raise UsageError(f"{layout.root} is no submitted run: it has no node {node} to be reached")
        return tuple(words), environ
    scheduler = SCHEDULERS[submission.scheduler]
    hosts = _own_hosts(layout) if scheduler.starts_nodes else expand(found.nodes)
    if node >= len(hosts):
        what = f"{layout.root} has no node {node}" if hosts else f"job {submission.job} is {found.word}"
        wait = found.why or "wait until it runs"
        raise UsageError(what, hint=f"its nodes are {found.nodes}, numbered from 0" if hosts else wait)
    if scheduler.controller() is not None:
        again = shlex.join(("trainkit", "attach", str(layout.root), f"--node={node}", "--", *words))
        hint = f"{scheduler.title} attaches to jobs of its own cluster alone: give `{again}` where that one answers"
        _require_cluster(submission, environ, hint)
    with _refusals(scheduler.title):
        return scheduler.attach(
            _job_of(submission),
            hosts[node],
            words,
            terminal=terminal,
            section=lambda: section(layout),
            environ=environ,
        )


def _own_hosts(layout: RunLayout) -> tuple[str, ...]:
    """The machines of a run that was started through ssh. MachineError where they are not known for certain."""
    hosts = hosts_of(layout, own=True)
    if not hosts:
        raise MachineError(f"{layout.plan} is damaged, or another user's: nobody knows the hosts of the run")
    return hosts


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


def _signal_on_hosts(
    layout: RunLayout, submission: Submission, number: int, section: SectionOf, environ: Mapping[str, str]
) -> None:
    """A signal to a run without a queue: to who starts it, until it has begun; then to node 0, which passes it on."""
    if is_being_started(layout) and _signal_submitter(layout, submission, number):
        return
    status = read_status(layout)
    if status is not None and status.host == os.uname().nodename:
        _signal_here(layout, number)
        return
    host, python = _own_hosts(layout)[0], str(read_plan(layout, own=True).commands[0].wrapper[0])
    argv = (python, "-P", "-m", "trainkit", "job", "signal", str(layout.root), str(int(number)))
    from trainkit.schedulers.jobs.ssh_nodes import SECONDS, why_not

    try:
        there = ask(SCHEDULERS[submission.scheduler].signal_node(host, argv, section(layout)), environ, SECONDS)
    except RefusedError as error:
        raise MachineError([why_not(host, str(error))]) from error
    if not there:
        raise UsageError(f"{layout.root} does not run on {host}, or its trainkit is gone and its guardian ends it")


def _signal_submitter(layout: RunLayout, submission: Submission, number: int) -> bool:
    """A signal to the trainkit that starts a run, which tells the nodes; False where it does so no more."""
    if submission.host != os.uname().nodename:
        what = f"{layout.root} is being started by trainkit on {submission.host}"
        raise MachineError(what, hint=f"wait until it has begun, or give the command there: ssh {submission.host}")
    process = submission.process
    if process is not None and process.runs and is_stopped(process.pid):  # it would hear of it only when it goes on
        what = f"process {process.pid}, which starts {layout.root}, is stopped (Ctrl-Z)"
        raise MachineError(what, hint=f"let it go on (fg, or kill -CONT {process.pid}), and give the command again")
    return process is not None and _reached(process, layout.root / SUBMITTER, layout, number)


def _reached(process: ProcessId, lock: Path, layout: RunLayout, number: int) -> bool:
    """A signal to the trainkit of a run; whether it is the one that the run directory names."""
    try:
        return signal_holder(process, str(lock), str(layout.root), number)
    except PermissionError as error:
        what = f"process {process.pid} of {layout.root} cannot be signalled: {error.strerror}"
        raise MachineError(what) from error


def _told(query: Query[Answer], environ: Mapping[str, str]) -> Answer:
    with _refusals(query.argv[0]):
        return ask(query, environ)


@contextlib.contextmanager
def _refusals(who: str) -> Iterator[None]:
    """UsageError where a job has ended, MachineError for what a scheduler refuses besides."""
    try:
        yield
    except EndedError as error:
        raise UsageError("the job has ended meanwhile", hint="`trainkit status` says how") from error
    except RefusedError as error:
        raise MachineError(f"{who} refuses: {error}") from error
