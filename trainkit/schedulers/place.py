"""Which node of which job this is, as the scheduler's variables say it; and how it should have been started instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainkit.errors import MachineError
from trainkit.schedulers.hostlist import expand

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
