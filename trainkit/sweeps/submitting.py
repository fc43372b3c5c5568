"""A sweep whose trials are the tasks of an array job: submit them, and take the results of those that have ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trainkit.errors import UsageError
from trainkit.runner.report.console import Terminal
from trainkit.runner.rundir.layout import RunLayout
from trainkit.runner.together import RunsTogether
from trainkit.schedulers.jobs.records import Submission
from trainkit.schedulers.jobs.run_state import Jobs, state_of
from trainkit.schedulers.jobs.submitting import Task, differences, without_arrays
from trainkit.sweeps.preparing import Sweep
from trainkit.sweeps.results import SweepResult
from trainkit.sweeps.running import Sweeping
from trainkit.sweeps.study import Study, Trial, locked


def submit_trials(
    sweep: Sweep, submit: Callable[[Sequence[Task]], Sequence[tuple[RunLayout, Submission]]]
) -> SweepResult:
    """Take the results of trials that are jobs, and submit those that are none yet as one array job.

    submit: submits tasks, after the scheduler was asked, and says so.
    """
    sweep.make_folder()
    with locked(sweep.folder):
        study = sweep.study()
        take_results(sweep, study)
        waiting: list[Trial] = [each for each in study.trials() if each.state == "running" and not each.job]
        while trial := study.next(sweep.definition.trials):
            waiting.append(trial)
        if waiting:
            tasks = list[Task]()
            for trial in waiting:
                resolved = sweep.recipes.resolved(trial.point)
                tasks.append(Task(f"trial {trial.number}", resolved, sweep.recipes.plan(resolved)))
            if what := without_arrays(tasks[0].plan, len(tasks)):
                raise UsageError(what, hint="run the sweep itself in a job of its own, with --jobs")
            if found := [*differences(tasks)]:
                keys = ", ".join(dict.fromkeys(each.key for each in found))
                what = f"the tasks of an array have one job script, and {keys} differs between the trials"
                raise UsageError(what, hint="vary other settings, or run the sweep itself in a job of its own")
            for trial, (layout, given) in zip(waiting, submit(tasks), strict=True):
                study.keep(trial.number, run=str(layout.root), job=given.job)
        return SweepResult(sweep.folder, sweep.definition, study.trials())


def take_results(sweep: Sweep, study: Study) -> None:
    """Take the results of trials whose jobs are over."""
    taking = Sweeping(sweep, study, RunsTogether(1, None, {}), Terminal({}))
    jobs = [each for each in study.trials() if each.state == "running" and each.job]
    over = ended_jobs(jobs)
    for trial in jobs:
        layout = RunLayout(Path(trial.run))
        if why := over.get(trial.number):
            taking.fail(trial, why)
        elif why is not None:
            taking.finish(trial, layout, taking.evaluations(layout))


def ended_jobs(trials: Sequence[Trial]) -> Mapping[int, str]:
    """Of trials that are jobs those that are over, with the reason where they have not ended well."""
    jobs, found = Jobs(), dict[int, str]()
    for trial in trials:
        state = state_of(RunLayout(Path(trial.run)), jobs)
        if state.is_over:
            found[trial.number] = "" if state.word == "done" else state.why or state.title
    return found
