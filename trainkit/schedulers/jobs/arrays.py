"""One array job for several plans: a task of Slurm for each, with a run directory of its own."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from trainkit.errors import Diagnostic, RecipeError
from trainkit.launch_plan.model import Job, Plan, Planned, Variable, bind_words
from trainkit.recipe.resolved import Resolved
from trainkit.runner.rundir.code_state import Looked
from trainkit.runner.rundir.create import create_run_dirs
from trainkit.runner.rundir.layout import RunLayout
from trainkit.schedulers import slurm
from trainkit.schedulers.base import NoAnswerError, RefusedError
from trainkit.schedulers.client import answer_or
from trainkit.schedulers.jobs.records import Submission, write_submission
from trainkit.schedulers.jobs.submitting import check_folder, give_in, write_record, write_script
from trainkit.text import listed

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
            named = listed([task.variant for task in those])
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
    check_folder(stem)
    limit = f"%{at_most}" if at_most else ""
    first, *lines = job.content.bind({Variable.RUN_DIR: _DIRECTORY}).splitlines()
    quoted = shlex.quote(stem)
    made = [first, f"#SBATCH --array=0-{count - 1}{limit}"]
    for line in lines:
        of_task = f"{quoted}-%a" if line.startswith("#SBATCH") else f"{quoted}-$SLURM_ARRAY_TASK_ID"
        made.append(line.replace(_DIRECTORY, of_task))
    return "".join(f"{line}\n" for line in made)


def submit_array(
    tasks: Sequence[Task], at_most: int | None, texts: Callable[[Task], tuple[str, str]], environ: Mapping[str, str]
) -> list[tuple[RunLayout, Submission]]:
    """Make a run directory for each task and give in one job. Leaves nothing where it is refused.

    texts: a task's recipe, and its plan as a script. Raises RecipeError and MachineError.
    """
    first, given = tasks[0], None
    looked: Looked = {}
    layouts = create_run_dirs(first.plan.output_root, first.plan.name, len(tasks))
    try:
        stem = str(layouts[0].root).removesuffix("-0")
        script = array_script(first.job, stem, len(tasks), at_most)
        argv = bind_words(first.job.submit, {Variable.RUN_DIR: str(layouts[0].root)})
        for task, layout in zip(tasks, layouts, strict=True):
            write_record(layout, task.plan, *texts(task), looked)
            write_script(layout, task.job, script)
        given = give_in(argv, layouts[0], script, environ)
        made = [(each, given._replace(job=f"{given.job}_{place}")) for place, each in enumerate(layouts)]
        for layout, submission in made:
            write_submission(layout, submission)
    except NoAnswerError:  # as for one run
        raise
    except BaseException as error:
        if given:  # given in, and could not be written down
            answer_or(slurm.cancel(given.job, cluster=given.cluster), None, environ)
        for layout in layouts:
            shutil.rmtree(layout.root, ignore_errors=True)
        if isinstance(error, RefusedError):
            raise RecipeError(Diagnostic("error", f"Slurm refuses the job: {error}", key="cluster")) from error
        raise
    return made
