"""What every scheduler is: the class, what its commands are asked and answer, and lists of hosts."""

from __future__ import annotations

import math
import re
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import ClassVar, Generic, Literal, TypeVar

from trainkit.errors import Diagnostic, MachineError
from trainkit.launch_plan.context import Context
from trainkit.launch_plan.model import Job as PlannedJob
from trainkit.launch_plan.model import Plan, Variable, bind_words
from trainkit.launch_plan.provenance import SourcedJob
from trainkit.recipe.resolved import Resolved
from trainkit.recipe.schema.cluster import Cluster

SCRIPT = "job.sh"  # of a job with a job script, in the run directory
MOST = 100_000  # hosts; a range of more is no list of a cluster's nodes
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\],]+)")
_RANGE = re.compile(r"(\d+)-(\d+)")


def expand(text: str) -> tuple[str, ...]:
    """Every host of a list in Slurm's short form, ``gpu[01-03,7]-[a,b],login``, in its order.

    ValueError for what is no such list, or one of more than 100,000 hosts.
    """
    found: list[str] = []
    for entry in _entries(text):
        choices = [[*_choices(inner)] if inner or whole.startswith("[") else [whole] for whole, inner in _pieces(entry)]
        size = 1
        for each in choices:
            size *= len(each)
        if len(found) + size > MOST:
            raise ValueError(f"more than {MOST:,} hosts")
        found += ["".join(parts) for parts in product(*choices)]
    return tuple(found)


def _entries(text: str) -> Iterator[str]:
    """The parts between commas that are in no brackets."""
    depth, begin = 0, 0
    for position, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise ValueError(f"{text!r} is no list of hosts")
        if character == "," and depth == 0:
            yield text[begin:position]
            begin = position + 1
    if depth:
        raise ValueError(f"{text!r} is no list of hosts")
    if text:
        yield text[begin:]


def _pieces(entry: str) -> Iterator[tuple[str, str]]:
    """The brackets of an entry and what is around them: whole, and what is inside of brackets."""
    end = 0
    for match in _PIECE.finditer(entry):
        if match.start() != end:
            break
        end = match.end()
        yield match[0], match[1] or ""
    if end != len(entry) or not entry:
        raise ValueError(f"{entry!r} is no host, nor several")


def _choices(inner: str) -> Iterator[str]:
    for each in inner.split(","):
        if match := _RANGE.fullmatch(each):
            first, last = int(match[1]), int(match[2])
            if not first <= last < first + MOST:
                raise ValueError(f"{each} is no range")
            yield from (str(number).zfill(len(match[1])) for number in range(first, last + 1))
        elif each:
            yield each
        else:
            raise ValueError(f"[{inner}] has an empty part")


def hosts_in(text: str) -> tuple[str, ...]:
    """The same; none of what is no list."""
    try:
        return expand(text)
    except ValueError:
        return ()


def number_in(environ: Mapping[str, str], *names: str) -> int | None:
    """The first of the variables that is a whole number."""
    return next((int(value) for name in names if (value := environ.get(name, "")).isdecimal()), None)


@dataclass(frozen=True, slots=True)
class Place:
    """This process in a job. node: its number; nodes: how many, None where nothing says it.

    hosts: of all nodes in order, empty where nothing names them. start: names this start of the job: the same on all
    nodes, and another one for every job and step; empty where nothing says it.
    """

    node: int
    nodes: int | None = None
    hosts: tuple[str, ...] = ()
    start: str = ""


@dataclass(frozen=True, slots=True)
class Allocation:
    """Nodes of a job whose step has not begun: in the batch script, or the shell of an interactive job."""

    nodes: int
    job: str
    scheduler: str


Answer = TypeVar("Answer")
State = Literal["queued", "running", "ended", "unknown", "gone"]
# <timestamp>-<id> of a run directory; behind it comes the number of a task of an array.
_RUN_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}")


@dataclass(frozen=True, slots=True)
class Output:
    """What a command has printed. code: its exit code."""

    code: int
    out: str
    err: str

    @property
    def words(self) -> str:
        """The message of a failure, in one line."""
        lines = [line.strip() for line in (self.err or self.out).splitlines() if line.strip()]
        return "; ".join(dict.fromkeys(lines))


@dataclass(frozen=True, slots=True)
class Query(Generic[Answer]):
    """A command for the scheduler, and the reader of its output. The reader raises RefusedError.

    environ: the variables that the command gets, of those that are set.
    """

    argv: tuple[str, ...]
    read: Callable[[Output], Answer]
    environ: Callable[[Mapping[str, str]], Mapping[str, str]] = dict


class RefusedError(Exception):
    """The scheduler has refused, in its own words."""


class EndedError(RefusedError):
    """It has refused because the job has ended meanwhile."""


class NoAnswerError(MachineError):
    """A command has printed nothing in time, or nothing that can be read: its effect is not known."""


@dataclass(frozen=True, slots=True)
class Job:
    """A job that was submitted. cluster: of several that one scheduler's commands reach; empty for their own."""

    id: str
    cluster: str = ""


@dataclass(frozen=True, slots=True)
class JobState:
    """What a scheduler knows of a job. reason: why it waits, or how it ended, in the scheduler's words.

    why: of the ends that are not the program's: cancelled, time limit, preemption, a failed node.
    """

    state: State
    reason: str = ""
    nodes: str = ""  # in the short form that `expand` reads
    restarts: int = 0
    exit_code: int | None = None
    why: Literal["", "cancelled", "time_limit", "preemption", "node_failure", "out_of_memory"] = ""
    started: float | None = None  # seconds since the epoch, as the next
    ends: float | None = None  # when its time is up
    preempted: bool = False
    # Whose it is, as far as the scheduler says: its name, its user by number and in words, the files that it names.
    name: str = ""
    uid: int | None = None
    user: str = ""
    files: tuple[str, ...] = ()

    def is_of(self, run_id: str, name: str, uid: int | None) -> bool:
        """Whether it may be the job of a run: numbers begin again, and another cluster counts for itself."""
        found = _RUN_ID.match(run_id)
        return (
            self.name in ("", name)
            and (self.uid is None or uid is None or self.uid == uid)
            and (not self.files or any((found[0] if found else run_id) in each for each in self.files))
        )


@dataclass(frozen=True, slots=True)
class JobRequest:
    """What is submitted of a run. record: the files of its run directory that may be needed elsewhere, by name.

    script: instead of the plan's own, for the tasks of an array; tasks: how many, at_most: running at a time.
    """

    plan: Plan
    record: Mapping[str, str]
    run_dir: str
    run_id: str
    environ: Mapping[str, str]
    script: str | None = None
    tasks: int = 0
    at_most: int | None = None

    @property
    def job(self) -> PlannedJob:
        """As planned."""
        assert self.plan.job is not None
        return self.plan.job

    @property
    def argv(self) -> tuple[str, ...]:
        """The planned command."""
        return bind_words(self.job.submit, {Variable.RUN_DIR: self.run_dir})


def cores_of_share(context: Context, asked: int | Literal["auto"], machine: str | None) -> tuple[int, tuple[str, ...]]:
    """Processors of a node, and the keys that decide them: by default the share that its chosen GPUs are of all."""
    facts, keys = context.facts, ("cluster.cpus_per_node",)
    if asked != "auto":
        return asked, keys
    if machine is None:
        return context.processes, (*keys, "nodes.processes_per_node")
    share = len(context.devices) / len(facts.gpus) if context.topology.device == "cuda" and facts.gpus else 1
    return max(1, math.floor(facts.cpu_cores * share)), (*keys, "cluster.machine")


def too_short_a_warning(plan: Plan, warn_seconds: int) -> Iterator[Diagnostic]:
    """A warning where a run that is asked to save so long before its time limit has no time to."""
    if warn_seconds <= plan.grace_seconds:
        what = f"cluster.requeue.warn_seconds is {warn_seconds}, and launcher.grace_seconds is {plan.grace_seconds:g}"
        hint = "the run must save and end in between: set warn_seconds higher"
        yield Diagnostic("warning", what, key="cluster.requeue.warn_seconds", hint=hint)


@dataclass(frozen=True, slots=True)
class DryRun:
    """What the scheduler says of a job before it is submitted. remarks: to be shown; refused: why it would not run."""

    said: str
    remarks: tuple[Diagnostic, ...] = ()
    refused: tuple[Diagnostic, ...] = ()


class Scheduler(ABC):
    """All that depends on who gives the machines.

    A method that answers None has nothing to ask. Those that raise NotImplementedError are never called where an
    attribute says that the scheduler does not work so.
    """

    kind: ClassVar[str]  # as of `cluster.kind`
    title: ClassVar[str]  # for people
    job_id: ClassVar[str]  # pattern of a job's number, with ASCII digits
    # Whether there is no queue: who submits starts the nodes, and signals them through `signal_node`.
    starts_nodes: ClassVar[bool] = False
    # Whether the machine that submits sees the run directory: it is made there, and its files say what a run is doing.
    shares_folder: ClassVar[bool] = True
    # Whether the nodes of a job have one console.
    one_console: ClassVar[bool] = True
    # Whether what was made for a run stays when the run has ended, until it is cancelled.
    stays: ClassVar[bool] = False
    # How many tasks an array has at least; 0 where there are no arrays.
    least_tasks: ClassVar[int] = 0

    # Planning.

    @abstractmethod
    def problems(self, context: Context) -> Iterator[Diagnostic]:
        """What is wrong with its section, whatever the cluster says."""

    @abstractmethod
    def job(self, context: Context) -> SourcedJob:
        """What is submitted, by which command, and how it starts on the nodes."""

    def cores(self, context: Context) -> tuple[int, tuple[str, ...]] | None:
        """Processors that the job asks for on each node, and the keys that decide them; None where it asks for none."""
        return None

    def restarts_after(self, section: Cluster) -> Sequence[str]:
        """After what a run is started again by itself, as `cluster.requeue.after` calls it."""
        return ()

    # Inside of a job.

    def place(self, environ: Mapping[str, str]) -> Place | Allocation | None:
        """Where this process is; None outside of its jobs. Raises MachineError for several processes on one node."""
        return None

    def own_job(self, environ: Mapping[str, str]) -> str:
        """The number of the job that this process is in; empty outside."""
        return ""

    def restarts(self, environ: Mapping[str, str]) -> int:
        """How often the scheduler has started this job again."""
        return 0

    # Submitting.

    def dry_run(self, request: JobRequest, resolved: Resolved) -> DryRun:
        """Ask whether it would take the job, whose run directory is a folder that is removed afterwards.

        MachineError where the scheduler cannot be asked.
        """
        raise NotImplementedError

    def files(self, request: JobRequest) -> Mapping[str, str]:
        """The files of the run directory that are submitted, by their names. MachineError where there can be none."""
        raise NotImplementedError

    def submit(self, request: JobRequest) -> Job:
        """Submit the files. Raises RefusedError and MachineError where there is no job, NoAnswerError in doubt."""
        raise NotImplementedError

    def expected_job(self, request: JobRequest) -> str:
        """The number of a job whose submission is in doubt; empty where only the scheduler could say it."""
        return ""

    def blamed(self, words: str) -> str:
        """The recipe key that asks for what the scheduler refuses in these words."""
        return "cluster"

    def array_script(self, lines: Sequence[str], directory: str, stem: str, count: int, at_most: int | None) -> str:
        """The job script of an array of count tasks, of the lines of one job's.

        directory: what stands in them for the run directory, which of a task is stem, a dash and its number.
        """
        raise NotImplementedError

    def task(self, job_id: str, number: int) -> str:
        """The number of a task of an array job."""
        raise NotImplementedError

    def task_of(self, job_id: str) -> tuple[str, int] | None:
        """The number of an array job, and of the task in it; None of a job that is none."""
        return None

    def is_named(self, job_id: str, word: str) -> bool:
        """Whether people mean a job by a word."""
        return job_id == word

    # Looking at jobs.

    def state(self, job: Job) -> Query[JobState]:
        """What it knows of a job; gone or unknown where it knows it no more."""
        raise NotImplementedError

    def states(self, job: Job) -> Query[dict[str, JobState]]:
        """What it knows of a job, and of the other tasks of its array, by their numbers; nothing of what is gone."""
        query = self.state(job)

        def read(output: Output) -> dict[str, JobState]:
            found = query.read(output)
            return {} if found.state == "gone" else {job.id: found}

        return Query(query.argv, read, query.environ)

    def queue(self, job: Job, uid: int) -> Query[Mapping[str, State]] | None:
        """The jobs of a user that it has still, by their numbers; None where a job that has ended is never begun again.

        job: one of them, which says on which cluster.
        """
        return None

    def past(self, job: Job) -> Query[JobState] | None:
        """What it knows of a job that is gone; None where it keeps no accounts."""
        return None

    def controller(self) -> Query[str] | None:
        """Who answers, where several that count jobs for themselves may be asked from one home folder."""
        return None

    # Acting on jobs.

    def cancel(self, job: Job, *, now: bool) -> Query[tuple[str, ...]]:
        """End a job, or take it out of the queue; what was removed, for people. now: without the time to save."""
        raise NotImplementedError

    def end(self, job: Job) -> Query[None]:
        """Ask the job script of a running job to end the run in order."""
        raise NotImplementedError

    def save(self, job: Job, nodes: Sequence[str], python: str) -> Query[None]:
        """Ask a running job to save a checkpoint. python: the interpreter there."""
        raise NotImplementedError

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
        """The command that runs another one on a node of a running job, and its variables. section: of its recipe."""
        raise NotImplementedError

    def signal_node(self, host: str, argv: Sequence[str], section: Cluster) -> Query[bool]:
        """Run the command on a host that signals its trainkit; whether the run is there. section: of its recipe."""
        raise NotImplementedError

    def logs(self, job: Job, node: int | None, *, follow: bool) -> tuple[str, ...]:
        """The command that prints what a node has said, or (None) all: where the run directory is not shared."""
        raise NotImplementedError

    # In the job script: `trainkit job batch`.

    save_signal: ClassVar[signal.Signals] = signal.SIGUSR2  # that `save` sends it
    # Whether SIGUSR1 comes some seconds before the time limit, as planned. Else the job script looks at the clock.
    warns: ClassVar[bool] = True
    # Whether a signal that comes before `trainkit job batch` listens is lost. Else it ends the script.
    loses_signals: ClassVar[bool] = False
    # Whether the script waits to be ended, once its job is queued again or cancelled.
    ends_script: ClassVar[bool] = False
    # Whether a job that is queued again is another job, with a number of its own.
    resubmits: ClassVar[bool] = False

    def starts_step(self, words: Sequence[str], run_dir: str) -> bool:
        """Whether planned words are those that start the command behind them once on each node of the job."""
        raise NotImplementedError

    def step_words(self, environ: Mapping[str, str]) -> tuple[str, ...]:
        """Words for `trainkit job node` that tell the nodes what no variable does."""
        return ()

    def home(self, content: str, environ: Mapping[str, str]) -> tuple[str, str]:
        """The cluster that a job's script names, and the one that has it, by the variables of the job."""
        return "", ""

    def requeue(self, job: Job, run_dir: str, environ: Mapping[str, str]) -> str:
        """Queue a running job again; its number from then on. Raises RefusedError and MachineError."""
        raise NotImplementedError

    def exclude(self, job: Job, hosts: Sequence[str]) -> Query[None] | None:
        """Keep a job that was queued again off all of these hosts; None where that cannot be asked for."""
        return None

    # In an allocation, where `trainkit run` starts itself on each node.

    def step(
        self, allocation: Allocation, nodes: int, environ: Mapping[str, str], name: str, argv: Sequence[str]
    ) -> tuple[str, ...]:
        """What starts a command once on each of some nodes. name: of the step. MachineError where there are fewer."""
        raise NotImplementedError

    def steps(self, job_id: str) -> Query[dict[str, str]]:
        """The steps of a job by their names."""
        raise NotImplementedError

    def send(self, step: str, signal: str) -> Query[None]:
        """Send a signal to every process of a step."""
        raise NotImplementedError

    def beside(self, job_id: str, host: str, argv: Sequence[str]) -> Query[bool]:
        """Run a command on a node of a running job; whether it succeeds."""
        raise NotImplementedError

    def start_of(self, job_id: str, step: str, environ: Mapping[str, str]) -> str:
        """The name of a start, as of `Place`, by a step of a job."""
        raise NotImplementedError
