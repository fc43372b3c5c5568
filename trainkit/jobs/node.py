"""One node of a submitted run: it plans again with what this machine has, and starts only what was promised."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace

from trainkit.errors import Diagnostic, ExitCode, MachineError, RecipeError
from trainkit.jobs.batch import read_plan, say
from trainkit.jobs.records import update_status
from trainkit.plan.model import Job, Plan
from trainkit.runner.execute import RunRequest, execute
from trainkit.runner.nodes.agreement import RefusedRunError, ToldError
from trainkit.runner.nodes.assembly import Meeting, comparable, report_unfit
from trainkit.runner.rundir.layout import RunLayout
from trainkit.runner.rundir.records import Pids
from trainkit.schedulers.place import Place

MOST = 5  # differences that are named
# What is known only on the node: names of the cards that the scheduler has given, the checkpoint by now.
BOUND_HERE = (
    "environment.set.CUDA_VISIBLE_DEVICES", "environment.unset", "environment.take", "preparations", "resume.",
)  # fmt: skip
SAID = (".reason", ".note")  # in words, of layers that the recorded recipe has no more
HINT = "plan for what the nodes have: cluster.machine, from `trainkit facts` on one of them"


def run_node(submitted: RunLayout, layout: RunLayout, place: Place, make: Callable[[], RunRequest]) -> int:
    """Start the run on this node and see it through; its exit code. make: plans it with what this machine has.

    submitted: where the plan lies that was promised; layout: of the run.

    Raises MachineError where this machine, or another node's, cannot run what was promised.
    """
    plan = read_plan(submitted)
    if place.node == 0:  # who is to be told that the run shall end, before a guardian says so
        update_status(layout, host=os.uname().nodename, pids=Pids.of(os.getpid()))
    try:
        return execute(_fitting(plan, layout, place, make))
    except ToldError as error:  # node 0 says it, on the console that all nodes have
        return int(error.exit_code)
    except MachineError as error:
        if place.node == 0:
            _mark_refused(layout, error)
        raise


def _fitting(plan: Plan, layout: RunLayout, place: Place, make: Callable[[], RunRequest]) -> RunRequest:
    """The request. Where this machine cannot run the plan, the other nodes are told, and node 0 says why, for all."""
    try:
        return make()
    except (MachineError, RecipeError) as error:
        if plan.topology.nodes > 1 and plan.job is not None:
            try:
                report_unfit(Meeting.of(plan, str(layout.root)), place, error, say, plan.job.start_seconds)
            except ToldError:
                if plan.job.scheduler != "kubernetes":  # whose pods have no console in common
                    raise
            except MachineError as told:
                if place.node == 0 and isinstance(told, RefusedRunError):
                    raise
        # What is wrong of the recipe here was not where it was submitted: this machine is another one.
        host = os.uname().nodename
        raise MachineError(replace(each, what=f"{host}: {each.what}") for each in error.diagnostics) from error


def _mark_refused(layout: RunLayout, error: MachineError) -> None:
    """Write down why nothing was started; the job decides what follows."""
    blamed = error.blamed if isinstance(error, RefusedRunError) else ""
    update_status(
        layout,
        state="ended",
        exit_code=int(ExitCode.MACHINE),
        failure="unfit" if blamed else "trainkit",
        why=str(error),
        blamed=blamed,
        ended=time.time(),
    )


def as_promised(layout: RunLayout, plan: Plan) -> Job:
    """The job of the submitted plan. MachineError where what this node would start differs from that plan."""
    submitted = read_plan(layout)
    if submitted.job is None:
        raise MachineError(f"{layout.plan} is not of a submitted run")
    promised, found = comparable(submitted), comparable(plan)
    if promised["recipe_digest"] != found["recipe_digest"]:
        what = f"{layout.recipe} is not what was submitted: it was changed since then"
        raise MachineError(what, hint="submit the changed recipe as a run of its own")
    differing = [
        Diagnostic(
            "error", f"{key} was planned as {promised.get(key, 'absent')}, and is {found.get(key, 'absent')}", hint=HINT
        )
        for key in dict.fromkeys((*promised, *found))
        if promised.get(key) != found.get(key) and not key.startswith(BOUND_HERE) and not key.endswith(SAID)
    ]
    if differing:
        raise MachineError(differing[:MOST])
    return submitted.job
