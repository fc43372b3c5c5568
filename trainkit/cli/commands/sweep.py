"""`trainkit sweep`: a run for each point of a space of settings, some at once; the best as a recipe."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Option

from trainkit.cli.diagnostics import one_line, show_diagnostics, write_text
from trainkit.cli.file_system import ReadOnce
from trainkit.cli.line import own_program, split_line
from trainkit.cli.options import Json, Presets, Variant
from trainkit.cli.pipeline import no_recipe, plan_recipe, resolve_request
from trainkit.errors import Diagnostic, ExitCode, MachineError, UsageError
from trainkit.text import pluralize

if TYPE_CHECKING:
    from trainkit.launch_plan.model import Planned
    from trainkit.recipe.resolved import Resolved
    from trainkit.sweeps.preparing import Sweep, SweepOptions
    from trainkit.sweeps.results import SweepResult
    from trainkit.sweeps.study import Trial

SamplerName = Literal["grid", "random", "tpe"]


def sweep(  # noqa: PLR0917 - a command's options
    context: typer.Context,
    sampler: Annotated[SamplerName, Option("--sampler", help="How values are chosen.")] = "grid",
    trials: Annotated[int | None, Option("--trials", min=1, help="With random and tpe: how many runs.")] = None,
    early_stop: Annotated[bool, Option("--early-stop", help="End a run that is worse than half.")] = False,
    metric: Annotated[str | None, Option("--metric", metavar="NAME", help="What decides; as in `runs list`.")] = None,
    seed: Annotated[int, Option("--seed", min=0, help="Of the sampler.")] = 0,
    jobs: Annotated[str, Option("--jobs", metavar="N|auto", help="Runs at once, on GPUs of their own.")] = "1",
    presets: Presets = None,
    variant: Variant = None,
    wait: Annotated[bool, Option("--wait", help="Wait for GPUs that are in use.")] = False,
    output: Annotated[Path | None, Option("--output", metavar="FOLDER", help="The sweep's folder.")] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Show the trials; start nothing.")] = False,
    show: Annotated[bool, Option("--show", help="Show how far a sweep is.")] = False,
    submit: Annotated[bool, Option("--submit", help="Submit the trials as an array job.")] = False,
    as_json: Json = False,
) -> None:
    """Run RECIPE once for each combination of values: lists a,b,c and range(n); compare the runs by their evaluation.

    The same line again goes on with a sweep that was interrupted: what has ended is kept. Writes
    best.yaml, the recipe of the best trial, and report.html. Exit code 1: a trial failed.

    Example: trainkit sweep train.yaml optimizer.lr=1e-4,3e-4 'train.seed=range(3)'

    Example: trainkit sweep train.yaml 'optimizer.lr=log(1e-5,1e-3)' --sampler tpe --trials 20 --early-stop
    """
    from trainkit.sweeps.preparing import SweepOptions, prepare
    from trainkit.sweeps.results import FILE

    words, overrides = split_line(context.args, most=1, what="one recipe, or the folder of a sweep")
    if own_program(context):
        hint = "write a recipe with `trainkit import … --output recipe.yaml`, and sweep it"
        raise UsageError("sweep varies the settings of a recipe, and a program has none", hint=hint)
    if not words:
        raise no_recipe("sweep RECIPE KEY=A,B,C")
    if Path(words[0], FILE).is_file():
        of_folder(Path(words[0]), overrides, show=show, as_json=as_json)
        return
    if wait:
        overrides = [*overrides, "devices.when_busy=wait"]
    options = SweepOptions(sampler, trials, seed, early_stop, metric)
    disk = ReadOnce()  # a recipe that is edited meanwhile would be another one for the trials that are left

    def resolve(overrides: Sequence[str]) -> Resolved:
        return resolve_request(words[0], overrides, presets, context.obj, variant, disk=disk)

    plan: Callable[[Resolved], Planned] = plan_recipe
    if submit:
        from trainkit.cli.commands.submit import planned_job as plan
    line = line_of(words[0], overrides, options, presets or (), variant, context.obj, output)
    made = prepare(overrides, options, resolve, plan, line, output, submit=submit)
    show_diagnostics(made.warnings)
    if dry_run or show:
        show_prepared(made, as_json=as_json, standing=show)
        return
    if submit:
        submit_prepared(made, jobs)
        return
    from trainkit.runner.report.console import Terminal
    from trainkit.sweeps.running import run_sweep

    console = Terminal(os.environ)
    console.say(f"sweep of {pluralize(made.definition.trials, 'trial')} in {made.folder}")
    found = run_sweep(made, jobs, console)
    write_page(found)
    tell(found, as_json=as_json)
    raise typer.Exit(exit_code(found))


def submit_prepared(made: Sweep, jobs: str) -> None:
    """Submit the trials that are left as one array job, and show what is known of the others. jobs: at a time."""
    from trainkit.cli.commands.submit import submit_tasks
    from trainkit.sweeps.submitting import submit_trials

    if not (jobs.isdecimal() and int(jobs)):
        raise UsageError(
            f"--jobs {jobs} is for the GPUs of this machine", hint="with --submit: how many tasks at a time"
        )
    at_most = int(jobs) if jobs != "1" else None
    found = submit_trials(made, lambda tasks: submit_tasks(tasks, at_most, "trial", dry_run=False))
    write_page(found)
    tell(found, as_json=False)


def line_of(  # noqa: PLR0917
    recipe: str,
    overrides: Sequence[str],
    options: SweepOptions,
    presets: Sequence[str],
    variant: str | None,
    program: Sequence[str],
    output: Path | None,
) -> tuple[str, ...]:
    """The words behind `trainkit sweep` that mean the same."""
    words = [recipe, *overrides]
    words += ["--sampler", options.sampler] if options.sampler != "grid" else []
    words += ["--trials", str(options.trials)] if options.trials else []
    words += ["--seed", str(options.seed)] if options.seed else []
    words += ["--early-stop"] if options.early_stop else []
    words += ["--metric", options.metric] if options.metric else []
    words += [word for name in presets for word in ("--with", name)]
    words += ["--variant", variant] if variant else []
    words += ["--output", str(output)] if output else []
    return (*words, *(["--", *program] if program else []))


def show_prepared(made: Sweep, *, as_json: bool, standing: bool) -> None:
    """What a line would run, or how far its sweep is. standing: the latter."""
    from trainkit.sweeps.results import FILE, SweepResult
    from trainkit.sweeps.space import named, overrides_of
    from trainkit.sweeps.study import read_trials

    folder, definition = made.folder, made.definition
    started = (folder / FILE).exists()
    if standing:
        if not started:
            raise MachineError(f"this sweep has not begun: there is no {folder}", hint="the same line without --show")
        tell(live(SweepResult(folder, definition, read_trials(folder))), as_json=as_json)
        return
    if as_json:
        data = {"folder": str(folder), "metric": definition.metric, "trials": definition.trials}
        data["overrides"] = [overrides_of(point) for point in made.points]
        sys.stdout.write(json.dumps(data, indent=2) + "\n")
        return
    better = "lowest" if definition.lower_is_better else "highest"
    early = ", early stopping below the median" if definition.early_stop else ""
    what = f"{pluralize(definition.trials, 'trial')} of {definition.recipe} by {definition.sampler}{early}"
    lines = [
        f"{what}; the best has the {better} {definition.metric}",
        *(f"  {axis}" for axis in made.space.axes),
        f"folder: {folder}{' (begun: it goes on)' if started else ''}",
        *(f"trial {number}: {named(point)}" for number, point in enumerate(made.points)),
    ]
    drawn = [] if made.points else ["the points are drawn one after another, by the results of those before"]
    write_text("".join(f"{one_line(line)}\n" for line in (*lines, *drawn)))


def of_folder(folder: Path, overrides: Sequence[str], *, show: bool, as_json: bool) -> None:
    """Show the sweep of a folder. UsageError, with the line that goes on, where that is not what is asked."""
    from trainkit.sweeps.results import SweepResult, read_definition
    from trainkit.sweeps.study import read_trials

    definition = read_definition(folder)
    if not show or overrides:
        here = "" if definition.cwd == str(Path.cwd()) else f"cd {shlex.quote(definition.cwd)} && "
        hint = f"see it with --show; to go on: {here}trainkit sweep {shlex.join(definition.line)}"
        raise UsageError(f"{folder} is the folder of a sweep", hint=hint)
    tell(live(SweepResult(folder, definition, read_trials(folder))), as_json=as_json)


def live(found: SweepResult) -> SweepResult:
    """The same with the steps that its running trials have reached."""
    from trainkit.runner.rundir.listing import read_run
    from trainkit.schedulers.jobs.standing import standing_of

    def at(trial: Trial) -> Trial:
        step = standing_of(read_run(Path(trial.run))).step if trial.state == "running" and trial.run else None
        return trial if step is None else replace(trial, step=step)

    return replace(found, trials=[at(each) for each in found.trials])


def tell(found: SweepResult, *, as_json: bool) -> None:
    """Show the table, the best trial, and what to do with it."""
    from trainkit.sweeps.results import as_data, in_words

    if as_json:
        sys.stdout.write(json.dumps(as_data(found), indent=2) + "\n")
        return
    write_text(in_words(found, shutil.get_terminal_size((0, 0)).columns or None))
    if found.best:
        write_text(f"next: trainkit run {shlex.quote(str(found.best_recipe))}\n")
    if found.refusal:
        hint = "set eval.best_metric, or --metric, to one that it logs"
        show_diagnostics([Diagnostic("error", found.refusal, hint=hint)])
    elif not found.complete and found.stopped_by is not None:
        line = shlex.join(found.definition.line)
        sys.stderr.write(one_line(f"interrupted; the same line goes on: trainkit sweep {line}") + "\n")


def exit_code(found: SweepResult) -> int:
    """Of the command: 128 and the signal that ended it; 1 where a trial failed."""
    if found.stopped_by is not None:
        return 128 + found.stopped_by
    return int(ExitCode.OK if found.complete else ExitCode.FAILED)


def write_page(found: SweepResult) -> None:
    """Write report.html: the table, and the runs of the best trials beside one another."""
    from trainkit.cli.commands.report import FILE, write_report
    from trainkit.html_report.page import MOST
    from trainkit.runner.rundir.listing import is_run, read_run
    from trainkit.sweeps.results import ranked, table
    from trainkit.sweeps.space import named

    trials = ranked(found.trials, lower=found.definition.lower_is_better)
    shown = [each for each in trials if each.run and is_run(Path(each.run)) and not each.why][:MOST]
    if shown:
        labels = [f"{each.number}: {named(each.point)}" for each in shown]
        text = table(found.definition, found.trials, {})
        runs = [read_run(Path(each.run)) for each in shown]
        write_report(runs, found.folder / FILE, bench=(f"Sweep of {found.definition.recipe}", labels, text), force=True)
