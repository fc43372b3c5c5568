"""Slurm's short form of host names: ``gpu[01-03,7]-[a,b],login``. What `scontrol show hostnames` writes out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Generic, Literal, Protocol, TypeVar

from trainkit.errors import Diagnostic, MachineError
from trainkit.launch_plan.context import Context
from trainkit.launch_plan.provenance import SourcedJob

MOST = 100_000  # hosts; a range of more is no list of a cluster's nodes
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\],]+)")
_RANGE = re.compile(r"(\d+)-(\d+)")


def expand(text: str) -> tuple[str, ...]:
    """Every host, in the order of the list. ValueError for what is no such list, or one of more than 100,000 hosts."""
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


# Slurm's steps that are no step of srun: the batch script and salloc's shell (slurm.h, from NO_VAL downwards).
FIRST_SPECIAL_STEP = 0xFFFFFFF0
# They number the nodes of a job from 0: Kubernetes (indexed job), PBS, then SageMaker, Azure ML and others.
OTHER_NODE_RANKS = ("JOB_COMPLETION_INDEX", "PBS_NODENUM", "NODE_RANK")
NODE_RANKS = ("SLURM_NODEID", *OTHER_NODE_RANKS)
# What trainkit's own manifests tell a pod: the pods' host names in Slurm's short form, and the name of this start.
POD_HOSTS, POD_START = "TRAINKIT_POD_HOSTS", "TRAINKIT_POD_START"


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
    """Nodes of a Slurm job whose step has not begun: in the batch script, or salloc's shell."""

    nodes: int
    job: str


def place_in(environ: Mapping[str, str]) -> Place | Allocation | None:
    """Where this process is; None outside of any job. Raises MachineError for several processes on one node."""
    if "SLURM_JOB_ID" in environ:
        return _in_slurm(environ)
    if POD_HOSTS in environ and (node := _number(environ, "JOB_COMPLETION_INDEX")) is not None:
        hosts = _hosts(environ[POD_HOSTS])
        return Place(node, len(hosts) or None, hosts, environ.get(POD_START, ""))
    for name in OTHER_NODE_RANKS:
        if (value := environ.get(name, "")).isdecimal():
            return Place(int(value))
    return None


def in_step(environ: Mapping[str, str]) -> bool:
    """Whether this is a process of a step of srun, whose nodes have one console."""
    return "SLURM_JOB_ID" in environ and isinstance(place_in(environ), Place)


def _in_slurm(environ: Mapping[str, str]) -> Place | Allocation:
    job, step = environ["SLURM_JOB_ID"], _number(environ, "SLURM_STEP_ID")
    if step is None or step >= FIRST_SPECIAL_STEP:  # SLURM_NODEID is 0 there, too
        return Allocation(_number(environ, "SLURM_JOB_NUM_NODES", "SLURM_NNODES") or 1, job)
    nodes = _number(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES") or 1
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") or nodes
    if tasks > nodes:
        raise MachineError(
            f"Slurm starts {tasks} processes on {nodes} nodes: trainkit is started once on each node, and starts its "
            "ranks itself",
            hint="srun --ntasks-per-node=1 trainkit run …; nodes.processes_per_node says how many ranks a node has",
        )
    hosts = _hosts(environ.get("SLURM_STEP_NODELIST", ""))
    node = _number(environ, "SLURM_NODEID") or 0
    return Place(node, nodes, hosts if len(hosts) == nodes else (), start_of(job, str(step), environ))


def start_of(job: str, step: str, environ: Mapping[str, str]) -> str:
    """The name of a start by a step of a job. A requeued job has the same number: its restarts tell them apart."""
    return f"{job}.{step}.{environ.get('SLURM_RESTART_COUNT', '0')}"


def _hosts(text: str) -> tuple[str, ...]:
    """Those of a list in Slurm's short form; none where it is none."""
    try:
        return expand(text)
    except ValueError:
        return ()


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    """The first of the variables that is a whole number."""
    return next((int(value) for name in names if (value := environ.get(name, "")).isdecimal()), None)


Answer = TypeVar("Answer")
State = Literal["queued", "running", "ended", "unknown", "gone"]
# <timestamp>-<id> of a run directory; behind it comes the number of a task of an array.
_RUN_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}")


@dataclass(frozen=True, slots=True)
class Output:
    """What a command has said. code: its exit code."""

    code: int
    out: str
    err: str

    @property
    def words(self) -> str:
        """What it says of a failure, in one line."""
        lines = [line.strip() for line in (self.err or self.out).splitlines() if line.strip()]
        return "; ".join(dict.fromkeys(lines))


@dataclass(frozen=True, slots=True)
class Query(Generic[Answer]):
    """A command for the scheduler, and the reader of what it says. The reader raises RefusedError."""

    argv: tuple[str, ...]
    read: Callable[[Output], Answer]


@dataclass(frozen=True, slots=True)
class Job:
    """A job that was submitted. cluster: of several that one scheduler's commands reach; empty for their own."""

    id: str
    cluster: str = ""


class Scheduler(Protocol):
    """What a module of a scheduler has for planning, and for everyone who looks at a job."""

    JOB_ID: str  # pattern of a job's number, with ASCII digits

    def problems(self, context: Context) -> Iterator[Diagnostic]:
        """What is wrong with its section, whatever the cluster says."""

    def job(self, context: Context) -> SourcedJob:
        """What is submitted, by which command, and how it starts on the nodes."""

    def cores(self, context: Context) -> tuple[int, tuple[str, ...]] | None:
        """Processors that the job asks for on each node, and the keys that decide them; None where it asks for none."""

    def states(self, job: Job) -> Query[dict[str, JobState]]:
        """What it knows of a job, and of the other tasks of its array, by their numbers; nothing of what is gone."""

    def queue(self, job: Job, uid: int) -> Query[Mapping[str, State]] | None:
        """The jobs of a user that it has still, by their numbers; None where a job that has ended is never begun again.

        job: one of them, which says on which cluster.
        """

    def past(self, job: Job) -> Query[JobState] | None:
        """What it knows of a job that is gone; None where it keeps no accounts."""

    def controller(self) -> Query[str] | None:
        """Who answers, where several that count jobs for themselves may be asked from one home folder."""


class RefusedError(Exception):
    """The scheduler has refused, in its own words."""


class NoAnswerError(MachineError):
    """A command has said nothing in time, or nothing that can be read: nobody knows what it has done."""


@dataclass(frozen=True, slots=True)
class JobState:
    """What a scheduler knows of a job. reason: why it waits, or how it ended, in the scheduler's words.

    why: of the ends that are not the program's: cancelled, time limit, preemption, a failed node.
    """

    state: State
    reason: str = ""
    nodes: str = ""  # in the scheduler's short form
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
