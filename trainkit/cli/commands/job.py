"""`trainkit job`: what scripts and jobs call for themselves; no user types it, and no help lists it."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from trainkit.cli.options import Command, CommandGroup
from trainkit.cli.pipeline import plan_recipe, resolve_request, run_request, show_warnings
from trainkit.recipe.assignment import without_layer
from trainkit.runner.rundir.layout import RunLayout

if TYPE_CHECKING:
    from trainkit.runner.execute import Told
    from trainkit.runner.request import RunRequest
    from trainkit.schedulers.base import Place

app = typer.Typer(name="job", cls=CommandGroup, no_args_is_help=True, add_completion=False)

Recipe = Annotated[str, Argument(metavar="RECIPE", help="A resolved recipe.")]


@app.callback()
def _group() -> None:
    """What scripts and jobs call for themselves."""


@app.command("resume", cls=Command)
def resume(recipe: Recipe) -> None:
    """Print the checkpoint that a run of this recipe would go on from now, or nothing."""
    plan = plan_recipe(show_warnings(resolve_request(recipe))).plan
    if plan.resume.path is not None:
        sys.stdout.write(f"{plan.resume.path}\n")
    sys.stderr.write(f"resumes: {plan.resume.path or 'nothing'} ({plan.resume.reason})\n")


Folder = Annotated[Path, Argument(metavar="RUN_DIRECTORY", help="Of a run.")]
RunId = Annotated[
    str, Option("--run-id", help="The folder has the recipe and the plan alone; the run of this id is made by node 0.")
]


@app.command("batch", cls=Command)
def batch(
    folder: Folder, failed: Annotated[str, Option("--failed", help="Why the job script ends before the run.")] = ""
) -> None:
    """Start an attempt of a submitted run on all nodes of this job, and queue the job again where that is planned."""
    from trainkit.schedulers.jobs.job_script import JobScript, end_unbegun

    raise typer.Exit(end_unbegun(folder, failed) if failed else JobScript(folder, os.environ).run())


@app.command("signal", cls=Command)
def signal_run(folder: Folder, number: int) -> None:
    """Signal the trainkit of node 0 on this host, which tells the other nodes."""
    from trainkit.runner.rundir.layout import RunLayout
    from trainkit.schedulers.jobs.job_script import signal_node_0

    raise typer.Exit(0 if signal_node_0(RunLayout(folder), number) else 1)


@app.command("node", cls=Command)
def node(  # noqa: PLR0917 - a command's options
    folder: Folder,
    attempt: Annotated[int, Option("--attempt", min=1)] = 1,
    run_id: RunId = "",
    held: Annotated[
        bool, Option("--held", help="By standard input until the run has begun, and ends with it before that.")
    ] = False,
    number: Annotated[int | None, Option("--node", min=0, help="Of this node, where no variable says it.")] = None,
    hosts: Annotated[str, Option("--hosts", help="Of all nodes, with commas between, where no variable says it.")] = "",
) -> None:
    """Start the plan of a submitted run on this node."""
    if run_id:
        from trainkit.schedulers.jobs.node import Pod

        pod = Pod(RunLayout(folder.absolute()), run_id, os.environ)
        code = execute_node(pod.submitted, pod.layout, pod.begin(), pod.job)
        pod.end(code)
        raise typer.Exit(code)
    from trainkit.schedulers.jobs.node import own_job

    layout = RunLayout(folder.absolute())
    if held:
        from trainkit.schedulers.jobs.ssh_nodes import TiedNode

        tied = TiedNode(layout, attempt, number or 0)
        place = _told_place(f"{layout.id}.{attempt}", number, hosts)
        raise typer.Exit(tied.run(lambda: execute_node(layout, layout, attempt, "", place, tied.begun)))
    place = _told_place(f"{layout.id}.{attempt}", number, hosts) if hosts else None
    raise typer.Exit(execute_node(layout, layout, attempt, own_job(layout, os.environ), place))


def execute_node(  # noqa: PLR0917 - what `job node` is told
    submitted: RunLayout,
    layout: RunLayout,
    attempt: int,
    number: str,
    given: Place | None = None,
    told: Told = lambda *_: None,
) -> int:
    """Run this node's part to its end; the run's exit code. submitted: where recipe and plan lie; layout: of the run.

    number: of the job. given: the node's place, where no variable says it. told: called when the run begins here.
    Raises MachineError where this node cannot do what was planned.
    """
    from trainkit.cli.commands.run import refuse_unfit
    from trainkit.machine.probe import probe
    from trainkit.runner.rendezvous import node_place
    from trainkit.runner.rundir.listing import read_plan
    from trainkit.schedulers.jobs.node import as_promised, run_node

    place = node_place(read_plan(submitted), given, os.environ)

    def request() -> RunRequest:
        # The recipe as it was submitted, with every reference filled in; no layer of this machine counts.
        resolved = resolve_request(str(submitted.recipe), environ=without_layer(os.environ))
        facts = probe()
        planned = plan_recipe(resolved, facts, layout)
        job = as_promised(submitted, planned.plan)
        refuse_unfit(planned.plan, resolved.recipe, facts, place)
        made = run_request(planned, resolved, lambda _: request())  # it does not wait: it is given its GPUs
        return replace(
            made,
            node_rank=place,
            run_dir=str(layout.root),
            attempt=attempt,
            job=number,
            start_seconds=job.start_seconds,
        )

    return run_node(submitted, layout, place, request, told)


def _told_place(start: str, number: int | None, hosts: str) -> Place | None:
    """Which node this is, as the words say, and else a variable; None where nothing does."""
    from trainkit.schedulers.base import Place
    from trainkit.schedulers.registry import place_in

    names = tuple(hosts.split(","))
    if number is None and isinstance(found := place_in(os.environ), Place):
        number = found.node
    return None if number is None else Place(number, len(names), names, start)
