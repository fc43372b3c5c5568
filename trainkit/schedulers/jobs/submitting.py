"""Submit plans: one as a job, or several as the tasks of an array job. The scheduler is asked first."""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

from trainkit.errors import Diagnostic, RecipeError
from trainkit.files import publish, write_json
from trainkit.launch_plan.model import Job, Plan, Planned, Text, Variable, bind_words
from trainkit.recipe.resolved import Resolved
from trainkit.recipe.yaml_writer import resolved_yaml
from trainkit.runner.rundir.code_state import Looked
from trainkit.runner.rundir.create import create_run_dir, create_run_dirs, plan_text, write_plan
from trainkit.runner.rundir.layout import RunLayout
from trainkit.runner.supervisor.processes import STOP
from trainkit.schedulers.base import DryRun, JobRequest, NoAnswerError, RefusedError, Scheduler
from trainkit.schedulers.base import Job as SubmittedJob
from trainkit.schedulers.client import answer_or
from trainkit.schedulers.jobs.records import Submission, write_submission
from trainkit.schedulers.registry import SCHEDULERS
from trainkit.text import join_names, pluralize

RECORDS = "runs"  # of what this machine has submitted and does not see the run directory of, in the working folder


def dry_run(
    plan: Plan, resolved: Resolved, environ: Mapping[str, str], folder: str, script: str | None = None
) -> DryRun:
    """Ask the scheduler. folder: where files may lie meanwhile. MachineError where it cannot be asked.

    script: of the job, where it is not the plan's own.
    """
    request = replace(_request(plan, resolved_yaml(resolved), folder, "", environ), script=script)
    return scheduler_of(plan).dry_run(request, resolved)


def scheduler_of(plan: Plan) -> Scheduler:
    """Who is given the job of a plan that has one."""
    assert plan.job is not None
    return SCHEDULERS[plan.job.scheduler]


def without_arrays(plan: Plan, count: int) -> str:
    """Why a plan's scheduler takes no array of so many tasks; empty where it does."""
    scheduler = scheduler_of(plan)
    if 0 < scheduler.least_tasks <= count:
        return ""
    few = f" of {pluralize(count, 'task')}" if scheduler.least_tasks else ""
    return f"cluster.kind is {scheduler.kind}, and {scheduler.title} has no arrays{few}"


def _request(plan: Plan, recipe_yaml: str, run_dir: str, run_id: str, environ: Mapping[str, str]) -> JobRequest:
    return JobRequest(plan, {"recipe.yaml": recipe_yaml, "plan.json": plan_text(plan)}, run_dir, run_id, environ)


def submit(
    plan: Plan, recipe_yaml: str, command_shell: str, environ: Mapping[str, str]
) -> tuple[RunLayout, Submission]:
    """Make the run directory and submit the job. Leaves nothing where it is refused: RecipeError, or MachineError."""
    scheduler = scheduler_of(plan)
    # Else the output folder is one of the nodes, and this machine keeps its own record of the run.
    layout = create_run_dir(plan.output_root if scheduler.shares_folder else RECORDS, plan.name)
    request = _request(plan, recipe_yaml, str(layout.root), layout.id, environ)
    with _submitting(scheduler, [layout]) as submitted:
        _write_record(layout, plan, recipe_yaml, command_shell)
        _write_files(scheduler, request, layout)
        submission = submitted(request)
        write_submission(layout, submission)
    return layout, submission


@contextlib.contextmanager
def _submitting(scheduler: Scheduler, layouts: Sequence[RunLayout]) -> Iterator[Callable[[JobRequest], Submission]]:
    """What submits a request. Where this, or what is done besides, fails, no job and no run directory is left.

    Only where it is not known whether there is a job, the directories stay: the job needs them.
    """
    requested: JobRequest | None = None
    given: Submission | None = None

    def submitted(request: JobRequest) -> Submission:
        nonlocal requested, given
        requested, who = request, scheduler.controller()
        controller = answer_or(who, "", request.environ) if who else ""
        job = scheduler.submit(request)
        given = Submission(scheduler.kind, job.id, request.argv, cluster=job.cluster, controller=controller)
        return given

    try:
        yield submitted
    except NoAnswerError:
        if requested and (expected := scheduler.expected_job(requested)):
            write_submission(layouts[0], Submission(scheduler.kind, expected, requested.argv))
        raise
    except BaseException as error:
        if given and requested:  # it could not be written down
            answer_or(scheduler.cancel(SubmittedJob(given.job, given.cluster), now=True), (), requested.environ)
        for layout in layouts:
            shutil.rmtree(layout.root, ignore_errors=True)
        if isinstance(error, RefusedError):
            what, key = f"{scheduler.title} refuses the job: {error}", scheduler.blamed(str(error))
            raise RecipeError(Diagnostic("error", what, key=key)) from error
        raise


def _write_record(
    layout: RunLayout, plan: Plan, recipe_yaml: str, command_shell: str, looked: Looked | None = None
) -> None:
    write_plan(layout, plan, recipe_yaml, command_shell, looked)
    write_json(layout.status, {"state": "queued", "run_id": layout.id, "attempt": 0})


def _write_files(scheduler: Scheduler, request: JobRequest, layout: RunLayout) -> None:
    for name, content in scheduler.files(request).items():
        publish(layout.root / name, content, mode=0o777 if content.startswith("#!") else 0o666)
    if scheduler.shares_folder:
        layout.job_output.touch()


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Ctrl-C and the like wait meanwhile: a job that is submitted is also written down, and told of."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def preparing_script(plan: Plan, argv: Sequence[Text], variables: Mapping[str, str], stem: str, count: int) -> str:
    """The job script of tasks that prepare data, of the lines of a plan's job: an array, if there are several.

    argv: what a task runs, with its folder for the run directory. stem: path of these folders up to the task's number.
    """
    assert plan.job is not None
    scheduler = scheduler_of(plan)
    parts = (word.split(_DIRECTORY) for word in bind_words(argv, {Variable.RUN_DIR: _DIRECTORY}))
    words = ('"$trainkit_folder"'.join(shlex.quote(each) if each else "" for each in word) for word in parts)
    started = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    started += [f"trainkit_folder={_DIRECTORY}", "trap '' USR1 USR2", f"exec {' '.join(words)}"]  # of the time limit
    lines = list[str]()
    for line in plan.job.content.bind({Variable.RUN_DIR: _DIRECTORY}).splitlines():
        if not _STARTS_RUN.search(line):
            lines.append(line)
        else:  # it goes on with the data, or (after a set-up that has failed, which it has told) not at all
            lines += [_STARTS_RUN.sub("exit 1", line)] if "--failed" in line else started
    if count > 1:
        return scheduler.array_script(lines, _DIRECTORY, stem, count, None)
    return "".join(f"{line}\n" for line in lines).replace(_DIRECTORY, shlex.quote(f"{stem}-0"))


_STARTS_RUN = re.compile(r"exec \S.* -P -m trainkit job batch .*")


def submit_preparation(
    plan: Plan, script: Callable[[str], str], contents: Sequence[Mapping[str, str]], environ: Mapping[str, str]
) -> tuple[Path, SubmittedJob]:
    """Make a folder for each task with its files, and submit one job. Leaves nothing where it is refused.

    script: of the job, for a path up to the task's number. Returns the first task's folder, and the job. Raises
    RecipeError and MachineError.
    """
    scheduler, count = scheduler_of(plan), len(contents)
    first = create_run_dir(plan.output_root, plan.name, "-data")
    layouts = [RunLayout(first.root / f"task-{number}") for number in range(count)]
    with _submitting(scheduler, [first, *layouts]) as submitted:
        request = JobRequest(
            plan, {}, str(layouts[0].root), first.id, environ, script(str(first.root / "task")),
            tasks=count if count > 1 else 0,
        )  # fmt: skip
        for layout, files in zip(layouts, contents, strict=True):
            layout.root.mkdir()
            for name, content in files.items():
                publish(layout.root / name, content)
            _write_files(scheduler, request, layout)
        given = submitted(request)
    return layouts[0].root, SubmittedJob(given.job, given.cluster)


_DIRECTORY = "\0"  # stands for the run directory in the lines of a job, until these are written
ONE_JOB = "the tasks of an array have one job script"


@dataclass(frozen=True, slots=True)
class Task:
    """One variant of the recipe, and its plan."""

    variant: str
    resolved: Resolved
    planned: Planned

    @property
    def plan(self) -> Plan:
        return self.planned.plan

    @property
    def job(self) -> Job:
        """What it would be submitted as by itself."""
        assert self.plan.job is not None
        return self.plan.job


def differences(tasks: Sequence[Task]) -> Iterator[Diagnostic]:
    """Why the tasks are no one array: the keys that make their jobs differ."""
    first, *others = tasks
    for other in others:
        told = set[str]()
        lines = zip_longest(str(first.job.content).splitlines(), str(other.job.content).splitlines(), fillvalue="")
        for number, (one, two) in enumerate(lines):
            if one != two:
                keys = other.planned.provenance.parts.get(f"job.content.{number}", ())
                key = next((each for each in keys if _differs(first, other, each)), keys[0] if keys else "cluster")
                if key not in told:
                    yield _difference(first, other, key, f"{one or 'nothing'} and {two or 'nothing'}")
                told.add(key)
        if first.plan.output_root != other.plan.output_root and "output.root" not in told:
            shown = f"{first.plan.output_root} and {other.plan.output_root}"
            yield _difference(first, other, "output.root", shown)


def same_uploads(tasks: Sequence[Task]) -> Iterator[Diagnostic]:
    """What keeps variants from running at a time: a repository of the Hub that several of them upload to."""
    key, by_repo = "checkpoint.push_to_hub.repo", dict[str, list[Task]]()
    for task in tasks:
        if (repo := task.resolved.recipe.checkpoint.push_to_hub.repo) is not None:
            by_repo.setdefault(repo, []).append(task)
    for repo, those in by_repo.items():
        if len(those) > 1:
            named = join_names([task.variant for task in those])
            hint = "give each variant a repository of its own, or submit them one by one"
            yield those[0].resolved.error(key, f"the variants {named} upload to {repo}, one over another", hint)


def _differs(first: Task, other: Task, key: str) -> bool:
    """Whether the two recipes say different things at a key."""
    one, two = (task.resolved.history.get(key, ()) for task in (first, other))
    return [each.value for each in one[-1:]] != [each.value for each in two[-1:]]


def _difference(first: Task, other: Task, key: str, shown: str) -> Diagnostic:
    what = f"{key} differs between the variants {first.variant} and {other.variant}: {shown}"
    hint = f"submit them one by one: --variant {first.variant}, --variant {other.variant}"
    return other.resolved.error(key, what, hint, why=ONE_JOB)


def array_script(job: Job, stem: str, count: int, at_most: int | None) -> str:
    """The job script of all tasks. stem: path of the run directories up to the number of the task."""
    lines = job.content.bind({Variable.RUN_DIR: _DIRECTORY}).splitlines()
    return SCHEDULERS[job.scheduler].array_script(lines, _DIRECTORY, stem, count, at_most)


def submit_array(
    tasks: Sequence[Task], at_most: int | None, texts: Callable[[Task], tuple[str, str]], environ: Mapping[str, str]
) -> list[tuple[RunLayout, Submission]]:
    """Make a run directory for each task and submit one job. Leaves nothing where it is refused.

    texts: a task's recipe, and its plan as a script. Raises RecipeError and MachineError.
    """
    first, looked = tasks[0], Looked()
    scheduler, plan = scheduler_of(first.plan), first.plan
    layouts = create_run_dirs(plan.output_root, plan.name, len(tasks))
    root = layouts[0].root
    with _submitting(scheduler, layouts) as submitted:
        script = array_script(first.job, str(root).removesuffix("-0"), len(tasks), at_most)
        request = replace(
            _request(plan, texts(first)[0], str(root), layouts[0].id, environ),
            script=script,
            tasks=len(tasks),
            at_most=at_most,
        )
        for task, layout in zip(tasks, layouts, strict=True):
            _write_record(layout, task.plan, *texts(task), looked)
            _write_files(scheduler, request, layout)
        given = submitted(request)
        made = [(each, given._replace(job=scheduler.task(given.job, place))) for place, each in enumerate(layouts)]
        for layout, submission in made:
            write_submission(layout, submission)
    return made
