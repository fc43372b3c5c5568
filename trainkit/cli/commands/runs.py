"""`trainkit runs`: run directories listed, shown and pruned."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from trainkit.cli.diagnostics import one_line, write_text
from trainkit.cli.options import Command, CommandGroup, Json, Root, Run
from trainkit.errors import UsageError
from trainkit.recipe.layers.secrets import mask_words
from trainkit.text import counted, listed, table

if TYPE_CHECKING:
    from trainkit.runner.rundir.listing import RunInfo

_LAST = 10  # lines of a log
_WIDEST = 32  # characters of a program's name in a list
app = typer.Typer(
    name="runs",
    cls=CommandGroup,
    help="List, show and prune run directories.",
    no_args_is_help=True,
    add_completion=False,
)

Name = Annotated[str | None, Argument(metavar="[NAME]", help="Only runs of this name.")]


@app.command("list", cls=Command)
def list_runs(name: Name = None, root: Root = "runs", as_json: Json = False) -> None:
    """List runs, oldest first: state, exit code, steps, loss, program, strategy, launcher, folder.

    Example: trainkit runs list quickstart
    """
    from trainkit.runner.rundir import listing

    found = listing.list_runs(root, name)
    if as_json:
        sys.stdout.write(json.dumps([as_data(run) for run in found], indent=2) + "\n")
        return
    if not found:
        write_text(f"no runs in {root}\n")
        return
    rows: list[tuple[str, ...]] = [
        ("STARTED", "STATE", "EXIT", "STEPS", "LOSS", "PROGRAM", "STRATEGY", "LAUNCHER", "RUN")
    ]
    for run in found:
        started = f"{datetime.fromtimestamp(run.started):%Y-%m-%d %H:%M:%S}" if run.started else "-"
        loss, steps = run.summary.get("final_loss"), str(run.summary.get("steps") or "-")
        shown, code = f"{loss:.4f}" if isinstance(loss, float) else "-", "-" if run.exit_code is None else run.exit_code
        launched = (run.program, run.launched.get("strategy", ""), run.launched.get("launcher", ""))
        names = (one_line(each)[:_WIDEST] or "-" for each in launched)
        rows.append((started, run.state, str(code), steps, shown, *names, str(run.layout.root)))
    write_text(table(rows))


@app.command("show", cls=Command)
def show(
    run: Run = None,
    root: Root = "runs",
    as_json: Json = False,
) -> None:
    """Show how a run ended: who and why, its program and summary, the last lines of its logs.

    Example: trainkit runs show quickstart
    """
    info = find_run(run, root)
    if as_json:
        sys.stdout.write(json.dumps(as_data(info), indent=2) + "\n")
        return
    why = f": {info.why}" if info.why else "" if info.exit_code == 0 else ": no reason recorded"
    write_text(f"{info.state}, exit code {'-' if info.exit_code is None else info.exit_code}{why}\n")
    kind = ", ".join(filter(None, (info.launched.get(name) for name in ("program", "strategy", "launcher"))))
    own = info.argv if info.launched.get("program") != "builtin" else ()
    program = shlex.join(mask_words(own)) or info.program
    write_text(one_line(f"program: {program or '-'}" + (f" ({kind})" if kind else "")) + "\n")
    if info.summary:
        write_text(account_of(info) + "\n")
    write_text("".join(f"{line}\n" for line in ends_of_logs(info)))


def account_of(info: RunInfo) -> str:
    """The summary as a table; of a damaged one, or somebody else's invention, that it is none."""
    from trainkit.runner.report.summary import render_summary

    try:
        return render_summary(info.summary, info.layout.root)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        return f"{info.layout.summary} is damaged ({type(error).__name__}: {one_line(str(error))})"


def ends_of_logs(info: RunInfo) -> Iterator[str]:
    """The last lines of the rank that failed, else of rank 0, and where its logs are; of a launcher where none ran."""
    from trainkit.runner.report.progress import last_lines

    for attempt in info.layout.attempts[-1:]:
        rank = info.rank or 0
        logs = [attempt.log(rank, stream) for stream in ("out", "err")]
        logs = [log for log in logs if log.exists()] or [each for each in (attempt.launcher_log,) if each.exists()]
        for log in logs:
            lines = last_lines(log, _LAST)
            yield f"{'last lines of' if lines else 'nothing in'} {log}" + (":" if lines else "")
            yield from (f"  | {one_line(line.expandtabs())}" for line in lines)


@app.command("prune", cls=Command)
def prune(
    name: Name = None,
    root: Root = "runs",
    keep: Annotated[int, Option("--keep", min=0, help="How many of the newest runs of each name stay.")] = 5,
    yes: Annotated[bool, Option("--yes", help="Remove without asking.")] = False,
) -> None:
    """Remove old run directories; a run that is still running is never removed.

    Example: trainkit runs prune --keep 3
    """
    from trainkit.runner.rundir import listing

    chosen = listing.prunable(listing.list_runs(root, name), keep)
    if not chosen:
        write_text("nothing to remove\n")
        return
    write_text("".join(f"{run.layout.root}\n" for run in chosen))
    if not yes:
        what = "this run" if len(chosen) == 1 else f"these {len(chosen)} runs"
        try:
            yes = typer.confirm(f"remove {what} with all checkpoints?")
        except typer.Abort as abort:  # Ctrl-D leaves the cursor behind the question
            sys.stdout.write("\n")
            raise UsageError("nothing is removed without an answer", hint="--yes removes without asking") from abort
    if not yes:
        write_text("nothing removed\n")
        return
    removed = sum(listing.remove(run) for run in chosen)
    write_text(f"removed {removed} of {len(chosen)} runs\n")


def find_run(word: str | None, root: str) -> RunInfo:
    """The run that a word means: a run directory, the id of a run under the root, or a name for its newest run.

    Without a word the newest of all.
    """
    from trainkit.runner.rundir import listing

    if word is None:
        if not (runs := listing.list_runs(root)):
            raise UsageError(f"no runs in {root}", hint="name the folder of the runs with --root, or a run directory")
        return runs[-1]
    # A path first: a name may be that of a folder here. ValueError is a NUL byte in the word.
    with contextlib.suppress(OSError, ValueError):
        if listing.is_run(Path(word)):
            return listing.read_run(Path(word))
    runs = listing.list_runs(root)
    named = [run for run in runs if word in (run.layout.id, run.layout.name, job_of(run))]
    if not named:
        if tasks := tasks_of(word, runs):
            several = listed([job_of(run) for run in tasks])
            raise UsageError(f"{word} is an array job of {counted(len(tasks), 'run')}", hint=f"name one: {several}")
        what = f"{word} is neither a run directory nor a run in {root}"
        raise UsageError(what, hint="`trainkit runs list` shows them")
    return named[-1]


def tasks_of(word: str | None, runs: Sequence[RunInfo]) -> list[RunInfo]:
    """The runs of an array job, of which a word is the number; none where it is not one's."""
    found = [(job_of(run).partition("_"), run) for run in runs] if word else []
    return [run for (job, _, task), run in sorted(found, key=lambda each: each[0][2].zfill(9)) if task and job == word]


def job_of(run: RunInfo) -> str:
    """The number of its job; empty for a run that was not submitted."""
    from trainkit.jobs.records import read_submission

    submission = read_submission(run.layout.root)
    return submission.job if submission else ""


def as_data(run: RunInfo) -> dict[str, Any]:
    """A run for scripts."""
    return {
        "path": str(run.layout.root),
        "name": run.layout.name,
        **{name: getattr(run, name) for name in ("state", "exit_code", "why", "started", "ended")},
        "launched": dict(run.launched),
        "argv": mask_words(run.argv),
        "summary": dict(run.summary),
    }
