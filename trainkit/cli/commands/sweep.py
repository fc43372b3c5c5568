"""`trainkit sweep`: a run for each point of a space of settings, some at once; the best as a recipe."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Option

from trainkit.cli.diagnostics import one_line, show_diagnostics, write_text
from trainkit.cli.line import own_program, split_line
from trainkit.cli.options import Json, Presets, Variant
from trainkit.cli.pipeline import no_recipe, plan_recipe, resolve_request
from trainkit.errors import Diagnostic, ExitCode, MachineError, RecipeError, TrainkitError, UsageError
from trainkit.text import format_measure, pluralize

if TYPE_CHECKING:
    from trainkit.launch_plan.model import Planned
    from trainkit.recipe.resolved import Resolved
    from trainkit.recipe.schema import Recipe
    from trainkit.runner.report.console import Terminal
    from trainkit.sweeps.results import Definition, SweepResult
    from trainkit.sweeps.running import Sweep, TrialRecipe
    from trainkit.sweeps.space import Point, Space
    from trainkit.sweeps.study import Study, Trial

SamplerName = Literal["grid", "random", "tpe"]
PLANNED = 32  # points of a sweep that are all planned before the first starts; of more, each value once
AFRESH, NO_UPLOAD = "checkpoint.resume=never", "checkpoint.push_to_hub!={}"
IN_TURN = "it decides by the results of the trials before, and the tasks of an array are submitted at once"

Sampler = Annotated[
    SamplerName,
    Option(
        "--sampler",
        help="How values are chosen.",
    ),
]


def sweep(  # noqa: PLR0917 - a command's options
    context: typer.Context,
    sampler: Sampler = "grid",
    trials: Annotated[int | None, Option("--trials", min=1, help="With random and tpe: how many runs.")] = None,
    early_stop: Annotated[
        bool,
        Option("--early-stop", help="End a run that is worse than half."),
    ] = False,
    metric: Annotated[str | None, Option("--metric", metavar="NAME", help="What decides; as in `runs list`.")] = None,
    seed: Annotated[int, Option("--seed", min=0, help="Of the sampler.")] = 0,
    jobs: Annotated[str, Option("--jobs", metavar="N|auto", help="Runs at once, on GPUs of their own.")] = "1",
    presets: Presets = None,
    variant: Variant = None,
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
    options = SweepOptions(sampler, trials, seed, early_stop, metric)
    made = prepare(
        words[0], overrides, options, presets or (), variant, context.obj, output, submit=submit, told=show_diagnostics
    )
    if dry_run or show:
        show_prepared(made, as_json=as_json, standing=show)
        return
    if submit:
        submit_trials(made, jobs)
        return
    from trainkit.runner.report.console import Terminal

    console = Terminal(os.environ)
    console.say(f"sweep of {pluralize(made.sweep.definition.trials, 'trial')} in {made.sweep.folder}")
    found = run_prepared(made, jobs, console)
    write_page(found)
    tell(found, as_json=as_json)
    raise typer.Exit(exit_code(found))


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """How a space is searched. trials: None for the grid. metric: None is the recipe's own."""

    sampler: SamplerName = "grid"
    trials: int | None = None
    seed: int = 0
    early_stop: bool = False
    metric: str | None = None


@dataclass(frozen=True, slots=True)
class PreparedSweep:
    """A sweep that can start. points: those known before it does, all of a grid. planned: plans of all or some points.

    resolve: the recipe of a point, with further overrides. chosen: whether the recipe names its GPUs.
    """

    sweep: Sweep
    space: Space
    points: Sequence[Point]
    planned: Sequence[Planned]
    resolve: Callable[..., Resolved]
    chosen: bool


def run_sweep_of(
    recipe: str,
    space: Mapping[str, str | Sequence[object]],
    *,
    overrides: Sequence[str] = (),
    sampler: SamplerName = "grid",
    trials: int | None = None,
    seed: int = 0,
    early_stop: bool = False,
    metric: str | None = None,
    jobs: int | Literal["auto"] = 1,
    presets: Sequence[str] = (),
    variant: str | None = None,
    folder: str | os.PathLike[str] | None = None,
    console: Terminal | None = None,
) -> SweepResult:
    """Run a sweep of a recipe to its end; the same call again goes on with one that was interrupted.

    space: values by dotted key, or the text of an override: {"optimizer.lr": [1e-4, 3e-4], "train.seed": "range(3)"}.
    overrides: as on the command line, of all trials. It writes the folder's files and the report as the command does.
    Raises RecipeError, UsageError and MachineError before anything starts. Signals are handled while it runs, so that
    it is for the main thread.
    """
    from trainkit.recipe.yaml_writer import flow
    from trainkit.runner.report.console import Terminal

    def text(key: str, values: str | Sequence[object]) -> str:
        return values if isinstance(values, str) else ",".join(flow(value, key) for value in values)

    words = [*(f"{key}={text(key, values)}" for key, values in space.items()), *overrides]
    options = SweepOptions(sampler, trials, seed, early_stop, metric)
    made = prepare(recipe, words, options, presets, variant, (), Path(folder) if folder is not None else None)
    found = run_prepared(made, str(jobs), console or Terminal(os.environ))
    write_page(found)
    return found


def prepare(  # noqa: PLR0917 - the command's options
    recipe: str,
    overrides: Sequence[str],
    options: SweepOptions,
    presets: Sequence[str],
    variant: str | None,
    program: Sequence[str],
    output: Path | None,
    *,
    submit: bool = False,
    told: Callable[[Iterator[Diagnostic]], object] = lambda _: None,
) -> PreparedSweep:
    """Validate every value and plan the trials; nothing is started or written. Raises all that is wrong.

    submit: whether they will be jobs, planned for a cluster. told: gets the warnings.
    """
    from trainkit.sweeps.results import Definition
    from trainkit.sweeps.running import Sweep
    from trainkit.sweeps.space import overrides_of, read_space
    from trainkit.sweeps.study import require_optuna

    require_optuna()
    space = read_space(overrides)
    check_options(space, options, submit=submit)

    def resolve(point: Point, *more: str) -> Resolved:
        return resolve_request(recipe, (*space.fixed, *overrides_of(point), *more), presets, program, variant)

    corners = resolved_all(resolve, [*space.corners()])
    base = corners[0]
    told(iter(dict.fromkeys(each for one in corners for each in one.warnings)))
    points = known_points(space, options)
    metric, lower = objective(base.recipe, options.metric)
    for other in corners[1:]:
        if objective(other.recipe, options.metric) != (metric, lower):
            hint = "name one that all of them evaluate: --metric loss"
            raise UsageError("the trials would be compared by different metrics", hint=hint)
    several = submitted_plan if submit else planned_here
    samples = points if 0 < len(points) <= PLANNED else [*space.corners()]
    planned = planned_all(resolve, several, samples)
    digest = digest_of(base, space, options, metric)
    folder = output or Path(base.recipe.output.root, base.recipe.name, f"sweep-{digest[:8]}")
    line = line_of(recipe, overrides, options, presets, variant, program, output)
    trials = options.trials or len(points)
    definition = Definition(
        base.recipe.name, line, str(Path.cwd()), tuple(map(str, space.axes)), options.sampler, options.seed,
        options.early_stop, metric, lower, trials, digest,
    )  # fmt: skip
    made = Sweep(folder, definition, base.recipe.program.kind, partial(trial_recipe, resolve), partial(winner, resolve))
    chosen = any(isinstance(each.recipe.devices.select, list) for each in corners)
    return PreparedSweep(made, space, points, planned, resolve, chosen)


def check_options(space: Space, options: SweepOptions, *, submit: bool) -> None:
    """Raise UsageError for options that do not go with the space, or with one another."""
    from trainkit.sweeps.space import MOST_POINTS

    grid = options.sampler == "grid"
    interval = next((axis for axis in space.axes if axis.interval), None)
    if grid and interval:
        hint = "add --sampler random or --sampler tpe, with --trials N; or list values: a,b,c"
        raise UsageError(f"{interval} has no end of values, and a grid runs all of them", hint=hint)
    if grid and options.trials is not None:
        hint = "leave --trials out; --sampler random --trials N runs some of them"
        raise UsageError("--trials is for samplers that draw, and a grid runs every combination", hint=hint)
    if grid and (space.size or 0) > MOST_POINTS:
        raise UsageError(f"the grid has {space.size} points", hint="--sampler random --trials N runs some of them")
    if not grid and options.trials is None:
        raise UsageError(f"--sampler {options.sampler} draws without an end", hint="say how many runs: --trials 20")
    in_turn = "--sampler tpe" if options.sampler == "tpe" else "--early-stop" if options.early_stop else ""
    if submit and in_turn:
        hint = "--sampler grid or random; or run the sweep itself in a job of its own (salloc, sbatch), with --jobs"
        raise UsageError(f"{in_turn} does not go with --submit: {IN_TURN}", hint=hint)


def known_points(space: Space, options: SweepOptions) -> list[Point]:
    """The points that are known before the first run: none of a sampler that learns."""
    from trainkit.sweeps.study import draw_points

    if options.sampler == "grid":
        return [*space.grid()]
    return draw_points(space, options.trials or 0, options.seed) if options.sampler == "random" else []


def objective(recipe: Recipe, asked: str | None) -> tuple[str, bool]:
    """The metric by which trials are compared, and whether its lowest value is the best: as `headline` chooses it.

    Raises UsageError where the recipe evaluates nothing, or not this.
    """
    from trainkit.metrics import LOSS, is_own, lower_is_better, metrics_of, values_of

    best = recipe.eval.best_metric
    if recipe.program.kind != "builtin":
        name = asked or best
    else:
        if not recipe.eval.every_steps:
            hint = "evaluate, for example eval.every_steps=0.1"
            raise UsageError("trials are compared by their evaluations, and eval.every_steps is 0: never", hint=hint)
        measured = metrics_of(recipe)
        name = asked or (best if best != LOSS else next(iter(values_of(measured)), LOSS))
        own = any(map(is_own, measured))
        if own and not asked and best == LOSS and is_own(measured[0]):
            hint = "name it: --metric NAME, or eval.best_metric"
            raise UsageError(f"{measured[0]} names its numbers only when it is called", hint=hint)
        if name not in (LOSS, *values_of(measured)) and not own:
            known = ", ".join((LOSS, *values_of(measured)))
            raise UsageError(f"the evaluation of this recipe gives no {name}", hint=f"it gives {known}")
    greater = recipe.eval.greater_is_better if name == best else None
    return name, lower_is_better(name, greater=greater)


def resolved_all(resolve: Callable[..., Resolved], points: Sequence[Point]) -> list[Resolved]:
    """The recipes of points. Raises RecipeError with what is wrong in any of them, each thing once."""
    found: list[Resolved] = []
    wrong: list[Diagnostic] = []
    for point in points:
        try:
            found.append(made_resolved(resolve, point))
        except RecipeError as error:
            wrong += error.diagnostics
    if wrong:  # what is wrong with a key is wrong with each of its values
        raise RecipeError({(each.what, each.key): each for each in wrong}.values())
    return found


def planned_all(
    resolve: Callable[..., Resolved], plan: Callable[[Resolved], Planned], points: Sequence[Point]
) -> list[Planned]:
    """The plans of points. What is wrong with all of them is raised as it is, else with the points that it is about."""
    from trainkit.sweeps.space import named

    found: list[Planned] = []
    wrong: dict[Diagnostic, list[str]] = {}
    kind: type[TrainkitError] = RecipeError
    for point in points:
        try:
            found.append(plan(made_resolved(resolve, point)))
        except (RecipeError, MachineError) as error:
            kind = type(error)
            for each in error.diagnostics:
                wrong.setdefault(replace(each, origin=None), []).append(named(point))
    if wrong:
        raise kind(
            each if len(of) == len(points) else replace(each, what=f"{each.what} (with {'; '.join(of[:3])})")
            for each, of in wrong.items()
        )
    return found


def planned_here(resolved: Resolved) -> Planned:
    """The plan on this machine. Raises MachineError where it cannot run it."""
    planned = plan_recipe(resolved)
    if planned.plan.blockers:
        raise MachineError(Diagnostic("error", each.what, hint=each.hint) for each in planned.plan.blockers)
    return planned


def submitted_plan(resolved: Resolved) -> Planned:
    """The plan as a job of its cluster."""
    from trainkit.cli.commands.submit import planned_job

    return planned_job(resolved)


def made_resolved(resolve: Callable[..., Resolved], point: Point, *more: str) -> Resolved:
    """The recipe of a trial: it goes on from nothing but itself, and uploads nothing."""
    found = resolve(point, *more)
    asked = found.recipe.checkpoint
    added = [AFRESH] if asked.resume == "auto" else []
    added += [NO_UPLOAD] if asked.push_to_hub.repo is not None else []
    return resolve(point, *more, *added) if added else found


def trial_recipe(resolve: Callable[..., Resolved], point: Point, checkpoint: str | None) -> TrialRecipe:
    """The recipe of a trial as text, with the GPUs of its plan."""
    from trainkit.sweeps.running import TrialRecipe

    resume = [f"checkpoint.resume={json.dumps(checkpoint)}"] if checkpoint else []
    resolved = made_resolved(resolve, point, *resume)
    planned = planned_here(resolved)
    return TrialRecipe(pinned_yaml(resolved, planned), len(planned.plan.cards))


def winner(resolve: Callable[..., Resolved], point: Point) -> str:
    """The recipe of the best trial as the user keeps it: with uploads, where the recipe has some."""
    found = resolve(point)
    found = resolve(point, AFRESH) if found.recipe.checkpoint.resume == "auto" else found
    return pinned_yaml(found, plan_recipe(found))


def pinned_yaml(resolved: Resolved, planned: Planned) -> str:
    """A recipe as text, which names the commits of repositories as its plan has them."""
    from trainkit.hub.references import pinned
    from trainkit.recipe.yaml_writer import resolved_yaml

    return resolved_yaml(replace(resolved, recipe=pinned(resolved.recipe, planned.plan.repositories)))


def digest_of(base: Resolved, space: Space, options: SweepOptions, metric: str) -> str:
    """What makes trials those of one sweep: the same line with the same files gives the same."""
    from trainkit.recipe.yaml_writer import resolved_yaml

    how = (options.sampler, options.seed, options.early_stop, metric)
    parts = [resolved_yaml(base), *map(str, space.axes), *map(str, how)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


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
    default = SweepOptions()
    words = [recipe, *overrides]
    words += ["--sampler", options.sampler] if options.sampler != default.sampler else []
    words += ["--trials", str(options.trials)] if options.trials else []
    words += ["--seed", str(options.seed)] if options.seed else []
    words += ["--early-stop"] if options.early_stop else []
    words += ["--metric", options.metric] if options.metric else []
    words += [word for name in presets for word in ("--with", name)]
    words += ["--variant", variant] if variant else []
    words += ["--output", str(output)] if output else []
    return (*words, *(["--", *program] if program else []))


def open_study(made: PreparedSweep) -> Study:
    """The study of a prepared sweep, with its trials, in its folder. UsageError where the folder has another sweep."""
    from trainkit.sweeps.results import FILE, read_definition, write_definition
    from trainkit.sweeps.study import Study

    sweep, definition = made.sweep, made.sweep.definition
    if (sweep.folder / FILE).exists():
        before = read_definition(sweep.folder)
        if before.digest != definition.digest:
            what = f"{sweep.folder} is the folder of another sweep: {' '.join(before.axes)} of {before.recipe}"
            raise UsageError(what, hint="name another folder with --output")
        if before.trials > definition.trials:
            what = f"--trials {definition.trials}: the sweep in {sweep.folder} has {before.trials} already"
            raise UsageError(what, hint=f"--trials {before.trials} goes on with it, more extend it")
    study = Study(
        sweep.folder, made.space, _sampler(definition), definition.seed, definition.lower_is_better,
        definition.early_stop, definition.trials,
    )  # fmt: skip
    write_definition(sweep.folder, definition)
    study.plan(made.points)
    return study


def _sampler(definition: Definition) -> SamplerName:
    return next(name for name in ("grid", "random", "tpe") if name == definition.sampler)


def run_prepared(made: PreparedSweep, jobs: str, console: Terminal) -> SweepResult:
    """Run what is left of a sweep. Raises UsageError or MachineError where it cannot start."""
    from trainkit.machine.probe import probe
    from trainkit.recipe.assignment import without_layer
    from trainkit.runner.together import RunsTogether, share_gpus
    from trainkit.sweeps.running import make_folder, run_sweep
    from trainkit.sweeps.study import locked

    plans = [each.plan for each in made.planned]
    trials = made.sweep.definition.trials
    at_once, gpus = share_gpus(jobs, plans, trials, probe, chosen=made.chosen, needs_gpus=False)
    make_folder(made.sweep.folder)
    with locked(made.sweep.folder):
        study = open_study(made)
        if queued := [each for each in study.trials() if each.state == "running" and each.job]:
            hint = "the same line with --submit takes their results"
            raise UsageError(f"{pluralize(len(queued), 'trial')} of this sweep were submitted as jobs", hint=hint)
        # The trials' recipes are complete: a variable that is a layer would be laid over the values of a trial.
        return run_sweep(made.sweep, study, RunsTogether(at_once, gpus, without_layer(os.environ)), console)


def submit_trials(made: PreparedSweep, jobs: str) -> None:
    """Take the results of trials that are jobs, and submit those that are none yet as one array job."""
    from trainkit.cli.commands.submit import submit_tasks, without_arrays
    from trainkit.schedulers.jobs.submitting import Task, differences
    from trainkit.sweeps.results import SweepResult
    from trainkit.sweeps.running import make_folder, submitted_results
    from trainkit.sweeps.study import locked

    if jobs != "1" and not jobs.isdecimal():
        raise UsageError("--jobs auto is for the GPUs of this machine", hint="with --submit: how many tasks at a time")
    make_folder(made.sweep.folder)
    with locked(made.sweep.folder):
        study = open_study(made)
        submitted_results(made.sweep, study, ended_jobs)
        definition = made.sweep.definition
        waiting: list[Trial] = [each for each in study.trials() if each.state == "running" and not each.job]
        while trial := study.next(definition.trials):
            waiting.append(trial)
        if waiting:
            tasks = list[Task]()
            for trial in waiting:
                resolved = made_resolved(made.resolve, trial.point)
                tasks.append(Task(f"trial {trial.number}", resolved, submitted_plan(resolved)))
            if what := without_arrays(tasks[0].plan, len(tasks)):
                raise UsageError(what, hint="run the sweep itself in a job of its own, with --jobs")
            if found := [*differences(tasks)]:
                keys = ", ".join(dict.fromkeys(each.key for each in found))
                what = f"the tasks of an array have one job script, and {keys} differs between the trials"
                raise UsageError(what, hint="vary other settings, or run the sweep itself in a job of its own")
            given_in = submit_tasks(tasks, int(jobs) if jobs != "1" else None, "trial", dry_run=False)
            for trial, (layout, given) in zip(waiting, given_in, strict=True):
                study.keep(trial.number, run=str(layout.root), job=given.job)
        found_so_far = SweepResult(made.sweep.folder, definition, study.trials())
    write_page(found_so_far)
    tell(found_so_far, as_json=False)


def ended_jobs(trials: Sequence[Trial]) -> dict[int, str]:
    """Of trials that are jobs those that are over, with the reason where they have not ended well."""
    from trainkit.runner.rundir.layout import RunLayout
    from trainkit.schedulers.jobs.run_state import Jobs, state_of

    jobs, found = Jobs(), dict[int, str]()
    for trial in trials:
        state = state_of(RunLayout(Path(trial.run)), jobs)
        if state.is_over:
            found[trial.number] = "" if state.word == "done" else state.why or state.title
    return found


def show_prepared(made: PreparedSweep, *, as_json: bool, standing: bool) -> None:
    """What a line would run, or how far its sweep is. standing: the latter."""
    from trainkit.sweeps.results import FILE, SweepResult
    from trainkit.sweeps.space import named, overrides_of
    from trainkit.sweeps.study import read_trials

    folder, definition = made.sweep.folder, made.sweep.definition
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
    from trainkit.sweeps.results import as_data, table
    from trainkit.sweeps.space import named

    if as_json:
        sys.stdout.write(json.dumps(as_data(found), indent=2) + "\n")
        return
    columns = shutil.get_terminal_size((0, 0)).columns or None
    sys.stdout.write(table(found.definition, found.trials, {}, columns))
    if (best := found.best) and best.value is not None:
        measured = f"{found.definition.metric} {format_measure(best.value)}"
        write_text(one_line(f"best: trial {best.number}, {measured}: {named(best.point)}") + "\n")
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
