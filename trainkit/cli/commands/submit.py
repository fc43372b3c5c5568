"""`trainkit submit`: plan a recipe for a cluster, and give the job to its scheduler."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from trainkit.cli.diagnostics import show_diagnostics, write_text
from trainkit.cli.options import Presets, Variant
from trainkit.cli.pipeline import cluster_facts, plan_recipe, resolve_line
from trainkit.errors import Diagnostic, MachineError, RecipeError, UsageError

if TYPE_CHECKING:
    from trainkit.launch_plan.model import Plan, Planned
    from trainkit.recipe.resolved import Resolved
    from trainkit.runner.rundir.layout import RunLayout
    from trainkit.schedulers.jobs.records import Submission
    from trainkit.schedulers.jobs.submitting import Task

NO_CLUSTER = "the recipe names no cluster to submit to"


def submit(  # noqa: PLR0917 - a command's options
    context: typer.Context,
    presets: Presets = None,
    variant: Variant = None,
    at_most: Annotated[
        int | None, Option("--at-most", min=1, help="With --variant all: how many of the runs may run at a time.")
    ] = None,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Show the job, and the scheduler's answer, without submitting it.")
    ] = False,
    wait: Annotated[bool, Option("--wait", help="Wait for the end; the exit code is the run's.")] = False,
    follow: Annotated[bool, Option("--follow", help="Like --wait, and show the run's output.")] = False,
) -> None:
    """Submit RECIPE as a job to the scheduler of its `cluster`. Prints the run directory and the job's number.

    The job is first dry-run with the scheduler; an option that it refuses is reported at its line of the recipe.
    Through ssh it returns when the run has begun on all machines.

    Example: trainkit submit train.yaml --with clusters/slurm

    Example: trainkit submit train.yaml cluster.partition=gpu --dry-run

    Example: trainkit submit train.yaml --variant all --at-most 2
    """
    if variant == ALL:
        if follow:
            raise UsageError("--follow shows one run, and --variant all submits several", hint="trainkit logs RUN -f")
        submit_all(context, presets, at_most, dry_run=dry_run, wait=wait)
        return
    if at_most is not None:
        raise UsageError("--at-most requires --variant all", hint="add --variant all")
    resolved = resolve_line(context, presets, variant)
    planned = planned_job(resolved)
    refuse_or_say(planned.plan, resolved, show=dry_run)
    if dry_run:
        return
    layout = give_in(planned.plan, resolved)
    if wait or follow:
        from trainkit.schedulers.jobs.following import wait_for

        raise typer.Exit(wait_for(layout, show=follow))


def planned_job(resolved: Resolved) -> Planned:
    """The plan for a cluster; its warnings are shown. Raises UsageError and MachineError where there is none."""
    if resolved.recipe.cluster.kind == "none":
        raise UsageError(NO_CLUSTER, hint="add --with clusters/slurm, or set cluster.kind; `trainkit run` runs it here")
    planned = plan_recipe(resolved, cluster_facts(resolved))
    if planned.plan.blockers:
        hint = "" if getattr(resolved.recipe.cluster, "machine", None) else MACHINE
        found = [Diagnostic("error", each.what, hint=hint or each.hint) for each in planned.plan.blockers]
        raise MachineError(found)
    show_diagnostics(
        Diagnostic("warning", n.what, hint=n.hint) for n in planned.plan.notices if n.severity == "warning"
    )
    return planned


def submit_all(context: typer.Context, presets: Presets, at_most: int | None, *, dry_run: bool, wait: bool) -> None:
    """Submit each variant of a recipe as a task of one array job."""
    from trainkit.schedulers.jobs.submitting import Task, differences, same_uploads, without_arrays

    base = resolve_line(context, presets, None)
    if ALL in base.variants or not base.variants:
        what = f"a variant is named {ALL}" if base.variants else "the recipe has no variants"
        raise UsageError(f"--variant {ALL} submits every variant, and {what}", hint="see `variants` in docs/recipes.md")
    tasks = []
    for name in base.variants:
        resolved = resolve_line(context, presets, name)
        tasks.append(Task(name, resolved, planned_job(resolved)))
        if what := without_arrays(tasks[-1].plan, len(base.variants)):
            raise UsageError(what, hint=f"submit them one by one: --variant {name}")
    if found := [*differences(tasks), *same_uploads(tasks)]:
        raise RecipeError(found)
    made = submit_tasks(tasks, at_most, "variant", dry_run=dry_run)
    if wait:
        from trainkit.schedulers.jobs.following import wait_for

        codes = [wait_for(layout, show=False) for layout, _ in made]
        raise typer.Exit(next((code for code in codes if code), 0))


def submit_tasks(
    tasks: Sequence[Task], at_most: int | None, kind: str, *, dry_run: bool
) -> list[tuple[RunLayout, Submission]]:
    """Submit tasks as one array job, and say what was submitted. kind: what the tasks are.

    dry_run: show the job and the plan of each task, and submit nothing.
    """
    from trainkit.schedulers.jobs.submitting import array_script, signals_blocked, submit_array

    first = tasks[0]
    script = array_script(first.job, SHOWN, len(tasks), at_most)
    refuse_or_say(first.plan, first.resolved, show=dry_run, script=script)
    if dry_run:
        from trainkit.launch_plan.render import table

        for number, task in enumerate(tasks):
            write_text(f"\ntask {number}: {kind} {task.variant}\n{table.render(task.plan)}")
        return []
    with signals_blocked(), at_its_line(first.resolved):
        made = submit_array(tasks, at_most, lambda task: texts(task.plan, task.resolved), os.environ)
        for task, (layout, submission) in zip(tasks, made, strict=True):
            write_text(f"{task.variant}: run directory: {layout.root}\n{task.variant}: job {submission.job}\n")
        sys.stdout.flush()
    return made


ALL, SHOWN = "all", "RUN_DIRECTORY"
MACHINE = (
    "set cluster.machine to what the nodes have: a profile (`trainkit ls machines`), or the facts that "
    "`trainkit env facts > FACTS.json` writes on a node"
)


def refuse_or_say(plan: Plan, resolved: Resolved, *, show: bool, script: str | None = None) -> None:
    """Ask the scheduler; RecipeError with everything that it refuses. show: the job as well.

    script: the job's, where it is not the plan's own.
    """
    from trainkit.schedulers.jobs.submitting import dry_run, scheduler_of

    if scheduler_of(plan).starts_nodes:
        if show:
            show_hosts(plan, resolved)
        return
    with tempfile.TemporaryDirectory(prefix="trainkit-") as folder:
        content = None if script is None else script.replace(SHOWN, f"{folder}/run")
        found = dry_run(plan, resolved, os.environ, folder, content)
    show_diagnostics(found.remarks)
    if found.refused:
        raise RecipeError(found.refused)
    if show:
        write_text(script or f"{plan.job and plan.job.content}")
    sys.stderr.write(f"{found.said}\n" if found.said else "")


def show_hosts(plan: Plan, resolved: Resolved) -> None:
    """What would be run on the hosts of ssh, and what they answer. No program that the recipe names is run for it."""
    from trainkit.schedulers.jobs.ssh_nodes import addresses, commands, versions
    from trainkit.schedulers.ssh import may_run_programs, section_of

    option = may_run_programs(section_of(resolved.recipe).options)
    if not option:
        addresses(plan, resolved, os.environ)
    for line in commands(plan):
        write_text(f"{line}\n")
    if option:
        what = f"no host is contacted: cluster.options has {option}, by which ssh may run a program"
        hint = "put it into ~/.ssh/config, which is read as usual; without --dry-run the run uses it"
        show_diagnostics(
            [Diagnostic("warning", what, "cluster.options", resolved.origin("cluster.options"), hint=hint)]
        )
        return
    for line in versions(plan, os.environ):
        write_text(f"{line}\n")


def start_on_hosts(plan: Plan, resolved: Resolved) -> RunLayout:
    """Start the run on its hosts, and say where it is; the run directory. Exit, with its code, if it has not begun."""
    from trainkit.cli.detach import how_to_follow
    from trainkit.schedulers.jobs.ssh_nodes import addresses, start

    def say(layout: RunLayout) -> None:
        write_text(how_to_follow(str(layout.root), layout.short_id))
        sys.stdout.flush()

    where = addresses(plan, resolved, os.environ)
    layout, code = start(plan, texts(plan, resolved), os.environ, where, say)
    if code:
        raise typer.Exit(code)
    return layout


def give_in(plan: Plan, resolved: Resolved) -> RunLayout:
    """Submit, and say what was submitted; the run directory."""
    from trainkit.schedulers.jobs.submitting import scheduler_of, signals_blocked
    from trainkit.schedulers.jobs.submitting import submit as submit_plan

    scheduler = scheduler_of(plan)
    if scheduler.starts_nodes:
        return start_on_hosts(plan, resolved)
    with signals_blocked(), at_its_line(resolved):
        layout, submission = submit_plan(plan, *texts(plan, resolved), os.environ)
        write_text(f"run directory: {layout.root}\njob {submission.job}\n")
        sys.stdout.flush()
    if not scheduler.shares_folder:
        volume = f"{plan.output_root}/{plan.name}/{layout.id}"
        sys.stderr.write(f"the run itself is in {volume} of its pods; this machine keeps the job's record\n")
    return layout


@contextlib.contextmanager
def at_its_line(resolved: Resolved) -> Iterator[None]:
    """Where a submission is refused, the line of the recipe that the refusal is about."""
    try:
        yield
    except RecipeError as error:
        raise RecipeError(replace(each, origin=resolved.origin(each.key)) for each in error.diagnostics) from error


def texts(plan: Plan, resolved: Resolved) -> tuple[str, str]:
    """The recipe with every reference filled in, and the plan as a shell script."""
    from trainkit.launch_plan.render import shell
    from trainkit.recipe.yaml_writer import resolved_yaml

    text = resolved_yaml(resolved)
    return text, shell.render(plan, text)
