"""Commands for a run that is queued or running, here or on a cluster: status, logs, cancel, checkpoint, attach."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from trainkit.cli.commands.runs import figures, find_run, find_runs, headline, standings_table
from trainkit.cli.diagnostics import write_text
from trainkit.cli.options import Json, Root, Run
from trainkit.errors import MachineError, UsageError
from trainkit.text import strip_control, table

if TYPE_CHECKING:
    from trainkit.recipe.schema.cluster import Cluster
    from trainkit.runner.rundir.layout import RunLayout
    from trainkit.schedulers.jobs.standing import Standing

WATCH_SECONDS = 2.0
_BRIEF = ("Step", "Loss", "Evaluation", "Time left")  # of a change, in one line


def status(
    run: Run = None,
    root: Root = "runs",
    as_json: Json = False,
    watch: Annotated[bool, Option("--watch", help="Show every change, until the run has ended.")] = False,
) -> None:
    """Show how a run stands: queued, running, requeued, or how it ended; its step, loss, evaluation and time left.

    For the number of an array job, show each of its runs.

    Example: trainkit status quickstart
    """
    from trainkit.runner.rundir.listing import read_run
    from trainkit.schedulers.jobs.run_state import Jobs
    from trainkit.schedulers.jobs.standing import standing_of

    runs, several = find_runs(run, root)
    shown = None
    while True:
        jobs = Jobs()
        found = [standing_of(read_run(each.layout.root), jobs) for each in runs]
        # How long ago it was written is no change, nor is the time that passes.
        known = [(replace(each.state, at=None), each.step, each.evaluation) for each in found]
        if known != shown:
            sys.stdout.write(shown_standings(found, as_json=as_json, several=several, brief=shown is not None))
            sys.stdout.flush()
        shown = known
        if not watch or all(each.state.is_over for each in found):
            return
        time.sleep(WATCH_SECONDS)


def shown_standings(found: Sequence[Standing], *, as_json: bool, several: bool, brief: bool) -> str:
    """For people, or as JSON: of an array job (several) a table or a list. brief: a line for a change."""
    if as_json:
        data = [each.as_data() for each in found]
        return json.dumps(data if several else data[0], indent=2) + "\n"
    if several:
        return standings_table(found)
    head, rows = headline(found[0]), figures(found[0])
    if brief and not found[0].state.is_over:
        known = dict(rows)
        parts = [f"{title.lower()} {known[title]}" for title in _BRIEF if title in known]
        return f"{head.rstrip()}: {', '.join(parts)}\n"
    return head + strip_control(table(rows))


def logs(  # noqa: PLR0917 - a command's options
    run: Run = None,
    root: Root = "runs",
    follow: Annotated[
        bool, Option("-f", "--follow", help="Follow the output until the run ends; the exit code is the run's.")
    ] = False,
    rank: Annotated[int | None, Option("--rank", min=0, help="Output of one global rank.")] = None,
    node: Annotated[int | None, Option("--node", min=0, help="Output of one node's launcher.")] = None,
    every: Annotated[bool, Option("--all", help="Output of all ranks, each line with its rank and host.")] = False,
    attempt: Annotated[
        int | None, Option("--attempt", min=1, help="Number of the start within the run; default: the newest.")
    ] = None,
) -> None:
    """Show the output of a run: rank 0's and trainkit's own, or that of other ranks.

    For the number of an array job, show its runs one after another.

    Example: trainkit logs quickstart --all
    """
    from trainkit.schedulers.jobs.following import Wanted, show_logs

    if sum((rank is not None, node is not None, every)) > 1:
        raise UsageError("--rank, --node and --all exclude one another", hint="give one of them")
    runs, several = find_runs(run, root)
    codes = list[int]()
    for layout in (each.layout for each in runs):
        if several:
            write_text(f"==> {layout.root} <==\n")
            sys.stdout.flush()
        codes.append(show_logs(layout, Wanted(rank, node, every, attempt), follow=follow))
    raise typer.Exit(next(filter(None, codes), 0))


def cancel(
    run: Run = None,
    root: Root = "runs",
    now: Annotated[bool, Option("--now", help="Kill it immediately, without a checkpoint.")] = False,
) -> None:
    """End a run in order, with a checkpoint, or remove its job from the queue.

    For the number of an array job, end each of its runs that is not over.

    Example: trainkit cancel quickstart
    """
    from trainkit.schedulers.jobs.following import cancel as cancel_run

    runs, _ = find_runs(run, root)
    failed = list[UsageError | MachineError]()
    for layout in (each.layout for each in reversed(runs)):  # the last tasks first: one that waits would start
        try:
            write_text(f"{cancel_run(layout, _section, now=now, environ=os.environ)}\n")
        except (UsageError, MachineError) as error:
            failed.append(error)
    for each in failed:
        if isinstance(each, MachineError) or len(failed) == len(runs):
            raise each


def checkpoint(run: Run = None, root: Root = "runs") -> None:
    """Make a running run save a checkpoint at its next step, and continue.

    Example: trainkit checkpoint quickstart
    """
    from trainkit.schedulers.jobs.following import save

    layout = find_run(run, root).layout
    write_text(f"{save(layout, _section, os.environ)}\n")


def attach(
    context: typer.Context,
    run: Run = None,
    root: Root = "runs",
    node: Annotated[int, Option("--node", min=0, help="Number of the node.")] = 0,
) -> None:
    """Run a command (given after --; default: a shell) on a node of a running job.

    Example: trainkit attach quickstart --node 1 -- nvidia-smi
    """
    from trainkit.schedulers.jobs.following import attach_command

    layout = find_run(run, root).layout
    words = tuple(context.obj) or (os.environ.get("SHELL", "sh"),)
    terminal = os.isatty(0) and os.isatty(1)
    argv, environ = attach_command(layout, node, words, _section, os.environ, terminal=terminal)
    try:
        os.execvpe(argv[0], argv, environ)  # noqa: S606  no shell
    except OSError as error:
        what = f"{argv[0]} cannot be started: {error.strerror}"
        raise MachineError(what, hint=f"is {argv[0]} on PATH here?") from error


def _section(layout: RunLayout) -> Cluster:
    """The cluster that a run's recipe names, as it was submitted."""
    from trainkit.cli.pipeline import resolve_request
    from trainkit.files import read_whole
    from trainkit.recipe.assignment import without_layer

    try:
        read_whole(layout.recipe, own=True, below=layout.root)
    except OSError as error:
        raise MachineError(f"{layout.recipe} cannot be trusted: {error.strerror}") from error
    return resolve_request(str(layout.recipe), environ=without_layer(os.environ)).recipe.cluster
