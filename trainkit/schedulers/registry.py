"""The schedulers by their name in `cluster.kind`, imported when one is used; `none` has none."""

from __future__ import annotations

from collections.abc import Mapping

from trainkit.launch_plan.context import Context
from trainkit.lazy import Registry
from trainkit.schedulers.base import Allocation, Place, Scheduler, number_in

_HERE = "trainkit.schedulers"
SCHEDULERS: Registry[Scheduler] = Registry(
    {
        "slurm": f"{_HERE}.slurm:SCHEDULER",
        "pbs": f"{_HERE}.pbs:SCHEDULER",
        "ssh": f"{_HERE}.ssh:SCHEDULER",
        "kubernetes": f"{_HERE}.kubernetes:SCHEDULER",
    }
)


def cores_of_node(context: Context) -> tuple[int, tuple[str, ...]]:
    """Processors that the ranks of a node share, and the keys that decide them: those of its job, or all."""
    scheduler = SCHEDULERS.get(context.recipe.cluster.kind)
    asked = scheduler.cores(context) if scheduler else None
    return asked or (context.facts.cpu_cores, ())


def shares_console(environ: Mapping[str, str]) -> bool:
    """Whether this is a node that was started together with the others of its job, on one console."""
    places = (each.place(environ) for each in SCHEDULERS.values() if each.one_console)
    return any(isinstance(place, Place) and place.start for place in places)


# They number the nodes of a job from 0: Slurm, Kubernetes (indexed job), PBS, then SageMaker, Azure ML and others.
NODE_RANKS = ("SLURM_NODEID", "JOB_COMPLETION_INDEX", "PBS_NODENUM", "NODE_RANK")


def place_in(environ: Mapping[str, str]) -> Place | Allocation | None:
    """Where this process is; None outside of any job. Raises MachineError for several processes on one node."""
    for scheduler in SCHEDULERS.values():
        if (place := scheduler.place(environ)) is not None:
            return place
    return next((Place(number) for name in NODE_RANKS[1:] if (number := number_in(environ, name)) is not None), None)
