"""One node of a submitted run: it plans again with what this machine has, and starts only what was promised."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType

from trainkit.errors import Diagnostic, ExitCode, MachineError, RecipeError
from trainkit.launch_plan.model import Job, Plan
from trainkit.runner.execute import RunRequest, execute
from trainkit.runner.nodes.assembly import Rendezvous, comparable_leaves, report_unfit
from trainkit.runner.nodes.roll_call import RefusedRunError, ReportedElsewhereError
from trainkit.runner.rundir.layout import RunLayout, subfolders
from trainkit.runner.rundir.listing import read_status
from trainkit.runner.rundir.records import Pids
from trainkit.runner.supervisor.processes import PASSED_ON, STOP, handled, signal_name
from trainkit.schedulers import slurm
from trainkit.schedulers.base import Allocation, Place, start_of
from trainkit.schedulers.client import answer_or
from trainkit.schedulers.jobs.batch import NOTHING_RUNS, read_plan, say, signal_node_0
from trainkit.schedulers.jobs.records import update_status

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
    except ReportedElsewhereError as error:  # node 0 says it, on the console that all nodes have
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
                report_unfit(Rendezvous.of(plan, str(layout.root)), place, error, say, plan.job.start_seconds)
            except ReportedElsewhereError:
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
    promised, found = comparable_leaves(submitted), comparable_leaves(plan)
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


LOOK_SECONDS = 0.2
START_SECONDS = 30.0  # for Slurm to know a step that has just been started


def run_step(place: Allocation, nodes: int, runs: Path, environ: Mapping[str, str]) -> int:
    """Start this command once on each node of the allocation, and wait for its end; srun's exit code.

    runs: the folder in which node 0 makes the run directory.

    Raises MachineError where the allocation has fewer nodes, or there is no srun.
    """
    name = f"trainkit-{os.getpid()}"
    again = (sys.executable, "-P", "-m", "trainkit", *sys.argv[1:])
    argv = slurm.step(place, nodes, environ, name, again)
    received: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    with handled((*STOP, *PASSED_ON), note):
        try:
            # In a session of its own: a terminal's Ctrl-C is not for srun, which would end the step in its own way.
            step = subprocess.Popen(argv, start_new_session=True)
        except OSError as error:
            raise MachineError(f"srun cannot be started: {error.strerror}", hint="is Slurm on PATH here?") from error
        while step.poll() is None:
            while received:
                _pass_on(received.pop(0), place.job, name, environ, step, runs=runs)
            time.sleep(LOOK_SECONDS)
    return step.returncode if step.returncode >= 0 else 128 - step.returncode


def _pass_on(
    number: int, job: str, name: str, environ: Mapping[str, str], step: subprocess.Popen[bytes], *, runs: Path
) -> None:
    """Signal node 0's trainkit, once Slurm knows the step. Before there is a run, the step is told to end."""
    until = time.monotonic() + START_SECONDS
    while step.poll() is None and time.monotonic() < until:
        known = answer_or(slurm.steps(job), {}, environ)
        if name in known:
            start = start_of(job, known[name].rpartition(".")[2], environ)
            if not _tell_node_0(number, job, start, runs, environ):
                if number in PASSED_ON:
                    say(NOTHING_RUNS)
                else:
                    word = signal_name(number).removeprefix("SIG")
                    answer_or(slurm.send(known[name], word, script=False), None, environ)
            return
        time.sleep(LOOK_SECONDS)
    if number not in PASSED_ON:
        with contextlib.suppress(ProcessLookupError):
            step.send_signal(signal.SIGTERM)


def _tell_node_0(number: int, job: str, start: str, runs: Path, environ: Mapping[str, str]) -> bool:
    """Signal the trainkit of node 0 of the run of a start; whether there is one. It may be on another host."""
    for folder in sorted(subfolders(runs), reverse=True):
        layout = RunLayout(folder)
        status = read_status(layout)
        if status is None or status.job != start or status.state == "ended" or status.host is None:
            continue
        if status.host == os.uname().nodename:
            return signal_node_0(layout, number)
        words = (sys.executable, "-P", "-m", "trainkit", "job", "signal", str(folder), str(number))
        return answer_or(slurm.beside(job, status.host, words), otherwise=False, environ=environ)
    return False
