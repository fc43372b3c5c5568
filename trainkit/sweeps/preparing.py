"""Prepare a sweep: validate every value of its space, choose its metric, plan its trials; each trial as a recipe."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from trainkit.errors import Diagnostic, MachineError, RecipeError, TrainkitError, UsageError
from trainkit.hub.references import pinned
from trainkit.launch_plan.model import Planned
from trainkit.metrics import LOSS, is_own, lower_is_better, metrics_of, values_of
from trainkit.recipe.resolved import Resolved
from trainkit.recipe.schema import Recipe
from trainkit.recipe.yaml_writer import resolved_yaml
from trainkit.runner.rundir.layout import RunLayout
from trainkit.runner.rundir.listing import read_plan
from trainkit.runner.together import in_turn
from trainkit.runner.waiting import refuse_blocked
from trainkit.sweeps.results import FILE, Definition, read_definition, write_definition
from trainkit.sweeps.space import MOST_POINTS, Point, Space, named, overrides_of, read_space
from trainkit.sweeps.study import Sampler, Study, draw_points, require_optuna

PLANNED = 32  # points of a sweep that are all planned before the first starts; of more, each value once
AFRESH, NO_UPLOAD = "checkpoint.resume=never", "checkpoint.push_to_hub!={}"
IN_TURN = "it decides by the results of the trials before, and the tasks of an array are submitted at once"


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """How a space is searched. trials: None for the grid. metric: None is the recipe's own."""

    sampler: Sampler = "grid"
    trials: int | None = None
    seed: int = 0
    early_stop: bool = False
    metric: str | None = None


class TrialRecipe(NamedTuple):
    """A trial as a recipe. gpus: how many its plan has."""

    text: str
    gpus: int


@dataclass(frozen=True, slots=True)
class TrialRecipes:
    """How a point becomes a run. resolve: the recipe with these overrides. plan: of a recipe. fixed: of all trials."""

    resolve: Callable[[Sequence[str]], Resolved]
    plan: Callable[[Resolved], Planned]
    fixed: Sequence[str]

    def resolved(self, point: Point, *more: str) -> Resolved:
        """The recipe of a trial: it goes on from nothing but itself, and uploads nothing."""
        words = (*self.fixed, *overrides_of(point), *more)
        found = self.resolve(words)
        asked = found.recipe.checkpoint
        added = [AFRESH] if asked.resume == "auto" else []
        added += [NO_UPLOAD] if asked.push_to_hub.repo is not None else []
        return self.resolve((*words, *added)) if added else found

    def trial(self, point: Point, checkpoint: str | None, *, alone: bool) -> TrialRecipe:
        """A trial as a recipe, which goes on from a checkpoint where one is given.

        alone: whether its run chooses its GPUs: then these are those of its plan now, for which it waits if need be.
        Raises RecipeError and MachineError where there is no such run.
        """
        words = [f"checkpoint.resume={json.dumps(checkpoint)}"] if checkpoint else []
        resolved = self.resolved(point, *words)
        planned = self.plan(resolved)
        if waiting := in_turn(resolved.recipe, planned.plan, alone=alone):
            resolved = self.resolved(point, *words, *waiting)
            planned = self.plan(resolved)
        refuse_blocked(planned.plan)
        recipe = pinned(resolved.recipe, planned.plan.repositories)
        return TrialRecipe(resolved_yaml(replace(resolved, recipe=recipe)), len(planned.plan.cards))

    def winner(self, point: Point, layout: RunLayout) -> str:
        """The recipe of the best trial as the user keeps it, with uploads; layout: of its run, which names commits."""
        words = (*self.fixed, *overrides_of(point))
        found = self.resolve(words)
        found = self.resolve((*words, AFRESH)) if found.recipe.checkpoint.resume == "auto" else found
        return resolved_yaml(replace(found, recipe=pinned(found.recipe, read_plan(layout).repositories)))

    def all_resolved(self, points: Iterator[Point]) -> list[Resolved]:
        """The recipes of points. Raises RecipeError with what is wrong in any of them, each thing once."""
        found: list[Resolved] = []
        wrong: list[Diagnostic] = []
        for point in points:
            try:
                found.append(self.resolved(point))
            except RecipeError as error:
                wrong += error.diagnostics
        if wrong:  # what is wrong with a key is wrong with each of its values
            raise RecipeError({(each.what, each.key): each for each in wrong}.values())
        return found

    def all_planned(self, points: Sequence[Point]) -> list[Planned]:
        """The plans of points. What is wrong with all of them is raised as it is, else with the points it is about."""
        found: list[Planned] = []
        wrong: dict[Diagnostic, list[str]] = {}
        kind: type[TrainkitError] = RecipeError
        for point in points:
            try:
                planned = self.plan(self.resolved(point))
                refuse_blocked(planned.plan)
                found.append(planned)
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


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep that can start. program: the kind of the recipe's. warnings: of the recipe with any of its values.

    points: those known before it starts, all of a grid. planned: plans of all or some points. chosen: whether the
    recipe names its GPUs.
    """

    folder: Path
    definition: Definition
    program: str
    space: Space
    recipes: TrialRecipes
    points: Sequence[Point]
    planned: Sequence[Planned]
    chosen: bool
    warnings: Sequence[Diagnostic]

    def recipe(self, number: int) -> Path:
        """The file of a trial's recipe."""
        return self.folder / f"trial-{number}.yaml"

    def log(self, number: int) -> Path:
        """The file of a trial's output."""
        return self.folder / f"trial-{number}.log"

    def make_folder(self) -> None:
        """Make its folder. MachineError where it cannot be made."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            hint = "name another folder with --output"
            raise MachineError(f"the folder {self.folder} cannot be made: {error.strerror}", hint=hint) from error

    def study(self) -> Study:
        """The study with its trials, in the folder, which is locked. UsageError where the folder has another sweep."""
        definition = self.definition
        if (self.folder / FILE).exists():
            before = read_definition(self.folder)
            if before.digest != definition.digest:
                what = f"{self.folder} is the folder of another sweep: {' '.join(before.axes)} of {before.recipe}"
                raise UsageError(what, hint="name another folder with --output")
            if before.trials > definition.trials:
                what = f"--trials {definition.trials}: the sweep in {self.folder} has {before.trials} already"
                raise UsageError(what, hint=f"--trials {before.trials} goes on with it, more extend it")
        study = Study(
            self.folder, self.space, definition.sampler, definition.seed, definition.lower_is_better,
            definition.early_stop, definition.trials,
        )  # fmt: skip
        write_definition(self.folder, definition)
        study.plan(self.points)
        return study


def prepare(  # noqa: PLR0917 - what a sweep is made of
    overrides: Sequence[str],
    options: SweepOptions,
    resolve: Callable[[Sequence[str]], Resolved],
    plan: Callable[[Resolved], Planned],
    line: Sequence[str],
    output: Path | None = None,
    *,
    submit: bool = False,
) -> Sweep:
    """Validate every value and plan the trials; nothing is started or written. Raises all that is wrong.

    resolve, plan: as of TrialRecipes. line: the words behind `trainkit sweep`. output: the folder; None is one beside
    the runs. submit: whether the trials will be jobs.
    """
    require_optuna()
    space = read_space(overrides)
    check_options(space, options, submit=submit)
    recipes = TrialRecipes(resolve, plan, space.fixed)
    corners = recipes.all_resolved(space.corners())
    base = corners[0]
    points = known_points(space, options)
    metric, lower = objective(base.recipe, options.metric)
    for other in corners[1:]:
        if objective(other.recipe, options.metric) != (metric, lower):
            hint = "name one that all of them evaluate: --metric loss"
            raise UsageError("the trials would be compared by different metrics", hint=hint)
    planned = recipes.all_planned(points if 0 < len(points) <= PLANNED else [*space.corners()])
    digest = digest_of(base, space, options, metric)
    definition = Definition(
        base.recipe.name, tuple(line), str(Path.cwd()), tuple(map(str, space.axes)), options.sampler, options.seed,
        options.early_stop, metric, lower, options.trials or len(points), digest,
    )  # fmt: skip
    return Sweep(
        output or Path(base.recipe.output.root, base.recipe.name, f"sweep-{digest[:8]}"),
        definition,
        base.recipe.program.kind,
        space,
        recipes,
        points,
        planned,
        any(isinstance(each.recipe.devices.select, list) for each in corners),
        [*dict.fromkeys(each for one in corners for each in one.warnings)],
    )


def check_options(space: Space, options: SweepOptions, *, submit: bool) -> None:
    """Raise UsageError for options that do not go with the space, or with one another."""
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
    if options.sampler == "grid":
        return [*space.grid()]
    return draw_points(space, options.trials or 0, options.seed) if options.sampler == "random" else []


def objective(recipe: Recipe, asked: str | None) -> tuple[str, bool]:
    """The metric by which trials are compared, and whether its lowest value is the best: as `headline` chooses it.

    Raises UsageError where the recipe evaluates nothing, or not this.
    """
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


def digest_of(base: Resolved, space: Space, options: SweepOptions, metric: str) -> str:
    """What makes trials those of one sweep: the same line with the same files gives the same, with `--wait` too."""
    devices = base.recipe.devices.model_copy(update={"when_busy": "refuse"})
    text = resolved_yaml(replace(base, recipe=base.recipe.model_copy(update={"devices": devices})))
    how = (options.sampler, options.seed, options.early_stop, metric)
    parts = [text, *map(str, space.axes), *map(str, how)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
