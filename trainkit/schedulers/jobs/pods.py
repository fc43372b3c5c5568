"""A run in pods: what is submitted of it, how node 0's pod begins and ends it on the shared volume, and its output.

The machine that submits need not see that volume: it keeps a record of its own, and asks Kubernetes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainkit.errors import MachineError, UsageError
from trainkit.files import publish, read_whole
from trainkit.launch_plan.model import Plan, Variable
from trainkit.runner.rundir.code_state import write_code
from trainkit.runner.rundir.create import plan_text
from trainkit.runner.rundir.layout import RunLayout
from trainkit.runner.rundir.records import Pids
from trainkit.schedulers import kubectl, kubernetes
from trainkit.schedulers.base import JobState, NoAnswerError, Place, RefusedError, place_in
from trainkit.schedulers.client import answer_or, ask
from trainkit.schedulers.jobs.batch import ended_nowhere, newest_step, read_plan
from trainkit.schedulers.jobs.records import (
    Attempt,
    Submission,
    make_attempt,
    read_attempts,
    read_submission,
    update_status,
    write_attempt,
    write_submission,
)
from trainkit.schedulers.jobs.states import state_of

RECORDS = "runs"  # of what this machine has submitted to Kubernetes, in the working folder
LARGEST = 1_000_000  # bytes that a ConfigMap may have: 1 MiB, with its metadata
LOOK_SECONDS = 3.0


def files(plan: Plan, recipe_yaml: str, run_id: str) -> dict[str, str]:
    """The manifests of a run by their names. MachineError where they are more than a ConfigMap holds."""
    assert plan.job is not None
    job, values = plan.job, {Variable.RUN_ID: run_id}
    name = kubernetes.object_name(plan.name).bind(values)
    namespace = str(job.submit[[str(word) for word in job.submit].index("-n") + 1])
    inside = dict(zip(kubernetes.FILES, (recipe_yaml, plan_text(plan)), strict=True))
    content = kubernetes.config_map(namespace, name, inside)
    if len(content.encode()) > LARGEST:
        what = f"recipe and plan take {len(content.encode()):,} bytes, and a ConfigMap holds {LARGEST:,}"
        raise MachineError(what, hint="shorten the words of the recipe: name files in the image instead")
    return {kubernetes.CONFIG_MAP: content, job.file: job.content.bind(values)}


def job_id(plan: Plan, layout: RunLayout) -> str:
    """`namespace/kind/name` of the workload of a run."""
    assert plan.job is not None
    words = [str(word) for word in plan.job.submit]
    kind = "jobset" if "kind: JobSet" in str(plan.job.content).splitlines() else "job"
    name = kubernetes.object_name(plan.name).bind({Variable.RUN_ID: layout.id})
    return f"{words[words.index('-n') + 1]}/{kind}/{name}"


def submit(plan: Plan, layout: RunLayout, argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """Give the job in; its id. Raises RefusedError and MachineError, and leaves nothing of it behind.

    NoAnswerError where it is not known whether there is such a job.
    """
    number = job_id(plan, layout)
    try:
        return ask(kubectl.submission(argv), environ)
    except (RefusedError, MachineError) as error:
        silent = isinstance(error, NoAnswerError)
        if silent:
            found = answer_or(kubectl.state(number), JobState("unknown", "no answer"), environ)
            if found.state in ("queued", "running", "ended"):
                return number
            if found.state != "gone":
                what = f"{error}, and whether there is {number} is not known ({found.reason}): {layout.root} stays"
                raise NoAnswerError(what, hint="`trainkit status` asks again, `trainkit cancel` removes it") from error
        # The ConfigMap is made before the workload is refused.
        namespace, _, name = number.split("/")
        answer_or(kubectl.leftovers(namespace, name), (), environ)
        if silent:
            raise MachineError(f"{error}, and there is no {number}", hint="submit again") from error
        raise


class Pod:
    """One node of a run, in its pod. submitted: the folder with what was submitted; layout: on the shared volume."""

    def __init__(self, submitted: RunLayout, run_id: str, environ: Mapping[str, str]) -> None:
        self.submitted, self._environ = submitted, environ
        self._plan = read_plan(submitted)
        place = place_in(environ)
        self._node = place.node if isinstance(place, Place) else 0
        self.job = environ.get(kubernetes.POD_JOB, "")
        root = Path(self._plan.output_root).absolute() / self._plan.name / run_id
        if not kubernetes.RUN_ID.fullmatch(run_id):
            raise UsageError(f"{run_id!r} is no id of a run", hint="`trainkit submit RECIPE` makes one")
        self.layout = RunLayout(root)
        self._attempt = 0

    def begin(self) -> int:
        """On node 0, make the run directory, or go on in it; the number of this start."""
        layout, restarts = self.layout, self._environ.get(kubernetes.RESTARTS, "")
        count = int(restarts) if restarts.isdecimal() else 0
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
            write_submission(layout, Submission("kubernetes", self.job, ()))
        began = {"attempt": self._attempt, "job": self.job, "host": host, "pids": Pids.of(os.getpid())}
        update_status(layout, **ended_nowhere(), **began, run_id=layout.id, state="starting", outcome=None)
        return self._attempt

    def end(self, code: int) -> None:
        """On node 0, write down that a run has succeeded; after a failure Kubernetes decides what follows."""
        if self._node == 0 and code == 0:
            update_status(self.layout, outcome="done")


def show_output(layout: RunLayout, node: int | None, *, follow: bool) -> int:
    """Print what the pods say: of a node, or (None) of all. follow: until the end, over all starts; its exit code.

    UsageError where Kubernetes has nothing of it; MachineError where kubectl is missing.
    """
    submission = read_submission(layout.root)
    assert submission is not None
    shown = -1  # the start whose output has been shown
    while True:
        found = state_of(layout)
        if found.nodes and found.attempt > shown and (found.word == "running" or found.is_over):
            _printed(kubectl.logs(submission.job, node, follow=follow))
            shown = found.attempt
            found = state_of(layout)
        elif not follow:
            raise UsageError(f"{submission.job} is {found.word}: {found.why or 'it has no pods'}", hint=LOST_OUTPUT)
        if not follow:
            return 0
        if found.is_over:
            sys.stderr.write(f"{found.word.replace('_', ' ')}{f': {found.why}' if found.why else ''}\n")
            return found.exit_code if found.exit_code is not None else 1
        time.sleep(LOOK_SECONDS)


LOST_OUTPUT = "output of pods that are gone is in the run directory on their volume"


def _printed(argv: Sequence[str]) -> None:
    sys.stdout.flush()
    try:
        subprocess.run(argv, stdin=subprocess.DEVNULL, check=False)
    except OSError as error:
        what = f"kubectl cannot be started: {(error.strerror or str(error)).lower()}"
        raise MachineError(what, hint="run trainkit where kubectl is") from error
