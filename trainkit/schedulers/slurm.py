"""Slurm: the job script of a plan, the words of its commands, and how a step starts. Pure; the client runs commands."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence

from trainkit.errors import Diagnostic, MachineError
from trainkit.launch_plan.context import Context
from trainkit.launch_plan.model import Variable
from trainkit.launch_plan.provenance import SourcedJob, Token, setup_lines, sourced_job, token
from trainkit.recipe.schema import Recipe, Slurm
from trainkit.schedulers import slurm_answers as read
from trainkit.schedulers.base import Allocation, Job, JobState, Query, State
from trainkit.schedulers.slurm_options import BARE, KNOWN, directives, options

SCRIPT = "job.sh"
JOB_ID = rf"{read.NUMBER}(_\d{{1,10}})?"  # _: a task of an array
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


def problems(context: Context) -> Iterator[Diagnostic]:
    """What is wrong with the section, whatever Slurm says."""
    section, error = _section(context.recipe), context.resolved.error
    for key in ("sbatch", "srun"):
        for position, word in enumerate(getattr(section, key)):
            place = f"cluster.{key}"
            if not word.startswith("-"):
                what = f"{place}[{position}] is {word!r}"
                yield error(place, what, "write an option and its value as one word: --switches=1", why="options only")
            for name in (each.name for each in options([word]) if each.name in SET_HERE):  # `-N2`, `--job=x`
                instead = SET_HERE[name]
                hint = f"use {instead}" if instead else "leave it out"
                yield error(place, f"{place} sets --{name}", hint, why="trainkit sets it by itself")


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


def job(context: Context) -> SourcedJob:
    """The job script, sbatch, and srun."""
    section = _section(context.recipe)
    lines = [token("#!/bin/bash", rule="a job script starts with its interpreter")]
    lines += [_directive(each) for each in _options(context, section)]
    lines.append(token(f"trap '' {SAVE}", rule="`trainkit checkpoint` sends it, also before trainkit listens"))
    rule = "the job: it starts the plan on each node, asks it to save before its time is up, and queues it again"
    batch = (f"exec {shlex.quote(context.facts.executable)} -P -m trainkit job batch ", Variable.RUN_DIR)
    failed = token(*batch, ' --failed "$1"', rule="the run has ended before it began, and `trainkit status` says why")
    lines += [*setup_lines(section.setup, failed), token(*batch, rule=rule)]
    submit = [token("sbatch", rule="submits to Slurm"), token("--parsable", rule="prints the job's number alone")]
    submit.append(token(Variable.RUN_DIR, f"/{SCRIPT}", rule="the job script in the run directory"))
    terms = {
        "requeue": tuple(section.requeue.after),
        "without_progress": section.requeue.without_progress,
        "warn_seconds": section.requeue.warn_seconds,
        "start_seconds": section.start_seconds,
    }
    return sourced_job("slurm", SCRIPT, lines, submit, tuple(_srun(context, section)), **terms)


def _section(recipe: Recipe) -> Slurm:
    assert isinstance(recipe.cluster, Slurm)
    return recipe.cluster


def _directive(option: Token) -> Token:
    return Token(type(option.text)(("#SBATCH ", *option.text.parts)), option.source)


def _options(context: Context, section: Slurm) -> Iterator[Token]:
    recipe = context.recipe
    yield token(f"--job-name={recipe.name}", keys=("name",))
    yield token(f"--nodes={recipe.nodes.count}", keys=("nodes.count",))
    yield token("--ntasks-per-node=1", rule=ONE_TASK)
    cpus, keys = cores(context)
    yield token(f"--cpus-per-task={cpus}", keys=keys)
    for key, option in NAMED.items():
        if (value := getattr(section, key)) is not None:
            yield token(f"--{option}={_quoted(value)}", keys=(f"cluster.{key}",))
    if section.exclusive:
        yield token("--exclusive", keys=("cluster.exclusive",))
    if context.topology.device == "cuda" and section.gpus != "none":
        option = "--gpus-per-node=" if section.gpus == "gpus-per-node" else "--gres=gpu:"
        kind = f"{section.gpu_kind}:" if section.gpu_kind else ""
        cards = ("cluster.gpus", "cluster.gpu_kind", "devices.select", "nodes.processes_per_node")
        yield token(f"{option}{kind}{len(context.devices)}", keys=cards)
    warn = section.requeue.warn_seconds
    yield token(f"--signal=B:{SIGNAL}@{warn}", keys=("cluster.requeue.warn_seconds",))
    yield token("--requeue" if section.requeue.after else "--no-requeue", keys=("cluster.requeue.after",))
    yield token("--open-mode=append", rule="a job that is queued again goes on in the same file")
    yield token("--output=", Variable.RUN_DIR, "/job.out", rule="the job's output is kept with the run")
    for word in section.sbatch:
        yield token(_quoted(word), keys=("cluster.sbatch",))


def cores(context: Context) -> tuple[int, tuple[str, ...]]:
    """Processors that the job asks for on each node, and what decided them."""
    section, facts, keys = _section(context.recipe), context.facts, ("cluster.cpus_per_node",)
    if section.cpus_per_node != "auto":
        return section.cpus_per_node, keys
    if section.machine is None:
        return context.processes, (*keys, "nodes.processes_per_node")
    share = len(context.devices) / len(facts.gpus) if context.topology.device == "cuda" and facts.gpus else 1
    return max(1, math.floor(facts.cpu_cores * share)), (*keys, "cluster.machine")


def _srun(context: Context, section: Slurm) -> Iterator[Token]:
    nodes = context.recipe.nodes.count
    yield token("srun", rule="starts a step on the nodes of the job")
    yield token(f"--nodes={nodes}", keys=("nodes.count",))
    yield token(f"--ntasks={nodes}", rule=ONE_TASK)
    # srun takes no number of processors from sbatch since Slurm 22.05 (its release notes).
    yield token(f"--cpus-per-task={cores(context)[0]}", keys=("cluster.cpus_per_node",))
    yield from (token(word, rule=rule) for word, rule in OF_EVERY_STEP.items())
    for word in section.srun:
        yield token(word, keys=("cluster.srun",))


def _quoted(word: str) -> str:
    """A word of an #SBATCH line; sbatch reads quotes as a shell does."""
    return word if _PLAIN.fullmatch(word) else "'" + word.replace("'", "'\\''") + "'"


def step(
    allocation: Allocation, nodes: int, environ: Mapping[str, str], name: str, argv: Sequence[str]
) -> tuple[str, ...]:
    """The srun that starts a command once on each of some nodes of an allocation. MachineError where it has fewer.

    name: of the step.
    """
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


def own_job(environ: Mapping[str, str]) -> str:
    """The number of the job that a process is in, 17_2 of a task of an array; empty outside.

    SLURM_JOB_ID of an array's last task is the number of the whole array (sbatch(1), JOB ARRAY SUPPORT).
    """
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environ.get("SLURM_JOB_ID", "")


def number(job_id: str) -> Query[str]:
    """The number by itself of a task of an array, as srun takes it."""
    return Query(("scontrol", "show", "job", "-o", job_id), read.job_number)


def submission(argv: Sequence[str]) -> Query[Job]:
    """Submits; answers the job, with its cluster where there are several."""
    return Query(tuple(argv), read.submitted)


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
    return Query(("squeue", *words, *clusters(content)), lambda output: read.in_queue(output, script))


def rehearsal(argv: Sequence[str]) -> Query[str]:
    """Asks Slurm whether it would take the job; answers when and where it would start."""
    return Query((argv[0], "--test-only", *argv[1:]), read.rehearsed)


def partition(name: str, cluster: str = "") -> Query[dict[str, str]]:
    """The limits of a partition; of Slurm's default one where the name is empty."""
    argv = ("scontrol", *_on(cluster), "show", "partition", "-o", *([name] if name else ()))
    return Query(argv, read.partition)


def configuration(cluster: str = "") -> Query[dict[str, str]]:
    return Query(("scontrol", *_on(cluster), "show", "config"), read.configuration)


def state(job_id: str) -> Query[JobState]:
    """What Slurm knows of a job."""
    return Query(("scontrol", "show", "job", "-o", job_id), read.job_state)


def states(job: Job) -> Query[dict[str, JobState]]:
    """What Slurm knows of a job, and of the other tasks of its array."""
    return Query(("scontrol", *_on(job.cluster), "show", "job", "-o", job.id.partition("_")[0]), read.job_states)


def queue(job: Job, uid: int) -> Query[Mapping[str, State]]:
    """The jobs of a user that Slurm still has, each task of an array by itself, and how they are."""
    words = ("--noheader", "--all", "--array", "--states=all", f"--user={uid}", "--format=%i|%T")
    return Query(("squeue", *_on(job.cluster), *words), read.queue)


def past(job: Job) -> Query[JobState]:
    """What its accounts say of a job that has left the queue."""
    columns = f"--format={','.join(read.PAST)}"
    argv = ("sacct", *_on(job.cluster), "--noheader", "--parsable2", "--allocations", f"--jobs={job.id}", columns)
    return Query(argv, read.past_job)


def controller() -> Query[str]:
    """The name of the cluster that answers."""
    return Query(configuration().argv, lambda output: read.configuration(output).get("ClusterName", ""))


def _on(cluster: str) -> tuple[str, ...]:
    return (f"--clusters={cluster}",) if cluster else ()


def steps(job_id: str) -> Query[dict[str, str]]:
    """The steps of a job by their names."""
    return Query(("squeue", "--steps", "--noheader", f"--jobs={job_id}", "--format=%i|%j"), read.steps)


def requeue(job_id: str) -> Query[None]:
    """Queues a job again; Slurm ends what runs of it."""
    return Query(("scontrol", "requeue", job_id), read.nothing)


def exclude(job_id: str, hosts: Iterable[str]) -> Query[None]:
    """Keeps a job that was queued again off some hosts: all of them, for `+=` is refused by some releases."""
    return Query(("scontrol", "update", f"JobId={job_id}", f"ExcNodeList={','.join(hosts)}"), read.nothing)


def cancel(job_id: str, *, cluster: str = "") -> Query[None]:
    """Ends a job, or takes it out of the queue."""
    return Query(("scancel", *_on(cluster), job_id), read.nothing)


def send(job_id: str, signal: str, *, script: bool, cluster: str = "") -> Query[None]:
    """Sends a signal to the job script, or to every process of its steps."""
    batch = ("--batch",) if script else ()
    return Query(("scancel", *_on(cluster), *batch, f"--signal={signal}", job_id), read.nothing)


def beside(job_id: str, host: str, argv: Sequence[str]) -> Query[bool]:
    """Runs a command on a node of a running job; whether it succeeds."""
    return Query(attach(job_id, host, argv, terminal=False), lambda output: output.code == 0)


def attach(job_id: str, host: str, argv: Sequence[str], *, terminal: bool) -> tuple[str, ...]:
    """Runs a command on a node of a running job, beside it."""
    pty = ("--pty",) if terminal else ()
    return ("srun", f"--jobid={job_id}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host}", *pty, *argv)
