"""Several runs at once, each a process of its own with GPUs of its own: for `trainkit bench` and `trainkit sweep`."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from trainkit.errors import MachineError, UsageError
from trainkit.files import read_json
from trainkit.launch_plan.model import Plan
from trainkit.machine.facts import Facts
from trainkit.machine.selection import allocation, is_idle
from trainkit.recipe.schema import Recipe
from trainkit.runner.report.progress import last_lines
from trainkit.runner.rundir.layout import RunLayout
from trainkit.runner.supervisor.processes import die_with_parent
from trainkit.text import MIB, pluralize

RUN_DIRECTORY, WAITS = "run directory: ", "waits for "  # as a run says them before it starts its program
START_BYTES = 1 << 16  # of a log, in which that line is
LOOK_SECONDS = 0.1  # between two looks at the processes
IDLE_BELOW = 1024 * MIB  # of a GPU that a run may have to itself, as `devices.idle_below`


class ChildRun(NamedTuple):
    """A run that is a process of its own. log: of its whole output. gpus: UUIDs of those that it has to itself.

    begun: by the monotonic clock.
    """

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    gpus: Sequence[str]
    begun: float

    @property
    def waits(self) -> str:
        """What it waits for before it begins, as it has said last; empty where it has not had to."""
        return next((line for line in reversed(_start_of(self.log)) if line.startswith(WAITS)), "")

    @property
    def layout(self) -> RunLayout | None:
        """Its run directory, as soon as it has one."""
        return logged_run(self.log)

    def refusal(self) -> str:
        """Why it ended without a run directory."""
        why = next((line for line in _start_of(self.log) if line.startswith("error: ")), f"see {self.log}")
        return why.removeprefix("error: ")


@dataclass
class RunsTogether:
    """Runs that share this machine. jobs: how many at once. gpus: UUIDs of the free ones; None: each run chooses.

    environ: of the runs.
    """

    jobs: int
    gpus: list[str] | None
    environ: Mapping[str, str]
    children: list[ChildRun] = field(default_factory=list)
    _settled: set[Path] = field(default_factory=set)  # logs of those that have begun, or are known to wait

    def has_room(self, gpus: int) -> bool:
        """Whether another run with so many GPUs can start."""
        return len(self.children) < self.jobs and (self.gpus is None or len(self.gpus) >= gpus)

    def start(self, name: str, line: Sequence[str], log: Path, gpus: int) -> ChildRun:
        """Start `trainkit run LINE`, which takes so many GPUs.

        A process of its own, for a run handles signals and adopts orphans for its whole process. It dies with this one.
        """
        taken = [] if self.gpus is None else [self.gpus.pop(0) for _ in range(gpus)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "trainkit", "run", *line],
                env={**self.environ, **({"CUDA_VISIBLE_DEVICES": ",".join(taken)} if taken else {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a terminal's Ctrl-C reaches this process alone, which passes it on once
                preexec_fn=die_with_parent,  # noqa: PLW1509 - no thread is about
            )
        self.children.append(ChildRun(name, process, log, taken, time.monotonic()))
        return self.children[-1]

    def take_ended(self) -> list[ChildRun]:
        """The runs that have ended since the last call; their GPUs are free again."""
        ended = [each for each in self.children if each.process.poll() is not None]
        for child in ended:
            self.children.remove(child)
            if self.gpus is not None:
                self.gpus += child.gpus
        return ended

    def newly_waiting(self) -> list[tuple[str, str]]:
        """The runs that have begun to wait for GPUs since the last call: their names, and for what."""
        found: list[tuple[str, str]] = []
        for each in self.children:
            if each.log not in self._settled:
                if why := each.waits:
                    found.append((each.name, why))
                if why or each.layout:
                    self._settled.add(each.log)
        return found

    def signal(self, number: int) -> None:
        """Pass a signal on to all of them."""
        for child in self.children:
            child.process.send_signal(number)

    def close(self) -> None:
        """End what is left, only if this process itself fails."""
        for child in self.children:
            child.process.terminate()
            child.process.wait()


def logged_run(log: Path) -> RunLayout | None:
    """The run directory that a run's own output names; None before it does, or without a log."""
    named = (line.removeprefix(RUN_DIRECTORY) for line in _start_of(log) if line.startswith(RUN_DIRECTORY))
    return next((RunLayout(Path(each)) for each in named), None)


def _start_of(log: Path) -> list[str]:
    """Its whole lines: of the last one more may come."""
    try:
        with log.open("rb") as file:
            return file.read(START_BYTES).decode("utf-8", "replace").rpartition("\n")[0].splitlines()
    except FileNotFoundError:
        return []


def summary_of(layout: RunLayout, code: int) -> Mapping[str, object]:
    """The summary of a run that has ended; where it has none, its exit code alone."""
    return read_json(layout.summary) or {"exit_code": code}


def errors_of(layout: RunLayout) -> str:
    """The end of every rank's standard error: there a failure says what it was."""
    logs = sorted(layout.attempt(1).logs.glob("rank-*.err"))
    return "\n".join(line for log in logs for line in last_lines(log))


def in_turn(recipe: Recipe, plan: Plan, *, alone: bool) -> list[str]:
    """Overrides by which a run among several waits for the GPUs of its plan.

    Between two of them another run may have got these, or be next for them: what has started is not refused for that.
    alone: whether the run chooses its GPUs: then it waits for those that it would have had, and takes no others.
    """
    devices, topology = recipe.devices, plan.topology
    if (
        devices.when_busy != "refuse"
        or topology.device != "cuda"
        or topology.nodes > 1
        or recipe.cluster.kind != "none"
    ):
        return []
    # Those of `free` are any that are idle, and there may be none just now.
    same = f"devices.select=[{','.join(card.uuid for card in plan.cards)}]"
    return [*([same] if alone and plan.cards and devices.select != "free" else []), "devices.when_busy=wait"]


def share_gpus(
    jobs: str, plans: Sequence[Plan], runs: int, facts: Callable[[], Facts], *, chosen: bool, needs_gpus: bool
) -> tuple[int, list[str] | None]:
    """How many runs go at once, and the UUIDs of the GPUs for them; None where each chooses by itself.

    That is so for one at a time, on CPUs, and for runs that wait for GPUs anyway: no two of these get the same one.
    jobs: a number, or auto. plans: of the runs, of which there are so many. chosen: whether a recipe names its GPUs.
    needs_gpus: whether runs that share a device are refused, as their times do not compare. Only GPUs like those of the
    plans count. Raises UsageError or MachineError where so many cannot run.
    """
    if jobs != "auto" and not (jobs.isdecimal() and int(jobs) > 0):
        raise UsageError(f"--jobs {jobs} is neither a number nor auto", hint="write --jobs 2, or --jobs auto")
    if jobs == "1" or not plans:
        return 1, None
    if not needs_gpus and not any(plan.cards for plan in plans) and all(plan.topology.nodes == 1 for plan in plans):
        return (1 if jobs == "auto" else int(jobs)), None
    waits = any(plan.waits for plan in plans)
    alike = {card.name for plan in plans for card in plan.cards}
    here = allocation(facts())
    gpus = [each for each in here if each.name in alike and (waits or is_idle(each, IDLE_BELOW))]
    reasons = {
        "runs without GPUs of their own would slow one another down": not all(plan.cards for plan in plans),
        "a run takes several nodes": any(plan.topology.nodes > 1 for plan in plans),
        "devices.select names the GPUs of a run": chosen,
        "the runs would be on GPUs of several kinds": len({gpu.name for gpu in here} if waits else alike) > 1,
        "GPUs of AMD cannot be given to runs one by one": any(gpu.vendor == "amd" for gpu in gpus),
    }
    why, most = next((why for why, holds in reasons.items() if holds), ""), max(len(plan.cards) for plan in plans)
    possible = 1 if why else len(gpus) // most
    if jobs == "auto":
        jobs = str(max(1, min(possible, runs)))
    elif why:
        raise UsageError(f"--jobs {jobs}: {why}", hint="leave --jobs out, and the runs follow one another")
    elif int(jobs) > possible:
        are = "here" if waits else "idle"
        what = f"--jobs {jobs}: a run takes {pluralize(most, 'GPU')}, and {len(gpus)} of the kind are {are}"
        raise MachineError(what, hint="give each run fewer with devices.select=1, or write --jobs auto")
    return int(jobs), None if waits or jobs == "1" else [gpu.uuid for gpu in gpus]
