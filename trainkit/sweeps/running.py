"""The runs of a sweep: start them, report their evaluations, end those that are stopped early, take their results."""

from __future__ import annotations

import math
import os
import signal
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from trainkit.bench import measure
from trainkit.errors import TrainkitError, UsageError
from trainkit.files import publish, read_json
from trainkit.machine.probe import probe
from trainkit.recipe.assignment import without_layer
from trainkit.runner.report.console import Terminal
from trainkit.runner.report.history import Curve, History
from trainkit.runner.rundir.layout import RunLayout
from trainkit.runner.rundir.listing import is_running, own_checkpoints
from trainkit.runner.supervisor.processes import STOP, handled
from trainkit.runner.together import (
    LOOK_SECONDS,
    ChildRun,
    RunsTogether,
    errors_of,
    logged_run,
    share_gpus,
    summary_of,
)
from trainkit.sweeps.preparing import Sweep, TrialRecipe
from trainkit.sweeps.results import BEST, SweepResult, evaluations, table
from trainkit.sweeps.space import named
from trainkit.sweeps.study import Study, Trial, locked
from trainkit.text import format_measure, pluralize

READ_SECONDS = 0.5  # between two looks at the metrics of the runs
ROWS = 15  # of the table while it runs, in a terminal that has them
HEADER = "# trainkit sweep"
ENDED_BY_SIGNAL = frozenset(code for number in STOP for code in (128 + number, -number))


@dataclass
class _Watched:
    """A trial whose run is a process of this sweep. reported: evaluations that the study knows."""

    trial: Trial
    child: ChildRun
    layout: RunLayout | None = None
    history: History | None = None
    reported: int = 0
    is_stopped: bool = False


def run_sweep(sweep: Sweep, jobs: str, console: Terminal) -> SweepResult:
    """Run what is left of a sweep to its end, or until a signal ends its runs in order.

    A trial that an earlier start left is taken up first: its result is kept where its run has ended well, else it goes
    on from its newest checkpoint. jobs: runs at once, or auto. Raises UsageError or MachineError where it cannot start.
    """
    plans, trials = [each.plan for each in sweep.planned], sweep.definition.trials
    at_once, gpus = share_gpus(jobs, plans, trials, probe, chosen=sweep.chosen, needs_gpus=False)
    sweep.make_folder()
    with locked(sweep.folder):
        study = sweep.study()
        if queued := [each for each in study.trials() if each.state == "running" and each.job]:
            hint = "the same line with --submit takes their results"
            raise UsageError(f"{pluralize(len(queued), 'trial')} of this sweep were submitted as jobs", hint=hint)
        # The trials' recipes are complete: a variable that is a layer would be laid over the values of a trial.
        return Sweeping(sweep, study, RunsTogether(at_once, gpus, without_layer(os.environ)), console).run()


@dataclass
class Sweeping:
    """The state of a sweep that runs, or whose results are taken."""

    sweep: Sweep
    study: Study
    together: RunsTogether
    console: Terminal
    watched: dict[str, _Watched] = field(default_factory=dict)  # by the names of their processes
    stopped_by: int | None = None
    refusal: str = ""
    shown_at: float = -math.inf

    def run(self) -> SweepResult:
        with handled(STOP, self._signalled):
            left = deque(self._left_behind())
            try:
                self._loop(left)
            finally:
                self.together.close()
        return self._result()

    def _signalled(self, number: int, _frame: FrameType | None) -> None:
        """Remember a signal, and pass it on to the runs."""
        self.stopped_by = number
        self.together.signal(number)

    def _result(self) -> SweepResult:
        trials = self.study.trials()
        return SweepResult(self.sweep.folder, self.sweep.definition, trials, self.stopped_by, self.refusal)

    def _loop(self, left: deque[tuple[Trial, str | None]]) -> None:
        following: tuple[Trial, TrialRecipe] | None = None
        exhausted = False
        while True:
            for child in self.together.take_ended():
                self._conclude(self.watched.pop(child.name))
            is_ending = self.stopped_by is not None or bool(self.refusal)
            while not is_ending and not exhausted and len(self.together.children) < self.together.jobs:
                following = following or self._next(left)
                exhausted = following is None
                if following is None or not self.together.has_room(following[1].gpus):
                    break
                self._start(*following)
                following = None
            if not self.together.children and (is_ending or exhausted):
                self.console.live(lambda _: "")
                return
            if time.monotonic() - self.shown_at > READ_SECONDS:
                for each in self.watched.values():
                    self._look(each)
                for name, why in self.together.newly_waiting():
                    self.console.say(f"trial {name} {why}")
                self.console.live(self._shown)
                self.shown_at = time.monotonic()
            time.sleep(LOOK_SECONDS)

    def _next(self, left: deque[tuple[Trial, str | None]]) -> tuple[Trial, TrialRecipe] | None:
        """The next trial that can be run, with its recipe; one that cannot has failed."""
        while True:
            if left:
                trial, checkpoint = left.popleft()
            else:
                found = self.study.next(self.sweep.definition.trials)
                if found is None:
                    return None
                trial, checkpoint = found, None
            try:
                return trial, self.sweep.recipes.trial(trial.point, checkpoint, alone=self.together.gpus is None)
            except TrainkitError as error:
                self.fail(trial, f"refused: {error}")

    def _start(self, trial: Trial, made: TrialRecipe) -> None:
        name, recipe = str(trial.number), self.sweep.recipe(trial.number)
        publish(recipe, f"{HEADER}: trial {trial.number}: {named(trial.point)}\n{made.text}")
        child = self.together.start(name, [str(recipe)], self.sweep.log(trial.number), made.gpus)
        self.watched[name] = _Watched(trial, child)
        if self.stopped_by is not None:  # the signal came while it was being started
            child.process.send_signal(self.stopped_by)
        where = f" on {', '.join(child.gpus)}" if child.gpus else ""
        self.console.say(f"trial {trial.number} of {self.sweep.definition.trials}: {named(trial.point)}{where}")

    def _look(self, watched: _Watched) -> Curve:
        """Report the new evaluations of a run, and end it where one says that it is stopped early; all of them."""
        number = watched.trial.number
        if watched.layout is None and (layout := watched.child.layout) is not None:
            watched.layout, watched.history = layout, History(layout.metrics)
            self.study.keep(number, run=str(layout.root))
        if watched.layout is None:
            return Curve()
        found = self.evaluations(watched.layout, watched.history)
        for step, value in list(zip(found.steps, found.values, strict=True))[watched.reported :]:
            watched.reported += 1
            worse = self.study.report(number, step, math.nan if value is None else value)
            total = watched.history.progress.total if watched.history else None
            if worse and not watched.is_stopped and not (total and step >= total):
                watched.is_stopped = True
                self.console.say(f"trial {number}: stopped early at step {step}: {self._measure(value)}")
                watched.child.process.send_signal(signal.SIGINT)
        return found

    def _conclude(self, watched: _Watched) -> None:
        """Take the result of a run that has ended. One that a signal to the sweep has ended goes on another time."""
        code, trial, found = watched.child.process.returncode, watched.trial, self._look(watched)
        if code == 0 and watched.layout is not None:
            self.finish(trial, watched.layout, found)
        elif watched.is_stopped:
            self.study.stop(trial.number)
        elif self.stopped_by is not None and code in ENDED_BY_SIGNAL:
            return
        elif watched.layout is None:
            self.fail(trial, f"refused: {watched.child.refusal()}")
        else:
            measured = measure(summary_of(watched.layout, code), "rss", errors_of(watched.layout), "")
            self.fail(trial, f"{measured.outcome}: {measured.reason}")

    def finish(self, trial: Trial, layout: RunLayout, found: Curve) -> None:
        """Tell the study the value of a run that has ended well; one without a value has failed."""
        if not found.values:
            metric = self.sweep.definition.metric
            self.fail(trial, f"its run evaluated no {metric}")
            self.refusal = f"a run of this recipe evaluates no {metric}, so that no trial can be compared"
            if self.sweep.program == "hf":
                self.refusal += " (Trainer writes its log down with a checkpoint, or by trainer.save_state())"
            return
        if (value := found.values[-1]) is None:
            self.fail(trial, f"its last {self.sweep.definition.metric} is not a finite number")
            return
        self.study.keep(trial.number, run=str(layout.root), step=found.steps[-1])
        self.study.finish(trial.number, value)
        best = self._result().best
        is_best = best is not None and best.number == trial.number
        if is_best:
            head = f"{HEADER}: the best so far is trial {trial.number}: {named(trial.point)}, {self._measure(value)}"
            recipe = self.sweep.recipes.winner(trial.point, layout)
            publish(self.sweep.folder / BEST, f"{head}\n# its run: {layout.root}\n{recipe}")
        self.console.say(f"trial {trial.number}: done, {self._measure(value)}{' (best so far)' if is_best else ''}")

    def fail(self, trial: Trial, why: str) -> None:
        self.study.fail(trial.number, why)
        self.console.say(f"trial {trial.number}: failed: {why}\n  {self.sweep.log(trial.number)}")

    def evaluations(self, layout: RunLayout, history: History | None = None) -> Curve:
        return evaluations(layout, self.sweep.definition.metric, self.sweep.program, history)

    def _measure(self, value: float | None) -> str:
        metric = self.sweep.definition.metric
        return f"{metric} is not a finite number" if value is None else f"{metric} {format_measure(value)}"

    def _left_behind(self) -> list[tuple[Trial, str | None]]:
        """The trials that an earlier start was running, with the checkpoints that they go on from.

        A run that has not ended is waited for; one that has ended well is a result.
        """
        found: list[tuple[Trial, str | None]] = []
        for trial in [each for each in self.study.trials() if each.state == "running"]:
            layout = logged_run(self.sweep.log(trial.number)) or (RunLayout(Path(trial.run)) if trial.run else None)
            if layout is None:
                found.append((trial, None))
                continue
            if is_running(layout):
                self.console.say(f"trial {trial.number} is still running, in {layout.root}: waiting for its end")
            while is_running(layout) and self.stopped_by is None:
                time.sleep(LOOK_SECONDS)
            if read_json(layout.summary).get("exit_code") == 0:
                self.finish(trial, layout, self.evaluations(layout))
                continue
            whole = [each for each in own_checkpoints(layout, self.sweep.program) if not each.damage]
            newest = max(whole, key=lambda each: each.step, default=None)
            how = f"goes on from step {newest.step}" if newest else "begins again, without a checkpoint"
            self.console.say(f"trial {trial.number} was interrupted, and {how}")
            found.append((trial, newest.path if newest else None))
        return found

    def _shown(self, width: int) -> str:
        """The table of a terminal, as many rows as it has."""
        trials, totals = self.study.trials(), dict[int, int]()
        live: Mapping[int, _Watched] = {each.trial.number: each for each in self.watched.values()}
        for place, trial in enumerate(trials):
            if (watched := live.get(trial.number)) and watched.history:
                progress = watched.history.progress
                trials[place] = replace(trial, step=max(progress.step, trial.step or 0))
                totals |= {trial.number: progress.total} if progress.total else {}
        lines = table(self.sweep.definition, trials, totals, width - 1).splitlines()
        room = max(3, min(ROWS, self.console.height - 3))
        left = len(lines) - room
        more = [f"and {pluralize(left, 'trial')} more: trainkit sweep {self.sweep.folder} --show"] if left > 0 else []
        return "\n".join([*lines[:room], *(line[: width - 1] for line in more)]).replace("…", "~")
