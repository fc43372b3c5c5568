"""One node of a submitted run: it plans again with what this machine has, and starts only what was promised."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from trainkit.errors import Diagnostic, ExitCode, MachineError, RecipeError, UsageError
from trainkit.files import publish, read_whole
from trainkit.launch_plan.model import Job, Plan
from trainkit.runner.execute import Told, execute
from trainkit.runner.nodes.assembly import Rendezvous, comparable_leaves, report_unfit
from trainkit.runner.nodes.roll_call import RefusedRunError, ReportedElsewhereError
from trainkit.runner.request import RunRequest
from trainkit.runner.rundir.code_state import write_code
from trainkit.runner.rundir.layout import RunLayout, subfolders
from trainkit.runner.rundir.listing import read_plan, read_status
from trainkit.runner.rundir.records import Pids
from trainkit.runner.supervisor.processes import PASSED_ON, STOP, handled, signal_name
from trainkit.schedulers.base import Allocation, Place, Scheduler
from trainkit.schedulers.client import answer_or
from trainkit.schedulers.jobs.job_script import (
    NOTHING_RUNS,
    ended_nowhere,
    newest_step,
    say,
    signal_node_0,
)
from trainkit.schedulers.jobs.records import (
    Attempt,
    Submission,
    make_attempt,
    read_attempts,
    update_status,
    write_attempt,
    write_submission,
)
from trainkit.schedulers.registry import SCHEDULERS

MOST = 5  # differences that are named
# What is known only on the node: names of the GPUs that the scheduler has given, the checkpoint by now.
BOUND_HERE = (
    "environment.set.CUDA_VISIBLE_DEVICES", "environment.unset", "environment.take", "preparations", "resume.",
)  # fmt: skip
SAID = (".reason", ".note")  # in words, of layers that the recorded recipe has no more
HINT = "plan for what the nodes have: cluster.machine, from `trainkit env facts` on one of them"


def run_node(
    submitted: RunLayout,
    layout: RunLayout,
    place: Place,
    make: Callable[[], RunRequest],
    told: Told = lambda *_: None,
) -> int:
    """Start the run on this node and see it through; its exit code. make: plans it with what this machine has.

    submitted: where the plan lies that was promised; layout: of the run. told: as of `execute`.

    Raises MachineError where this machine, or another node's, cannot run what was promised.
    """
    plan = read_plan(submitted)
    if place.node == 0:  # who is to be told that the run shall end, before a guardian says so
        update_status(layout, host=os.uname().nodename, pids=Pids.of(os.getpid()))
    try:
        return execute(_fitting(plan, layout, place, make), told)
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
                if SCHEDULERS[plan.job.scheduler].one_console:
                    raise
            except MachineError as told:
                if place.node == 0 and isinstance(told, RefusedRunError):
                    raise
        # What is wrong of the recipe here was not where it was submitted: this machine is another one.
        host = os.uname().nodename
        raise MachineError(replace(each, what=f"{host}: {each.what}") for each in error.diagnostics) from error


def own_job(layout: RunLayout, environ: Mapping[str, str]) -> str:
    """The number of the job that this process of a submitted run is in."""
    job = read_plan(layout).job
    return SCHEDULERS[job.scheduler].own_job(environ) if job else ""


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


RUN_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}")


class Pod:
    """One node of a run, in its pod. submitted: the folder with what was submitted; layout: on the shared volume.

    No job script begins an attempt: node 0 makes the run directory, and writes down how it began and ended.
    """

    def __init__(self, submitted: RunLayout, run_id: str, environ: Mapping[str, str]) -> None:
        self.submitted, self._environ = submitted, environ
        self._plan = read_plan(submitted)
        if self._plan.job is None:
            raise MachineError(f"{submitted.plan} is not of a submitted run")
        self._scheduler = SCHEDULERS[self._plan.job.scheduler]
        place = self._scheduler.place(environ)
        self._node = place.node if isinstance(place, Place) else 0
        self.job = self._scheduler.own_job(environ)
        root = Path(self._plan.output_root).absolute() / self._plan.name / run_id
        if not RUN_ID.fullmatch(run_id):
            raise UsageError(f"{run_id!r} is no id of a run", hint="`trainkit submit RECIPE` makes one")
        self.layout = RunLayout(root)
        self._attempt = 0

    def begin(self) -> int:
        """On node 0, make the run directory, or go on in it; the number of this start."""
        layout, count = self.layout, self._scheduler.restarts(self._environ)
        self._attempt = 1 + count
        if self._node:
            return self._attempt
        try:
            layout.root.mkdir(parents=True, exist_ok=True)
            for file in (layout.recipe, layout.plan):
                if not file.exists():
                    publish(file, read_whole(self.submitted.root / file.name))
            if not layout.code.exists():  # which is that of the image
                write_code(layout, read_whole(layout.recipe).decode())
        except OSError as error:
            what = f"the run directory {layout.root} cannot be made in this pod: {error.strerror}"
            raise MachineError(what, hint="mount a claim there that this user may write to: cluster.volumes") from error
        earlier = read_attempts(layout)
        self._attempt = make_attempt(layout, self._attempt)
        host, step = os.uname().nodename, newest_step(layout, self._plan)
        write_attempt(layout, Attempt(self._attempt, self.job, count, host, time.time(), step))
        if self.job and not earlier:
            write_submission(layout, Submission(self._scheduler.kind, self.job))
        began = {"attempt": self._attempt, "job": self.job, "host": host, "pids": Pids.of(os.getpid())}
        update_status(layout, **ended_nowhere(), **began, run_id=layout.id, state="starting", outcome=None)
        return self._attempt

    def end(self, code: int) -> None:
        """On node 0, write down that a run has succeeded; after a failure the scheduler decides what follows."""
        if self._node == 0 and code == 0:
            update_status(self.layout, outcome="done")


LOOK_SECONDS = 0.2
START_SECONDS = 30.0  # for the scheduler to know a step that has just been started


def run_step(place: Allocation, nodes: int, runs: Path, environ: Mapping[str, str]) -> int:
    """Start this command once on each node of the allocation, and wait for its end; the exit code of what starts it.

    runs: the folder in which node 0 makes the run directory.

    Raises MachineError where the allocation has fewer nodes, or there is no such command.
    """
    scheduler = SCHEDULERS[place.scheduler]
    name = f"trainkit-{os.getpid()}"
    again = (sys.executable, "-P", "-m", "trainkit", *sys.argv[1:])
    argv = scheduler.step(place, nodes, environ, name, again)
    received: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    with handled((*STOP, *PASSED_ON), note):
        try:
            # In a session of its own: a terminal's Ctrl-C is not for srun, which would end the step in its own way.
            process = subprocess.Popen(argv, start_new_session=True)
        except OSError as error:
            what = f"{argv[0]} cannot be started: {error.strerror}"
            raise MachineError(what, hint=f"is {scheduler.title} on PATH here?") from error
        step = _Step(scheduler, place.job, name, process, environ)
        while process.poll() is None:
            while received:
                step.pass_on(received.pop(0), runs)
            time.sleep(LOOK_SECONDS)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


@dataclass(frozen=True, slots=True)
class _Step:
    """What runs on the nodes of an allocation. process: that has started it."""

    scheduler: Scheduler
    job: str
    name: str
    process: subprocess.Popen[bytes]
    environ: Mapping[str, str]

    def pass_on(self, number: int, runs: Path) -> None:
        """Signal node 0's trainkit, once the scheduler knows the step. Before there is a run, the step is ended."""
        until = time.monotonic() + START_SECONDS
        while self.process.poll() is None and time.monotonic() < until:
            known = answer_or(self.scheduler.steps(self.job), {}, self.environ)
            if self.name in known:
                start = self.scheduler.start_of(self.job, known[self.name].rpartition(".")[2], self.environ)
                if not self._tell_node_0(number, start, runs):
                    if number in PASSED_ON:
                        say(NOTHING_RUNS)
                    else:
                        word = signal_name(number).removeprefix("SIG")
                        answer_or(self.scheduler.send(known[self.name], word), None, self.environ)
                return
            time.sleep(LOOK_SECONDS)
        if number not in PASSED_ON:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGTERM)

    def _tell_node_0(self, number: int, start: str, runs: Path) -> bool:
        """Signal the trainkit of node 0 of the run of a start; whether there is one. It may be on another host."""
        for folder in sorted(subfolders(runs), reverse=True):
            layout = RunLayout(folder)
            status = read_status(layout)
            if status is None or status.job != start or status.state == "ended" or status.host is None:
                continue
            if status.host == os.uname().nodename:
                return signal_node_0(layout, number)
            words = (sys.executable, "-P", "-m", "trainkit", "job", "signal", str(folder), str(number))
            return answer_or(self.scheduler.beside(self.job, status.host, words), otherwise=False, environ=self.environ)
        return False
