"""`trainkit runs`: the run directories of this project: list, show, prune."""

from __future__ import annotations

import contextlib
import json
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainkit.cli.options import Command, CommandGroup, Json, Root
from trainkit.errors import UsageError
from trainkit.text import table

if TYPE_CHECKING:
    from trainkit.runner.rundir.listing import RunInfo

app = typer.Typer(
    name="runs",
    cls=CommandGroup,
    help="List, show and prune run directories.",
    no_args_is_help=True,
    add_completion=False,
)

Name = Annotated[str | None, typer.Argument(metavar="[NAME]", help="Only runs of this name.")]


@app.command("list", cls=Command)
def list_runs(name: Name = None, root: Root = "runs", as_json: Json = False) -> None:
    """List runs, oldest first: state, exit code, steps, loss, folder.

    Example: trainkit runs list quickstart
    """
    from trainkit.runner.rundir import listing

    found = listing.list_runs(root, name)
    if as_json:
        sys.stdout.write(json.dumps([as_data(run) for run in found], indent=2) + "\n")
        return
    if not found:
        sys.stdout.write(f"no runs in {root}\n")
        return
    rows = [("STARTED", "STATE", "EXIT", "STEPS", "LOSS", "RUN")]
    for run in found:
        started = f"{datetime.fromtimestamp(run.started):%Y-%m-%d %H:%M:%S}" if run.started else "-"
        loss = run.summary.get("final_loss")
        shown = f"{loss:.4f}" if isinstance(loss, float) else "-"
        rows.append(
            (started, run.state, ended_with(run), str(run.summary.get("steps") or "-"), shown, str(run.layout.root))
        )
    sys.stdout.write(table(rows))


@app.command("show", cls=Command)
def show(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory, a run's id, or a name: its newest run.")],
    root: Root = "runs",
    as_json: Json = False,
) -> None:
    """Show how a run ended: who and why, its summary, its logs.

    Example: trainkit runs show quickstart
    """
    from trainkit.runner.report.summary_table import render_summary

    info = find_run(run, root)
    if as_json:
        sys.stdout.write(json.dumps(as_data(info), indent=2) + "\n")
        return
    why = f": {info.why}" if info.why else "" if info.exit_code == 0 else ": no reason recorded"
    sys.stdout.write(f"{info.state}, exit code {ended_with(info)}{why}\n")
    if info.summary:
        sys.stdout.write(render_summary(info.summary, info.layout.root) + "\n")


@app.command("prune", cls=Command)
def prune(
    name: Name = None,
    root: Root = "runs",
    keep: Annotated[int, typer.Option("--keep", min=0, help="How many of the newest runs of each name stay.")] = 5,
    yes: Annotated[bool, typer.Option("--yes", help="Remove without asking.")] = False,
) -> None:
    """Remove old run directories; a run that is still running is never removed.

    Example: trainkit runs prune --keep 3
    """
    from trainkit.runner.rundir import listing

    chosen = listing.prunable(listing.list_runs(root, name), keep)
    if not chosen:
        sys.stdout.write("nothing to remove\n")
        return
    sys.stdout.writelines(f"{run.layout.root}\n" for run in chosen)
    if not yes:
        what = "this run" if len(chosen) == 1 else f"these {len(chosen)} runs"
        try:
            yes = typer.confirm(f"remove {what} with all checkpoints?")
        except typer.Abort as abort:
            sys.stdout.write("\n")
            raise UsageError("nothing is removed without an answer", hint="--yes removes without asking") from abort
    if not yes:
        sys.stdout.write("nothing removed\n")
        return
    removed = sum(listing.remove(run) for run in chosen)
    sys.stdout.write(f"removed {removed} of {len(chosen)} runs\n")


def find_run(word: str, root: str) -> RunInfo:
    """The run that a word means: a run directory, the id of a run under the root, or a name for its newest run."""
    from trainkit.runner.rundir import listing

    with contextlib.suppress(OSError, ValueError):
        if listing.is_run(Path(word)):
            return listing.read_run(Path(word))
    named = [run for run in listing.list_runs(root) if word in (run.layout.id, run.layout.name)]
    if not named:
        what = f"{word} is neither a run directory nor a run in {root}"
        raise UsageError(what, hint="`trainkit runs list` shows them")
    return named[-1]


def ended_with(run: RunInfo) -> str:
    """The exit code, for people."""
    return "-" if run.exit_code is None else str(run.exit_code)


def as_data(run: RunInfo) -> dict[str, Any]:
    """A run for scripts."""
    return {
        "path": str(run.layout.root),
        "name": run.layout.name,
        "state": run.state,
        "exit_code": run.exit_code,
        "why": run.why,
        "started": run.started,
        "ended": run.ended,
        "summary": dict(run.summary),
    }
