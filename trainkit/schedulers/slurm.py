"""Slurm: the job script of a plan, how it is submitted, looked at, queued again and ended, and what its commands print.

What is read is text that has been the same since Slurm 17; its JSON differs by release.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import islice
from typing import ClassVar

from trainkit.errors import Diagnostic, MachineError
from trainkit.files import publish
from trainkit.launch_plan.context import Context
from trainkit.launch_plan.model import Plan, Variable, text
from trainkit.launch_plan.provenance import SourcedJob, Token, setup_lines, sourced_job, token
from trainkit.recipe.resolved import Resolved
from trainkit.recipe.schema import Recipe
from trainkit.recipe.schema import Slurm as Section
from trainkit.recipe.schema.cluster import Cluster
from trainkit.schedulers.base import (
    SCRIPT,
    Allocation,
    Answer,
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
    hosts_in,
    number_in,
    too_short_a_warning,
)
from trainkit.schedulers.client import ask
from trainkit.schedulers.slurm_options import BARE, KNOWN, directives, options
from trainkit.text import join_names

SIGNAL = "USR1"  # that Slurm sends the job script before the time limit, and on preemption
SAVE = "USR2"  # that `trainkit checkpoint` sends it: one to the steps would end the helpers of a program
ENDED = ("Invalid job id specified", "already completing or completed")  # of a job that ends while it is asked of
# Recipe key -> option of sbatch that it becomes.
NAMED = {
    "partition": "partition", "account": "account", "qos": "qos", "constraint": "constraint",
    "reservation": "reservation", "nodelist": "nodelist", "exclude": "exclude", "time": "time",
    "memory_per_node": "mem",
}  # fmt: skip
# Option that trainkit sets itself -> the recipe key to use.
SET_HERE = {
    **{option: f"cluster.{key}" for key, option in NAMED.items()},
    "nodes": "nodes.count", "job-name": "name", "cpus-per-task": "cluster.cpus_per_node",
    "exclusive": "cluster.exclusive",
    **dict.fromkeys(("gres", "gpus", "gpus-per-node"), "cluster.gpus"),
    **dict.fromkeys(("ntasks", "ntasks-per-node"), "nodes.processes_per_node"),
    **dict.fromkeys(("signal", "requeue", "no-requeue"), "cluster.requeue"),
    **dict.fromkeys(("output", "error", "open-mode"), "output.root"),
    **dict.fromkeys(("kill-on-bad-exit", "wait", "unbuffered", "parsable", "array", "test-only"), ""),
}  # fmt: skip
ONE_TASK = "trainkit is started once on each node, and starts the ranks itself"
BY_TRAINKIT = "the nodes end one another in order; Slurm would kill node 0 while it writes the account"
OF_EVERY_STEP = {
    "--ntasks-per-node=1": ONE_TASK,
    "--kill-on-bad-exit=0": BY_TRAINKIT,
    "--wait=0": BY_TRAINKIT,
    "--unbuffered": "lines are shown when they are written",
}
COMMANDS = ("sbatch", "scontrol", "squeue", "scancel", "sacct", "srun")
WHOLE = {"SLURM_BITSTR_LEN": "0"}  # else they cut the tasks of an array that wait at 64 letters
# Variables that they take for options, or that are of a job that this is in; and those that say where Slurm is.
SETTINGS = ("SBATCH_", "SLURM_", "SRUN_")
ALSO_OF_SBATCH = ("SLURM_CLUSTERS", "SLURM_HINT")  # that sbatch takes for options
KEPT = ("SLURM_CONF", "SLURM_JWT", "SLURM_SACK_")
# Of options that are called otherwise there (sbatch(1), INPUT ENVIRONMENT VARIABLES).
OF_VARIABLES = {
    "TIMELIMIT": "time", "MEM_PER_NODE": "mem", "NO_REQUEUE": "requeue", "ARRAY_INX": "array", "DEBUG": "verbose",
    "REQ_SWITCH": "switches", "WAIT4SWITCH": "switches",
}  # fmt: skip
# What a job inherits from where it is submitted, and what changes it.
INHERITED = ("VIRTUAL_ENV", "CONDA_PREFIX", "LOADEDMODULES", "LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH")
_PLAIN = re.compile(r"[\w@%+=:,./<>-]+")
_FIELD = re.compile(r"(?:^|\s)([A-Za-z][A-Za-z0-9/:_]*)=")
_START = re.compile(r"Job (\d+) to start at (\S+) using (\d+) processors on nodes (\S+) in partition (\S+)")
NUMBER = r"[1-9][0-9]{0,9}"  # of a job
_SUBMITTED = re.compile(rf"({NUMBER})(?:;([\w.-]+))?")  # behind the number the cluster, where there are several
_TIME = re.compile(r"(?:(\d+)-)?(\d+(?::\d+){0,2})")
_SETTING = re.compile(r"^(\w+)\s*=\s*(.*?)\s*$", re.MULTILINE)
# Slurm's "Job State Codes". Whatever was queued again, or waits for its nodes to boot, is still to run.
STATES: dict[str, State] = {
    **dict.fromkeys(("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "CONFIGURING"), "queued"),
    **dict.fromkeys(("POWER_UP_NODE", "EXPEDITING", "RESV_DEL_HOLD", "LAUNCH_FAILED", "RECONFIG_FAIL"), "queued"),
    **dict.fromkeys(("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"), "running"),
    **dict.fromkeys(
        ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "DEADLINE"), "ended"
    ),
    "OUT_OF_MEMORY": "ended",
}  # none of REVOKED: the job runs on, on another cluster of the federation
WHY = {
    "CANCELLED": "cancelled",
    "TIMEOUT": "time_limit",
    "DEADLINE": "time_limit",
    "PREEMPTED": "preemption",
    "NODE_FAIL": "node_failure",
    "BOOT_FAIL": "node_failure",
    "OUT_OF_MEMORY": "out_of_memory",
}
# sbatch's last words where it or the controller refuses the job (slurm_errno.c, "slurmctld error codes"). Whatever else
# it says may mean that the controller has the job, and that the reply was lost: that of authentication, too.
_REFUSAL = re.compile(
    r"invalid (?!authentication|argument)|(?:request|specification) invalid|unrecognized option|not permitted|denied|"
    r"limit|disabled|not available|down state|requested|required|no partition|no eligible",
    re.IGNORECASE,
)
MOST_TASKS = 100_000  # of an array
UNLIMITED = ("UNLIMITED", "INFINITE", "NONE", "N/A", "NOT_SET")
# What Slurm says of a job that it refuses -> the recipe key that asks for it.
BLAMED = {
    "partition": "cluster.partition",
    "account": "cluster.account",
    "qos": "cluster.qos",
    "time limit": "cluster.time",
    "node count": "nodes.count",
    "memory": "cluster.memory_per_node",
    "gres": "cluster.gpus",
    "tres": "cluster.gpus",
    "feature": "cluster.constraint",
    "reservation": "cluster.reservation",
    "node name": "cluster.nodelist",
}
NO_SUCH_NODES = "node configuration is not available"  # Slurm's words, whatever of it is not
# Option of the job script that asks for something of the nodes -> the recipe keys that it may be due to.
OF_NODES = {
    "nodelist": ("cluster.nodelist",),
    "exclude": ("cluster.exclude",),
    "constraint": ("cluster.constraint",),
    "mem": ("cluster.memory_per_node",),
    "gres": ("cluster.gpu_kind", "devices.select", "nodes.processes_per_node", "cluster.machine", "cluster.gpus"),
    "gpus-per-node": ("cluster.gpu_kind", "devices.select", "nodes.processes_per_node", "cluster.machine"),
    "cpus-per-task": ("cluster.cpus_per_node", "nodes.processes_per_node", "cluster.machine"),
    "nodes": ("nodes.count",),
}
# Slurm's steps that are no step of srun: the batch script and salloc's shell (slurm.h, from NO_VAL downwards).
FIRST_SPECIAL_STEP = 0xFFFFFFF0
OTHER_FOLDER = "set output.root to a folder without it"
SUBMIT_SECONDS = 60.0  # sbatch itself tries again where the controller is too busy to take a job
LATE_SECONDS, LOOK_SECONDS = 10.0, 1.0  # for a job to come into the queue, once sbatch was given up


class Slurm(Scheduler):
    """Jobs of sbatch, whose script starts one step of srun on all nodes."""

    kind, title = "slurm", "Slurm"
    job_id = rf"{NUMBER}(_\d{{1,10}})?"  # _: a task of an array
    least_tasks: ClassVar[int] = 1
    ends_script: ClassVar[bool] = True

    def problems(self, context: Context) -> Iterator[Diagnostic]:
        section, error = _section(context.recipe), context.resolved.error
        for key in ("sbatch", "srun"):
            for position, word in enumerate(getattr(section, key)):
                place = f"cluster.{key}"
                if not word.startswith("-"):
                    what, hint = f"{place}[{position}] is {word!r}", "write an option and its value as one word: "
                    yield error(place, what, f"{hint}--switches=1", why="options only")
                for name in (each.name for each in options([word]) if each.name in SET_HERE):  # `-N2`, `--job=x`
                    instead = SET_HERE[name]
                    hint = f"use {instead}" if instead else "leave it out"
                    yield error(place, f"{place} sets --{name}", hint, why="trainkit sets it by itself")

    def job(self, context: Context) -> SourcedJob:
        section = _section(context.recipe)
        lines = [token("#!/bin/bash", rule="a job script starts with its interpreter")]
        given = self._options(context, section)
        lines += [Token(text("#SBATCH ", *each.text.parts), each.source) for each in given]
        lines.append(token(f"trap '' {SAVE}", rule="`trainkit checkpoint` sends it, also before trainkit listens"))
        rule = "the job: it starts the plan on each node, asks it to save before its time is up, and queues it again"
        batch = (f"exec {shlex.quote(context.facts.executable)} -P -m trainkit job batch ", Variable.RUN_DIR)
        failed = token(
            *batch, ' --failed "$1"', rule="the run has ended before it began, and `trainkit status` says why"
        )
        lines += [*setup_lines(section.setup, failed), token(*batch, rule=rule)]
        submit = [token("sbatch", rule="submits to Slurm"), token("--parsable", rule="prints the job's number alone")]
        submit.append(token(Variable.RUN_DIR, f"/{SCRIPT}", rule="the job script in the run directory"))
        terms = {
            "requeue": tuple(section.requeue.after),
            "without_progress": section.requeue.without_progress,
            "warn_seconds": section.requeue.warn_seconds,
            "start_seconds": section.start_seconds,
        }
        return sourced_job(self.kind, SCRIPT, lines, submit, tuple(self._srun(context, section)), **terms)

    def _options(self, context: Context, section: Section) -> Iterator[Token]:
        recipe = context.recipe
        yield token(f"--job-name={recipe.name}", keys=("name",))
        yield token(f"--nodes={recipe.nodes.count}", keys=("nodes.count",))
        yield token("--ntasks-per-node=1", rule=ONE_TASK)
        cpus, keys = self.cores(context)
        yield token(f"--cpus-per-task={cpus}", keys=keys)
        for key, option in NAMED.items():
            if (value := getattr(section, key)) is not None:
                yield token(f"--{option}={_quoted(value)}", keys=(f"cluster.{key}",))
        if section.exclusive:
            yield token("--exclusive", keys=("cluster.exclusive",))
        if context.topology.device == "cuda" and section.gpus != "none":
            option = "--gpus-per-node=" if section.gpus == "gpus-per-node" else "--gres=gpu:"
            kind = f"{section.gpu_kind}:" if section.gpu_kind else ""
            gpus = ("cluster.gpus", "cluster.gpu_kind", "devices.select", "nodes.processes_per_node")
            yield token(f"{option}{kind}{len(context.devices)}", keys=gpus)
        warn = section.requeue.warn_seconds
        yield token(f"--signal=B:{SIGNAL}@{warn}", keys=("cluster.requeue.warn_seconds",))
        yield token("--requeue" if section.requeue.after else "--no-requeue", keys=("cluster.requeue.after",))
        yield token("--open-mode=append", rule="a job that is queued again goes on in the same file")
        yield token("--output=", Variable.RUN_DIR, "/job.out", rule="the job's output is kept with the run")
        for word in section.sbatch:
            yield token(_quoted(word), keys=("cluster.sbatch",))

    def cores(self, context: Context) -> tuple[int, tuple[str, ...]]:
        section = _section(context.recipe)
        return cores_of_share(context, section.cpus_per_node, section.machine)

    def _srun(self, context: Context, section: Section) -> Iterator[Token]:
        nodes = context.recipe.nodes.count
        yield token("srun", rule="starts a step on the nodes of the job")
        yield token(f"--nodes={nodes}", keys=("nodes.count",))
        yield token(f"--ntasks={nodes}", rule=ONE_TASK)
        # srun takes no number of processors from sbatch since Slurm 22.05 (its release notes).
        yield token(f"--cpus-per-task={self.cores(context)[0]}", keys=("cluster.cpus_per_node",))
        yield from (token(word, rule=rule) for word, rule in OF_EVERY_STEP.items())
        for word in section.srun:
            yield token(word, keys=("cluster.srun",))

    def restarts_after(self, section: Cluster) -> Sequence[str]:
        assert isinstance(section, Section)
        return section.requeue.after

    def place(self, environ: Mapping[str, str]) -> Place | Allocation | None:
        if (job := environ.get("SLURM_JOB_ID")) is None:
            return None
        step = number_in(environ, "SLURM_STEP_ID")
        if step is None or step >= FIRST_SPECIAL_STEP:  # SLURM_NODEID is 0 there, too
            return Allocation(number_in(environ, "SLURM_JOB_NUM_NODES", "SLURM_NNODES") or 1, job, self.kind)
        nodes = number_in(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES") or 1
        tasks = number_in(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") or nodes
        if tasks > nodes:
            raise MachineError(
                f"Slurm starts {tasks} processes on {nodes} nodes: trainkit is started once on each node, and starts "
                "its ranks itself",
                hint="srun --ntasks-per-node=1 trainkit run …; nodes.processes_per_node says how many ranks a node has",
            )
        hosts = hosts_in(environ.get("SLURM_STEP_NODELIST", ""))
        node = number_in(environ, "SLURM_NODEID") or 0
        return Place(node, nodes, hosts if len(hosts) == nodes else (), self.start_of(job, str(step), environ))

    def own_job(self, environ: Mapping[str, str]) -> str:
        """17_2 of a task of an array.

        SLURM_JOB_ID of an array's last task is the number of the whole array (sbatch(1), JOB ARRAY SUPPORT).
        """
        array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
        return f"{array}_{task}" if array and task else environ.get("SLURM_JOB_ID", "")

    def restarts(self, environ: Mapping[str, str]) -> int:
        return number_in(environ, "SLURM_RESTART_COUNT") or 0

    def home(self, content: str, environ: Mapping[str, str]) -> tuple[str, str]:
        here = environ.get("SLURM_CLUSTER_NAME", "")
        return (here, "") if clusters(content) else ("", here)

    def files(self, request: JobRequest) -> Mapping[str, str]:
        if why := _unreadable(request.run_dir):
            raise MachineError(why, hint=OTHER_FOLDER)
        bound = request.job.content.bind({Variable.RUN_DIR: shlex.quote(request.run_dir)})
        return {SCRIPT: bound if request.script is None else request.script}

    def array_script(self, lines: Sequence[str], directory: str, stem: str, count: int, at_most: int | None) -> str:
        if why := _unreadable(stem):
            raise MachineError(why, hint=OTHER_FOLDER)
        quoted, limit = shlex.quote(stem), f"%{at_most}" if at_most else ""
        made = [lines[0], f"#SBATCH --array=0-{count - 1}{limit}"]
        for line in lines[1:]:
            of_task = f"{quoted}-%a" if line.startswith("#SBATCH") else f"{quoted}-$SLURM_ARRAY_TASK_ID"
            made.append(line.replace(directory, of_task))
        return "".join(f"{line}\n" for line in made)

    def task(self, job_id: str, number: int) -> str:
        return f"{job_id}_{number}"

    def task_of(self, job_id: str) -> tuple[str, int] | None:
        array, bar, task = job_id.partition("_")
        return (array, int(task)) if bar else None

    def dry_run(self, request: JobRequest, resolved: Resolved) -> DryRun:
        section, plan, environ = _section(resolved.recipe), request.plan, request.environ
        cluster = named_cluster(section.sbatch)
        try:
            settings = {} if cluster is None else ask(self.configuration(cluster), environ)
        except RefusedError as error:
            raise MachineError(f"Slurm does not answer: {error}", hint="submit where `sinfo` answers") from error
        python = str(plan.commands[0].wrapper[0])
        found = [*surroundings(environ, section.sbatch, python)]
        found += [*self._limits(section, resolved, plan, environ), *_times(section, plan, settings)]
        found += not_taken(plan, resolved, environ)
        if why := _unreadable(os.path.abspath(plan.output_root)):  # noqa: PTH100 - as it is written, links and all
            found.append(resolved.error("output.root", why, OTHER_FOLDER))
        said, script = "", self.files(request)[SCRIPT]
        try:
            said = self._tried(script, request)
        except RefusedError as error:
            if all(each.severity != "error" for each in found):  # else the same is said twice
                found.append(self._refusal(str(error), resolved, script, request))
        errors = tuple(each for each in found if each.severity == "error")
        return DryRun(said, tuple(each for each in found if each.severity != "error"), errors)

    def _tried(self, script: str, request: JobRequest) -> str:
        """When and where Slurm would start a job script. Raises RefusedError."""
        path = f"{request.run_dir}/{SCRIPT}"
        publish(path, script, mode=0o700)
        return ask(_query(("sbatch", "--test-only", path), accepted), request.environ)

    def _refusal(self, said: str, resolved: Resolved, script: str, request: JobRequest) -> Diagnostic:
        """Slurm's refusal, at the key that asks for what there is not."""
        hint = "`sinfo` and `scontrol show partition` say what there is"
        option = self._too_much(script, request) if NO_SUCH_NODES in said else ""
        if not option:
            key = next((key for word, key in BLAMED.items() if word in said.lower()), "cluster")
            return resolved.error(key, f"Slurm refuses the job: {said}", hint)
        keys = OF_NODES[option[2:].partition("=")[0]]
        key = next((each for each in keys if resolved.given(each)), keys[0])
        return resolved.error(key, f"Slurm refuses the job for its {option}: {said}", hint)

    def _too_much(self, script: str, request: JobRequest) -> str:
        """The option of a job script without which Slurm would take it; empty where it is not one alone."""
        lines = script.splitlines(keepends=True)
        for name in OF_NODES:
            for place, line in enumerate(lines):
                if line.startswith(f"#SBATCH --{name}="):
                    with contextlib.suppress(RefusedError):
                        self._tried("".join(lines[:place] + lines[place + 1 :]), request)
                        return line.removeprefix("#SBATCH ").strip()
        return ""

    def _limits(
        self, section: Section, resolved: Resolved, plan: Plan, environ: Mapping[str, str]
    ) -> Iterator[Diagnostic]:
        """What --test-only does not check: limits that keep the job waiting for ever, and times that are too short."""
        cluster = named_cluster(section.sbatch)
        if cluster is None:  # its limits are those of the cluster that Slurm will choose
            return
        asked = seconds(section.time) if section.time else None
        too_short, others = list[str](), list[str]()
        for name in (section.partition or "").split(","):
            try:
                limits = ask(self.partition(name, cluster), environ)
            except RefusedError:  # --test-only says it in its words
                continue
            most, of = seconds(limits.get("MaxTime", "UNLIMITED")), limits.get("PartitionName", name)
            if most is not None and section.time and (asked is None or asked > most):
                too_short.append(f"partition {of} has MaxTime={limits['MaxTime']}")
            else:
                others.append(of)
            grace = amount(limits.get("GraceTime", "")) or 0.0
            if 0 < grace < plan.grace_seconds and "preemption" in section.requeue.after:
                what = f"partition {of} gives a preempted job {grace:.0f} s, and launcher.grace_seconds is "
                hint = f"set launcher.grace_seconds to less than {grace:.0f}"
                yield Diagnostic("warning", f"{what}{plan.grace_seconds:g}", key="launcher.grace_seconds", hint=hint)
        what = f"cluster.time is {section.time}, and {join_names(too_short)}"
        if too_short and others:  # of several Slurm takes any that will do (EnforcePartLimits=ALL refuses it)
            where = f"the job starts in {join_names(others)} alone"
            yield Diagnostic("note", f"{what}: {where}", "cluster.partition", resolved.origin("cluster.partition"))
        elif too_short:
            why = "Slurm takes such a job, and never starts it"
            yield resolved.error("cluster.time", what, "write at most what the partition allows", why=why)

    def submit(self, request: JobRequest) -> Job:
        """Where sbatch does not print the job's number, or has failed, the queue is asked."""
        environ, script, name = request.environ, self.files(request)[SCRIPT], request.plan.name
        try:
            return ask(_query(request.argv, submitted), environ, SUBMIT_SECONDS)
        except (RefusedError, NoAnswerError) as error:
            refused = isinstance(error, RefusedError)
            late = time.monotonic() + (0 if refused else LATE_SECONDS)
            try:
                while not (found := ask(in_queue(name, request.argv[-1], script), environ)):
                    if time.monotonic() >= late:
                        break
                    time.sleep(LOOK_SECONDS)
            except (RefusedError, MachineError) as silent:
                if refused:
                    raise error from silent
                what = f"{error}, and the queue does not answer ({silent}): Slurm may have the job, and "
                hint = f"`squeue --name={name}` tells whether it has; if not, remove that folder"
                raise NoAnswerError(f"{what}{request.run_dir} stays", hint=hint) from error
            if found:
                return found
            if refused:
                raise
            raise MachineError(f"{error}, and Slurm has no such job", hint="submit again") from error

    def state(self, job: Job) -> Query[JobState]:
        return _query(("scontrol", *_on(job.cluster), "show", "job", "-o", job.id), job_state)

    def states(self, job: Job) -> Query[dict[str, JobState]]:
        return _query(("scontrol", *_on(job.cluster), "show", "job", "-o", job.id.partition("_")[0]), job_states)

    def queue(self, job: Job, uid: int) -> Query[Mapping[str, State]]:
        """Each task of an array by itself."""
        words = ("--noheader", "--all", "--array", "--states=all", f"--user={uid}", "--format=%i|%T")
        return _query(("squeue", *_on(job.cluster), *words), queue)

    def past(self, job: Job) -> Query[JobState]:
        columns = f"--format={','.join(PAST)}"
        argv = ("sacct", *_on(job.cluster), "--noheader", "--parsable2", "--allocations", f"--jobs={job.id}", columns)
        return _query(argv, past_job)

    def controller(self) -> Query[str]:
        """The name of the cluster that answers."""
        return _query(self.configuration().argv, lambda output: configuration(output).get("ClusterName", ""))

    def configuration(self, cluster: str = "") -> Query[dict[str, str]]:
        """Its settings."""
        return _query(("scontrol", *_on(cluster), "show", "config"), configuration)

    def partition(self, name: str, cluster: str = "") -> Query[dict[str, str]]:
        """The limits of a partition; of Slurm's default one where the name is empty."""
        argv = ("scontrol", *_on(cluster), "show", "partition", "-o", *([name] if name else ()))
        return _query(argv, partition)

    def cancel(self, job: Job, *, now: bool) -> Query[tuple[str, ...]]:
        return _query(("scancel", *_on(job.cluster), job.id), nothing_removed)

    def end(self, job: Job) -> Query[None]:
        return self._to_script(job, "TERM")

    def save(self, job: Job, nodes: Sequence[str], python: str) -> Query[None]:
        return self._to_script(job, SAVE)

    @staticmethod
    def _to_script(job: Job, name: str) -> Query[None]:
        """Send a signal to the job script alone."""
        return _query(("scancel", *_on(job.cluster), "--batch", f"--signal={name}", job.id), nothing)

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
        job_id = ask(self.number(job.id), environ) if "_" in job.id else job.id
        words = _beside(job_id, host, argv, terminal=terminal)
        return words, without_settings(environ, words[0])

    def number(self, job_id: str) -> Query[str]:
        """The number by itself of a task of an array, as srun takes it."""
        return _query(("scontrol", "show", "job", "-o", job_id), job_number)

    def starts_step(self, words: Sequence[str], run_dir: str) -> bool:
        return words[:1] == ("srun",) and all(word.startswith("-") for word in words[1:])

    def requeue(self, job: Job, run_dir: str, environ: Mapping[str, str]) -> str:
        """Slurm ends what runs of it. It starts the job no sooner than two minutes later (121 s)."""
        ask(_query(("scontrol", "requeue", job.id), nothing), environ)
        return job.id

    def exclude(self, job: Job, hosts: Sequence[str]) -> Query[None]:
        """All of the hosts are named, for `+=` is refused by some releases."""
        return _query(("scontrol", "update", f"JobId={job.id}", f"ExcNodeList={','.join(hosts)}"), nothing)

    def step(
        self, allocation: Allocation, nodes: int, environ: Mapping[str, str], name: str, argv: Sequence[str]
    ) -> tuple[str, ...]:
        if nodes > allocation.nodes:
            raise MachineError(
                f"the plan has {nodes} nodes, and job {allocation.job} has {allocation.nodes}",
                hint=f"sbatch --nodes={nodes}, or nodes.count={allocation.nodes}",
            )
        cpus = environ.get("SLURM_CPUS_PER_TASK")
        return (
            "srun",
            f"--job-name={name}",
            f"--nodes={nodes}",
            f"--ntasks={nodes}",
            *((f"--cpus-per-task={cpus}",) if cpus else ()),
            *OF_EVERY_STEP,
            *argv,
        )

    def steps(self, job_id: str) -> Query[dict[str, str]]:
        return _query(("squeue", "--steps", "--noheader", f"--jobs={job_id}", "--format=%i|%j"), steps)

    def send(self, step: str, signal: str) -> Query[None]:
        return _query(("scancel", f"--signal={signal}", step), nothing)

    def beside(self, job_id: str, host: str, argv: Sequence[str]) -> Query[bool]:
        return _query(_beside(job_id, host, argv, terminal=False), lambda output: output.code == 0)

    def start_of(self, job_id: str, step: str, environ: Mapping[str, str]) -> str:
        """A requeued job has the same number: its restarts tell its starts apart."""
        return f"{job_id}.{step}.{environ.get('SLURM_RESTART_COUNT', '0')}"


SCHEDULER = Slurm()


def _section(recipe: Recipe) -> Section:
    assert isinstance(recipe.cluster, Section)
    return recipe.cluster


def _quoted(word: str) -> str:
    """A word of an #SBATCH line; sbatch reads quotes as a shell does."""
    return word if _PLAIN.fullmatch(word) else "'" + word.replace("'", "'\\''") + "'"


def _query(argv: Sequence[str], read: Callable[[Output], Answer]) -> Query[Answer]:
    return Query(tuple(argv), read, lambda environ: without_settings(environ, argv[0]))


def _on(cluster: str) -> tuple[str, ...]:
    return (f"--clusters={cluster}",) if cluster else ()


def _beside(job_id: str, host: str, argv: Sequence[str], *, terminal: bool) -> tuple[str, ...]:
    """Runs a command on a node of a running job, beside it."""
    pty = ("--pty",) if terminal else ()
    return ("srun", f"--jobid={job_id}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host}", *pty, *argv)


def without_settings(environ: Mapping[str, str], tool: str) -> dict[str, str]:
    """The variables for a command: for one of Slurm's none that would change what it does, or how it prints it."""
    if tool not in COMMANDS:
        return dict(environ)
    names = (*SETTINGS, f"{tool.upper()}_")
    kept = {name: value for name, value in environ.items() if name.startswith(KEPT) or not name.startswith(names)}
    return kept | (WHOLE if tool in ("scontrol", "squeue") else {})


def surroundings(environ: Mapping[str, str], words: Sequence[str], python: str) -> Iterator[Diagnostic]:
    """Which variables a job does not get, and which it gets that change it. words: for sbatch, of the recipe."""
    gone = sorted(environ.keys() - without_settings(environ, "sbatch").keys() - {"SLURM_TIME_FORMAT"})
    if outer := environ.get("SLURM_JOB_ID"):
        what = f"submitted from inside job {outer}, whose SLURM_ variables are not handed on to the new one"
        yield Diagnostic("note", what)
        gone = [name for name in gone if name.startswith("SBATCH_")]
    if gone:
        named = [name.partition("_")[2] for name in gone if name.startswith("SBATCH_") or name in ALSO_OF_SBATCH]
        named = [OF_VARIABLES.get(each, each.lower().replace("_", "-")) for each in named]
        asked = {each: f"--{each}" if each in BARE else f"--{each}=…" for each in named if each in KNOWN}
        keys = dict.fromkeys(SET_HERE.get(each, f"cluster.sbatch=[{word}]") for each, word in asked.items())
        what = f"{', '.join(gone)}: not handed on to Slurm, for the job is what the recipe says"
        instead = ", ".join(filter(None, keys))
        yield Diagnostic("warning", what, hint=f"say it in the recipe, or unset it here: {instead}" if instead else "")
    if any(each.name == "export" and "ALL" not in (each.value or "").upper().split(",") for each in options(words)):
        return
    found = [name for name in INHERITED if environ.get(name) and not python.startswith(f"{environ[name]}/")]
    if found:
        hint = "unset there, or in cluster.setup, what the job is not to have"
        yield Diagnostic("note", f"the job inherits from this shell: {', '.join(found)}", hint=hint)


def clusters(script: str) -> list[str]:
    """The words of a job script that name other clusters than the one that is asked by itself."""
    return [each.word for each in directives(script) if each.name == "clusters"]


def named_cluster(words: Sequence[str]) -> str | None:
    """The other cluster that words for sbatch name; empty for its own, None where it chooses among several."""
    named = [each.value or "" for each in options(words) if each.name == "clusters"][-1:]
    return None if "," in "".join(named) or named == ["all"] else "".join(named)


def in_queue(name: str, script: str, content: str) -> Query[Job | None]:
    """The job of a name whose script is at a path, also for a while after its end; None for none.

    Of an array its number as a whole. content: of the script, which may name the clusters to ask.
    """
    words = ("--noheader", "--all", "--states=all", f"--name={name}", "--format=%F|%o")
    return _query(("squeue", *words, *clusters(content)), lambda output: found_in_queue(output, script))


def _times(section: Section, plan: Plan, settings: Mapping[str, str]) -> Iterator[Diagnostic]:
    """Times that leave too little to save in. settings: Slurm's."""
    yield from too_short_a_warning(plan, section.requeue.warn_seconds)
    wait = amount(settings.get("KillWait", ""))
    if wait is not None and wait < plan.grace_seconds and not section.requeue.after:
        what = f"Slurm kills {wait:.0f} s after it has told a job to end (KillWait), and launcher.grace_seconds is "
        hint = f"set launcher.grace_seconds to less than {wait:.0f}, or have it asked earlier: cluster.requeue.after"
        yield Diagnostic("warning", f"{what}{plan.grace_seconds:g}", key="launcher.grace_seconds", hint=hint)


def not_taken(plan: Plan, resolved: Resolved, environ: Mapping[str, str]) -> Iterator[Diagnostic]:
    """Variables that the job is to take from here, and that are not there; its set-up may yet have them."""
    for name in plan.environment.take:
        if name not in environ:
            what = f"{name} is not set in the environment, and env_from passes it on"
            hint = "export it before you submit, unless cluster.setup does: without it no rank is started"
            yield Diagnostic("warning", what, "env_from", resolved.origin("env_from"), hint=hint)


def _unreadable(path: str) -> str:
    """Why Slurm would not take a path for what it is; empty where it would."""
    found = next((name for mark, name in (("%", "a %"), ("\n", "a line end")) if mark in path), "")
    return f"Slurm reads the name of its output in its own way, and {path!r} has {found}" if found else ""


def fields(line: str) -> dict[str, str]:
    """``Key=Value Key=Value``, as `scontrol -o` prints it; values may have spaces."""
    found = [*_FIELD.finditer(line)]
    ends = [*(match.start() for match in found[1:]), len(line)]
    return {match[1]: line[match.end() : end].strip() for match, end in zip(found, ends, strict=False)}


def submitted(output: Output) -> Job:
    """The job, of `sbatch --parsable`, among what a login shell or a plugin of the site may say as well.

    RefusedError where it certainly has none, NoAnswerError where it may have one, and does not say which.
    """
    lines = [line.strip() for line in output.out.splitlines()]
    found = [Job(match[1], match[2] or "") for line in lines if (match := _SUBMITTED.fullmatch(line))]
    if output.code == 0 and len(found) == 1:
        return found[0]
    _, by_sbatch, last = output.words.rpartition("sbatch: ")
    if output.code > 0 and by_sbatch and _REFUSAL.search(last) and not found:
        raise RefusedError(output.words)
    said = "; ".join(filter(None, (*lines, output.words if output.err.strip() else ""))) or "nothing"
    how = f" (exit code {output.code})" if output.code else ""
    raise NoAnswerError(f"sbatch does not say the job's number{how}: {said}")


def found_in_queue(output: Output, script: str) -> Job | None:
    """The job that has a script, of `squeue --format='%F|%o'`; None for none. Of several clusters each has a title."""
    if output.code:
        raise RefusedError(output.words)
    cluster = ""
    for line in output.out.splitlines():
        number, _, command = line.strip().partition("|")
        if re.fullmatch(NUMBER, number) and command == script:
            return Job(number, cluster)
        if number.startswith("CLUSTER: "):
            cluster = number.removeprefix("CLUSTER: ")
    return None


def queue(output: Output) -> Mapping[str, State]:
    """Of `squeue --array --format='%i|%T'`: the states of jobs by their numbers."""
    if output.code:
        raise RefusedError(output.words)
    pairs = (line.strip().partition("|") for line in output.out.splitlines())
    return {number: STATES.get(word, "unknown") for number, bar, word in pairs if bar}


def nothing(output: Output) -> None:
    """Of commands that print nothing when they have done it."""
    if output.code:
        ended = any(each in output.words for each in ENDED)
        raise (EndedError if ended else RefusedError)(output.words)


def nothing_removed(output: Output) -> tuple[str, ...]:
    """The same: a job that is cancelled leaves nothing that has a name."""
    nothing(output)
    return ()


def steps(output: Output) -> dict[str, str]:
    """Of `squeue --steps --format='%i|%j'`: the steps by their names."""
    if output.code:
        raise RefusedError(output.words)
    pairs = (line.strip().partition("|") for line in output.out.splitlines())
    return {name: number for number, _, name in pairs if name}


def accepted(output: Output) -> str:
    """When and where Slurm would start it, of `sbatch --test-only`."""
    if output.code:
        raise RefusedError(output.words.removeprefix("allocation failure: "))
    match = _START.search(output.err + output.out)
    return f"Slurm would start it at {match[2]} on {match[4]} (partition {match[5]})" if match else ""


def job_state(output: Output) -> JobState:
    """Of `scontrol show job -o`. Unknown where Slurm does not answer, and where it knows the job no more."""
    if output.code:
        return JobState("unknown", output.words)
    return _job(fields(output.out.splitlines()[0] if output.out.strip() else ""))


def job_states(output: Output) -> dict[str, JobState]:
    """The same of a job and of all tasks of an array, by their numbers. Raises RefusedError where Slurm is silent."""
    if output.code:
        if "Invalid job id" in output.words:  # which it knows no more
            return {}
        raise RefusedError(output.words)
    found: dict[str, JobState] = {}
    for line in output.out.splitlines():
        known = fields(line)
        state, array = _job(known), known.get("ArrayJobId", "")
        if "..." in known.get("ArrayTaskId", ""):
            raise RefusedError("scontrol names only some of the array's tasks that wait")
        found[known.get("JobId", "")] = state
        for task in _tasks(known.get("ArrayTaskId", "")) if array.isdecimal() else ():
            found[f"{array}_{task}"] = state
    return found


def _tasks(text: str) -> Iterator[int]:
    """The tasks of ``7``, or of those that wait: ``3,5-9%2``, or ``1-9:2``."""
    for first, last, step in re.findall(r"(\d{1,9})(?:-(\d{1,9}))?(?::(\d{1,9}))?", text.partition("%")[0]):
        yield from islice(range(int(first), int(last or first) + 1, int(step or 1) or 1), MOST_TASKS)


def _job(known: Mapping[str, str]) -> JobState:
    word = known.get("JobState", "").partition(" ")[0]
    state = STATES.get(word, "unknown")
    code, _, number = (amount(each) for each in known.get("ExitCode", "0:0").partition(":"))
    ended = int(128 + number) if number else None if code is None else int(code)
    reason = known.get("Reason", "")
    user = re.fullmatch(r"(.*)\((\d+)\)", known.get("UserId", ""))
    return JobState(
        state,
        reason=f"Slurm says {word}" if word and state == "unknown" else "" if reason == "None" else reason,
        nodes=known.get("NodeList", "").replace("(null)", ""),
        restarts=int(amount(known.get("Restarts", "")) or 0),
        exit_code=ended if state == "ended" else None,
        started=_moment(known.get("StartTime", "")),
        ends=_moment(known.get("EndTime", "")),
        preempted=_moment(known.get("PreemptTime", "")) is not None,
        why=WHY.get(word, ""),  # type: ignore[arg-type]
        name=known.get("JobName", ""),
        uid=int(user[2]) if user else None,
        user=user[1] if user else "",
        files=tuple(known[each] for each in ("Command", "StdOut", "SubmitLine") if each in known),
    )


PAST = ("State", "ExitCode", "UID", "User", "NodeList", "JobName", "SubmitLine")  # of sacct(1)


def past_job(output: Output) -> JobState:
    """Of `sacct --parsable2` with the columns above: a job that has left the queue; gone where it is not known."""
    line = next((each for each in output.out.splitlines() if each.strip()), "")
    if output.code or line.count("|") < len(PAST) - 1:
        return JobState("gone")
    known = dict(zip(PAST, line.split("|", len(PAST) - 1), strict=True))
    return _job({**known, "JobState": known["State"], "UserId": f"{known['User']}({known['UID']})"})


def job_number(output: Output) -> str:
    """Of `scontrol show job -o`: the number that is the job's alone, also of a task of an array."""
    if output.code:
        raise RefusedError(output.words)
    found = fields(output.out.splitlines()[0] if output.out.strip() else "").get("JobId", "")
    if not found.isdecimal():
        raise RefusedError(f"scontrol does not say the job's number: {output.out.strip()[:100] or 'nothing'}")
    return found


def _moment(text: str) -> float | None:
    """Seconds since the epoch of a local time as Slurm prints it; None for `Unknown` and `None`."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        return None


def partition(output: Output) -> dict[str, str]:
    """The limits of a partition, of `scontrol show partition -o`; of several the default one."""
    if output.code:
        raise RefusedError(output.words)
    found = [fields(line) for line in output.out.splitlines() if line.strip()]
    chosen = (each for each in found if len(found) == 1 or each.get("Default") == "YES")
    return next(chosen, {})


def configuration(output: Output) -> dict[str, str]:
    """Slurm's settings, of `scontrol show config`."""
    if output.code:
        raise RefusedError(output.words)
    return dict(_SETTING.findall(output.out))


def seconds(text: str) -> float | None:
    """A time limit of Slurm's (``1-12:00:00``, ``90:00``, ``30``, in minutes) in seconds; None for no limit.

    sbatch(1): minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes and with seconds.
    ValueError for anything else.
    """
    if text.upper() in UNLIMITED:
        return None
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no time of Slurm's")
    days, parts = match[1], [int(part) for part in match[2].split(":")]
    # Behind days the first part is hours; else one part is minutes, and of two the last is seconds.
    hours, minutes, last = [*parts, 0, 0][:3] if days or len(parts) == 3 else [0, *parts, 0][:3]
    return float(((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + last)


def amount(text: str) -> float | None:
    """The number of a setting such as ``30 sec``; None where there is none."""
    match = re.match(r"[0-9]{1,18}", text)
    return float(match[0]) if match else None
