"""PBS Professional and OpenPBS: the job script of a plan, how it is submitted, looked at, queued again and ended.

Sources: the man pages of OpenPBS 23.06 (qsub, qstat, qsig, qdel, pbsdsh), and its source for exit codes (job.h), for
what a signal reaches (resmom/requests.c), and for the variables of a task (resmom/start_exec.c).
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

from trainkit.errors import Diagnostic, MachineError
from trainkit.launch_plan.context import Context
from trainkit.launch_plan.model import Plan, Variable, text
from trainkit.launch_plan.provenance import SourcedJob, Token, setup_lines, sourced_job, token
from trainkit.recipe.resolved import Resolved
from trainkit.recipe.schema import Pbs as Section
from trainkit.recipe.schema import Recipe
from trainkit.recipe.schema.cluster import Cluster
from trainkit.schedulers.base import (
    SCRIPT,
    DryRun,
    EndedError,
    Job,
    JobRequest,
    JobState,
    NoAnswerError,
    Output,
    Place,
    Query,
    RefusedError,
    Scheduler,
    State,
    cores_of_share,
    number_in,
    too_short_a_warning,
)
from trainkit.schedulers.client import answer_or, ask

OUTPUT = "pbs.out"  # what PBS itself collects: of nodes other than the first, and before the job's own output is open
ONE_CHUNK = (
    "each node is one chunk, on a host of its own: trainkit is started once on each, and starts the ranks itself"
)
# Letter of an option that trainkit sets itself -> the recipe key to use.
SET_HERE = {
    "N": "name", "q": "cluster.queue", "A": "cluster.account", "r": "cluster.requeue", "J": "", "h": "", "I": "",
    **dict.fromkeys("oejk", "output.root"),
}  # fmt: skip
# The same of what `-l` asks for.
RESOURCES = {
    "select": "nodes.count", "nodes": "nodes.count", "place": "cluster.exclusive", "walltime": "cluster.time",
    "ncpus": "cluster.cpus_per_node", "ngpus": "cluster.gpus", "mem": "cluster.memory_per_node",
}  # fmt: skip
# What qsub says of a job that it refuses -> the recipe key that asks for it.
BLAMED = {
    "queue": "cluster.queue",
    "unknown resource": "cluster.resources",
    "resource limits": "cluster.time",
    "account": "cluster.account",
    "-n value": "name",
}
# qsub's words where the server, as a whole, refuses the job (pbs_error.h); anything else may mean that it has it.
_REFUSAL = re.compile(
    r"unknown|illegal|invalid|violates|limit|not (?:permitted|authorized|enabled|allowed)|unauthorized|denied|"
    r"cannot |rejected|usage:",
    re.IGNORECASE,
)
NUMBER = r"[1-9][0-9]{0,9}|0"
_SUBMITTED = re.compile(rf"({NUMBER})(\[\])?\.[\w.-]+")
_STATES: dict[str, State] = {
    **dict.fromkeys("QHWTM", "queued"),
    **dict.fromkeys("RESUB", "running"),
    **dict.fromkeys("FX", "ended"),
}
RERUN = range(60, 64)  # substates of a job that is ended to be queued again (job.h, JOB_SUBSTATE_RERUN…)
# Exit_status below 0 (job.h, JOB_EXEC_…) -> how a job ended that was not ended by its script.
WHY = {
    -29: "time_limit", -28: "time_limit", -27: "out_of_memory", -26: "out_of_memory",
    -20: "node_failure", -14: "node_failure", -30: "node_failure",
}  # fmt: skip
BY_SIGNAL = 256  # added to the number of the signal that ended the script
TERMINATED = " terminated by "  # in the comment of a job that was deleted while it ran
UNKNOWN, FINISHED = "Unknown Job Id", "has finished"
DEFAULT_KILL_DELAY = 10.0  # seconds (pbs_queue_attributes(7B))
SUBMIT_SECONDS, LATE_SECONDS, LOOK_SECONDS = 60.0, 10.0, 1.0  # for qsub, then for a job to come into the queue
REQUEUE_SECONDS = 300.0  # for a server that does not answer, until a job is not queued again
AFTER_SECONDS = 60  # no job may depend on a task of an array: its next start waits until this one has surely ended
_PLAIN = re.compile(r"[\w@%+=,./-]+")


class Pbs(Scheduler):
    """Jobs of qsub, whose script starts a task on each of its nodes by pbsdsh.

    A task has neither the variables nor the folder of the script: the script is run there again, up to the set-up.
    """

    kind, title = "pbs", "PBS"
    job_id = rf"({NUMBER})(\[\d{{0,10}}\])?(\.[\w.-]+)?"
    least_tasks: ClassVar[int] = 2
    warns: ClassVar[bool] = False
    resubmits: ClassVar[bool] = True
    # A signal reaches every process of the job on its first node, and this one ends none that does not know it.
    save_signal: ClassVar[signal.Signals] = signal.SIGURG
    loses_signals: ClassVar[bool] = True

    def problems(self, context: Context) -> Iterator[Diagnostic]:
        section, error = _section(context.recipe), context.resolved.error
        for position, word in enumerate(section.qsub):
            if not word.startswith("-"):
                what, hint = f"cluster.qsub[{position}] is {word!r}", "write an option and its value as one word: -Wx=y"
                yield error("cluster.qsub", what, hint, why="options only")
                continue
            letter, value = word[1:2], word[2:]
            names = re.findall(r"(?:^|,)\s*(\w+)", value) if letter == "l" else ()
            for name in (letter, *names):
                table = SET_HERE if name == letter else RESOURCES
                if name in table:
                    hint = f"use {table[name]}" if table[name] else "leave it out"
                    shown = f"-{letter}" if name == letter else f"-l {name}"
                    yield error("cluster.qsub", f"cluster.qsub sets {shown}", hint, why="trainkit sets it by itself")

    def job(self, context: Context) -> SourcedJob:
        section = _section(context.recipe)
        lines = [token("#!/bin/bash", rule="a job script starts with its interpreter")]
        given = self._options(context, section)
        lines += [Token(text("#PBS ", *each.text.parts), each.source) for each in given]
        again = "pbsdsh starts this script on each node, with the command to run behind the set-up"
        lines += [
            token('trainkit_task=("$@")', rule=again),
            token("trainkit_run=", Variable.RUN_DIR, rule="the run directory"),
            token("[ $# -eq 0 ] || trainkit_run=${0%/*}", rule=again),
            token(
                '[ "${PBS_NODENUM:-0}" != 0 ] || exec >>"$trainkit_run/job.out" 2>&1',
                rule="the job's output is kept with the run, and is there at once",
            ),
            token('cd "$PBS_O_WORKDIR" || exit 4', rule="the folder where it is submitted"),
        ]
        python = f"exec {shlex.quote(context.facts.executable)} -P -m trainkit job batch "
        gone = "the run has ended before it began, and `trainkit status` says why"
        lines += setup_lines(section.setup, token(f'{python}"$trainkit_run" --failed "$1"', rule=gone))
        lines.append(token('[ ${#trainkit_task[@]} -eq 0 ] || exec "${trainkit_task[@]}"', rule=again))
        rule = "the job: it starts the plan on each node, asks it to save before its time is up, and queues it again"
        lines.append(token(f'{python}"$trainkit_run"', rule=rule))
        submit = [token("qsub", rule="submits to PBS")]
        submit.append(token(Variable.RUN_DIR, f"/{SCRIPT}", rule="the job script in the run directory"))
        step = [token("pbsdsh", rule="starts a task on each node of the job"), token("--", rule=again)]
        step += [token("/bin/bash", rule=again), token(Variable.RUN_DIR, f"/{SCRIPT}", rule=again)]
        terms = {
            "requeue": tuple(section.requeue.after),
            "without_progress": section.requeue.without_progress,
            "warn_seconds": section.requeue.warn_seconds,
            "start_seconds": section.start_seconds,
        }
        return sourced_job(self.kind, SCRIPT, lines, submit, step, **terms)

    def _options(self, context: Context, section: Section) -> Iterator[Token]:
        recipe = context.recipe
        yield token(f"-N {recipe.name}", keys=("name",))
        cpus, keys = self.cores(context)
        chunk, keys = f"ncpus={cpus}:mpiprocs=1", ("nodes.count", *keys)
        if context.topology.device == "cuda" and section.gpus == "ngpus":
            chunk += f":ngpus={len(context.devices)}"
            keys = (*keys, "cluster.gpus", "devices.select", "nodes.processes_per_node")
        if section.memory_per_node is not None:
            chunk, keys = f"{chunk}:mem={section.memory_per_node}", (*keys, "cluster.memory_per_node")
        for name, value in section.resources.items():
            chunk, keys = f"{chunk}:{name}={value}", (*keys, f"cluster.resources.{name}")
        yield token(f"-l select={recipe.nodes.count}:{chunk}", keys=keys)
        place = f"-l place=scatter{':excl' if section.exclusive else ''}"
        yield token(place, keys=("cluster.exclusive",) if section.exclusive else (), rule=ONE_CHUNK)
        for option, key in (("-l walltime=", "time"), ("-q ", "queue"), ("-A ", "account")):
            if (value := getattr(section, key)) is not None:
                yield token(f"{option}{value}", keys=(f"cluster.{key}",))
        # PBS itself begins a job again that is preempted, or whose first node is lost.
        again = {"preemption", "node_failure"}.intersection(section.requeue.after)
        yield token(f"-r {'y' if again else 'n'}", keys=("cluster.requeue.after",))
        yield token("-j oe", rule="what PBS collects is in one file")
        yield token("-o ", Variable.RUN_DIR, f"/{OUTPUT}", rule="what PBS collects is kept with the run")
        for word in section.qsub:
            yield token(word, keys=("cluster.qsub",))

    def cores(self, context: Context) -> tuple[int, tuple[str, ...]]:
        section = _section(context.recipe)
        return cores_of_share(context, section.cpus_per_node, section.machine)

    def restarts_after(self, section: Cluster) -> Sequence[str]:
        assert isinstance(section, Section)
        return section.requeue.after

    def place(self, environ: Mapping[str, str]) -> Place | None:
        """The number alone: the names of the nodes are in a file that the first one has."""
        number = number_in(environ, "PBS_NODENUM")
        return None if number is None else Place(number)

    def own_job(self, environ: Mapping[str, str]) -> str:
        return environ.get("PBS_JOBID", "")

    def restarts(self, environ: Mapping[str, str]) -> int:
        return answer_or(self.state(Job(self.own_job(environ))), JobState("unknown"), environ).restarts

    def step_words(self, environ: Mapping[str, str]) -> tuple[str, ...]:
        try:
            names = Path(environ.get("PBS_NODEFILE", "")).read_text(encoding="utf-8").split()
        except OSError as error:
            what = f"PBS_NODEFILE cannot be read: {error.strerror}"
            raise MachineError(what, hint="it names the nodes of the job, and is on its first one") from error
        return ("--hosts", ",".join(dict.fromkeys(names)))

    def files(self, request: JobRequest) -> Mapping[str, str]:
        _require_plain(request.run_dir)
        bound = request.job.content.bind({Variable.RUN_DIR: request.run_dir})
        return {SCRIPT: bound if request.script is None else request.script}

    def array_script(self, lines: Sequence[str], directory: str, stem: str, count: int, at_most: int | None) -> str:
        """What makes it an array is said when it is submitted: a task that is queued again is a job by itself."""
        _require_plain(stem)
        made = []
        for line in lines:
            number = "^array_index^" if line.startswith("#PBS") else "$PBS_ARRAY_INDEX"
            made.append(line.replace(directory, f"{stem}-{number}"))
        return "".join(f"{line}\n" for line in made)

    def task(self, job_id: str, number: int) -> str:
        return job_id.replace("[]", f"[{number}]")

    def task_of(self, job_id: str) -> tuple[str, int] | None:
        found = re.fullmatch(r"(\d+\[)(\d+)(\].*)", job_id)
        return (f"{found[1]}{found[3]}", int(found[2])) if found else None

    def is_named(self, job_id: str, word: str) -> bool:
        """Also by its number without the server's name, and an array without its brackets."""
        short = job_id.partition(".")[0]
        return word in (job_id, short, short.removesuffix("[]"))

    def dry_run(self, request: JobRequest, resolved: Resolved) -> DryRun:
        """PBS can only be asked for the limits of a queue."""
        section, plan, environ = _section(resolved.recipe), request.plan, request.environ
        self.files(request)
        try:
            name = section.queue or ask(_query(("qstat", "-B"), default_queue), environ)
            queue = ask(_query(("qstat", "-Q"), queue_attributes, name), environ)
        except RefusedError as error:
            key = "cluster.queue" if section.queue else "cluster"
            refusal = resolved.error(key, f"PBS refuses the job: {error}", "`qstat -Q` lists the queues")
            return DryRun("", refused=(refusal,))
        found = [
            *_limits(section, name, queue, resolved, plan),
            *too_short_a_warning(plan, section.requeue.warn_seconds),
        ]
        found += [*_not_exported(section, plan, resolved)]
        with contextlib.suppress(MachineError):
            _require_plain(os.path.abspath(plan.output_root))  # noqa: PTH100 - as it is written, links and all
            refused = tuple(each for each in found if each.severity == "error")
            said = f"PBS has no dry run: whether queue {name} has such nodes shows when the job waits there"
            return DryRun(said, tuple(each for each in found if each.severity != "error"), refused)
        return DryRun("", refused=(resolved.error("output.root", *_not_plain(plan.output_root)),))

    def submit(self, request: JobRequest) -> Job:
        """Where qsub does not print the job's number, or has failed, the queue is asked."""
        argv, environ = request.argv, request.environ
        if request.tasks:
            limit = f"%{request.at_most}" if request.at_most else ""
            argv = (argv[0], "-J", f"0-{request.tasks - 1}{limit}", *argv[1:])
        try:
            return Job(_given_in(argv, environ))
        except _SilentQueueError as error:
            what = f"{error}: PBS may have the job, and {request.run_dir} stays"
            hint = f"`qselect -N {request.plan.name}` tells whether it has; if not, remove that folder"
            raise NoAnswerError(what, hint=hint) from error

    def blamed(self, words: str) -> str:
        return next((key for word, key in BLAMED.items() if word in words.lower()), "cluster")

    def state(self, job: Job) -> Query[JobState]:
        return _query(("qstat",), lambda output: job_states(output).get(job.id, JobState("gone")), job.id)

    def states(self, job: Job) -> Query[dict[str, JobState]]:
        if (task := self.task_of(job.id)) is None and "[]" not in job.id:
            return _query(("qstat",), job_states, job.id)
        return _query(("qstat", "-t"), job_states, task[0] if task else job.id)

    def queue(self, job: Job, uid: int) -> Query[Mapping[str, State]]:
        """Each task of an array by itself. qselect names jobs, and not whether they run."""

        def read(output: Output) -> Mapping[str, State]:
            if output.code:
                raise RefusedError(output.words)
            return dict.fromkeys(output.out.split(), "queued")

        return Query(("qselect", "-T", "-u", _user(uid)), read)

    def past(self, job: Job) -> Query[JobState]:
        """Where the server keeps the history of jobs."""
        return _query(("qstat", "-x"), lambda output: job_states(output).get(job.id, JobState("gone")), job.id)

    def cancel(self, job: Job, *, now: bool) -> Query[tuple[str, ...]]:
        def read(output: Output) -> tuple[str, ...]:
            done(output)
            return ()

        return Query(("qdel", *(("-W", "force") if now else ()), job.id), read)

    def end(self, job: Job) -> Query[None]:
        """The script finds the request to end when it has the signal."""
        return Query(("qsig", "-s", "SIGURG", job.id), done)

    def save(self, job: Job, nodes: Sequence[str], python: str) -> Query[None]:
        return self.end(job)

    def attach(
        self,
        job: Job,
        host: str,
        argv: Sequence[str],
        *,
        terminal: bool,
        section: Callable[[], Cluster],
        environ: Mapping[str, str],
    ) -> tuple[tuple[str, ...], Mapping[str, str]]:
        """PBS starts nothing beside a running job from outside of it: by ssh, where the site lets its users in."""
        return ("ssh", "-tt" if terminal else "-T", "--", host, shlex.join(argv)), environ

    def starts_step(self, words: Sequence[str], run_dir: str) -> bool:
        return tuple(words) == ("pbsdsh", "--", "/bin/bash", f"{run_dir}/{SCRIPT}")

    def requeue(self, job: Job, run_dir: str, environ: Mapping[str, str]) -> str:
        """By another job, which starts when this one has ended: only operators may have a job queued again.

        A server that looks for a node that it has lost answers nobody for a while.
        """
        words: tuple[str, ...] = ("-W", f"depend=afterany:{job.id}")
        if task := self.task_of(job.id):
            when = datetime.fromtimestamp(time.time() + AFTER_SECONDS).strftime("%Y%m%d%H%M.%S")
            words = ("-a", when, "-v", f"PBS_ARRAY_INDEX={task[1]}")
        argv = ("qsub", *words, "-o", f"{run_dir}/{OUTPUT}", f"{run_dir}/{SCRIPT}")
        return _given_in(argv, environ, job.id, REQUEUE_SECONDS)


SCHEDULER = Pbs()


class _SilentQueueError(NoAnswerError):
    """Neither qsub nor the queue says whether there is a job."""


def _given_in(argv: tuple[str, ...], environ: Mapping[str, str], other: str = "", patience: float = 0.0) -> str:
    """Submit a job script; the job's number. Where qsub does not print it, the queue is asked for that script.

    other: a job of the same script. patience: seconds in which a server that does not answer is asked again.
    """

    def read(output: Output) -> str:
        jobs = objects(output, "Jobs")
        return next((each for each, known in jobs.items() if _script(known) == argv[-1] and each != other), "")

    until = time.monotonic() + patience
    while True:
        try:
            return ask(Query(argv, submitted, _without_prefix), environ, SUBMIT_SECONDS)
        except NoAnswerError as error:
            said = error
        late, failure = time.monotonic() + LATE_SECONDS, MachineError(f"{said}, and PBS has no such job")
        try:
            while time.monotonic() < late:
                if found := ask(Query(("qstat", "-f", "-F", "json"), read), environ):
                    return found
                time.sleep(LOOK_SECONDS)
        except (RefusedError, NoAnswerError) as silent:
            failure = _SilentQueueError(f"{said}, and the queue does not answer ({silent})")
        if time.monotonic() > until:
            raise failure from said


def _without_prefix(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Without the variable by which qsub would take other lines than `#PBS` for options."""
    return {name: value for name, value in environ.items() if name != "PBS_DPREFIX"}


def _section(recipe: Recipe) -> Section:
    assert isinstance(recipe.cluster, Section)
    return recipe.cluster


def _not_plain(path: str) -> tuple[str, str]:
    return (
        f"PBS reads the name of its output in its own way: {path!r}",
        "set output.root to a folder of plain characters",
    )


def _require_plain(path: str) -> None:
    """MachineError for a path that PBS, or the job script, would not take for what it is."""
    if not _PLAIN.fullmatch(path):
        what, hint = _not_plain(path)
        raise MachineError(what, hint=hint)


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _query(command: tuple[str, ...], read: Callable[[Output], Any], *names: str) -> Query[Any]:
    """All that qstat knows, as JSON."""
    return Query((*command, "-f", "-F", "json", *names), read)


def _limits(
    section: Section, name: str, queue: Mapping[str, Any], resolved: Resolved, plan: Plan
) -> Iterator[Diagnostic]:
    """What of a queue's limits keeps the job waiting for ever, or leaves it too little time to save in."""
    most, asked = seconds(queue.get("resources_max", {}).get("walltime", "")), seconds(section.time or "")
    if most is not None and asked is not None and asked > most:
        what = f"cluster.time is {section.time}, and queue {name} has resources_max.walltime = "
        hint = "write at most what the queue allows"
        yield resolved.error("cluster.time", f"{what}{queue['resources_max']['walltime']}", hint)
    for word, what in (("enabled", "takes no jobs"), ("started", "starts no jobs")):
        if queue.get(word) == "False":
            yield Diagnostic("warning", f"queue {name} {what} at the moment ({word} = False)", "cluster.queue")
    with contextlib.suppress(TypeError, ValueError):
        delay = float(queue.get("kill_delay", DEFAULT_KILL_DELAY))
        if delay < plan.grace_seconds and "preemption" in section.requeue.after:
            what = f"PBS kills {delay:.0f} s after it has told a job to end (kill_delay of queue {name}), and "
            hint = f"set launcher.grace_seconds to less than {delay:.0f}"
            what += f"launcher.grace_seconds is {plan.grace_seconds:g}"
            yield Diagnostic("warning", what, key="launcher.grace_seconds", hint=hint)


def _not_exported(section: Section, plan: Plan, resolved: Resolved) -> Iterator[Diagnostic]:
    """Variables that the job is to take from its caller, and PBS hands none on: it would show them to all users."""
    for name in plan.environment.take:
        if not any(name in line for line in section.setup):
            what = f"env_from passes {name} on, and a job of PBS has no variables of the shell that submits it"
            hint = f"export it in a line of cluster.setup, as `export {name}=$(cat ~/.{name.lower()})`"
            yield Diagnostic("warning", what, "env_from", resolved.origin("env_from"), hint=hint)


def submitted(output: Output) -> str:
    """The number of the job, of qsub. RefusedError where there is none, NoAnswerError where there may be one."""
    found = [line.strip() for line in output.out.splitlines() if _SUBMITTED.fullmatch(line.strip())]
    if output.code == 0 and len(found) == 1:
        return found[0]
    if output.code > 0 and not found:
        last = output.err.strip().splitlines()[:1]
        if last and _REFUSAL.search(last[0]) and not re.search(r"connect|communication", last[0], re.IGNORECASE):
            raise RefusedError(last[0])
    how = f" (exit code {output.code})" if output.code else ""
    raise NoAnswerError(f"qsub does not say the job's number{how}: {output.words or output.out.strip() or 'nothing'}")


def done(output: Output) -> None:
    """Of commands that print nothing when they have done it."""
    if output.code:
        ended = any(each in output.words for each in (UNKNOWN, FINISHED, "Request invalid for state"))
        raise (EndedError if ended else RefusedError)(output.words)


def objects(output: Output, kind: str) -> dict[str, dict[str, Any]]:
    """What qstat knows, by its names; nothing of jobs that it knows no more. Raises RefusedError."""
    if output.code and not any(each in output.err for each in (UNKNOWN, FINISHED)):
        raise RefusedError(output.words if output.err.strip() else f"exit code {output.code}")
    try:
        found = json.loads(output.out or "{}", strict=False).get(kind, {})
        return {name: known for name, known in found.items() if isinstance(known, dict)}
    except (ValueError, AttributeError) as error:
        raise RefusedError(f"qstat prints no JSON: {error}") from error


def default_queue(output: Output) -> str:
    """Of `qstat -B`."""
    servers = objects(output, "Server").values()
    if not (name := next((str(each["default_queue"]) for each in servers if "default_queue" in each), "")):
        raise RefusedError("the server has no default queue")
    return name


def queue_attributes(output: Output) -> dict[str, Any]:
    """Of `qstat -Q` and a queue."""
    return next(iter(objects(output, "Queue").values()), {})


def job_states(output: Output) -> dict[str, JobState]:
    """Jobs by their numbers; nothing of those that qstat knows no more. Raises RefusedError where it is silent."""
    return {number: _job(known) for number, known in objects(output, "Jobs").items()}


def _job(known: Mapping[str, Any]) -> JobState:
    word, comment = str(known.get("job_state", "")), str(known.get("comment", ""))
    state: State = _STATES.get(word, "unknown")
    code, again = _number(known.get("Exit_status")), _number(known.get("substate")) in RERUN
    # A job that is deleted while it runs says so at once.
    why = "cancelled" if TERMINATED in comment else WHY.get(code or 0, "") if state == "ended" else ""
    started = _moment(str(known.get("stime", "")))
    limit = seconds(str(known.get("Resource_List", {}).get("walltime", "")))
    return JobState(
        state,
        reason=comment if state != "running" else "",
        nodes=",".join(dict.fromkeys(re.findall(r"(?:^|\+)([^/+]+)/", str(known.get("exec_host", ""))))),
        restarts=max(0, (_number(known.get("run_count")) or 1) - 1) + again,
        exit_code=_exit_code(code) if state == "ended" else None,
        why=why,  # type: ignore[arg-type]
        started=started,
        ends=started + limit if started is not None and limit is not None and state == "running" else None,
        name=str(known.get("Job_Name", "")),
        user=str(known.get("Job_Owner", "")).partition("@")[0],
        files=tuple(filter(None, (_script(known),))),
    )


def _script(known: Mapping[str, Any]) -> str:
    """The path of a job's script: it is beside the file of its output, whose host is named before it."""
    path = str(known.get("Output_Path", "")).rpartition(":")[2]
    return f"{path.removesuffix(OUTPUT)}{SCRIPT}" if path.endswith(f"/{OUTPUT}") else ""


def _exit_code(code: int | None) -> int | None:
    """As a shell has it; None of a job that PBS has ended."""
    if code is None or code < 0:
        return None
    return 128 + code % BY_SIGNAL if code >= BY_SIGNAL else code


def _number(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _moment(text: str) -> float | None:
    """Seconds since the epoch of a local time as ctime(3) writes it."""
    try:
        return datetime.strptime(text, "%a %b %d %H:%M:%S %Y").timestamp()
    except (ValueError, OverflowError):
        return None


def seconds(text: str) -> float | None:
    """A walltime: ``36:00:00``, ``10:00``, or seconds; None for none."""
    if not re.fullmatch(r"\d{1,9}(:\d{1,2}){0,2}", text):
        return None
    total = 0
    for part in text.split(":"):
        total = 60 * total + int(part)
    return float(total)
