"""What a sweep is, as its folder keeps it, and what it has found: the best trial, a table, JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainkit.decode import finite
from trainkit.errors import MachineError
from trainkit.files import read_record, write_json
from trainkit.metrics import PREFIX
from trainkit.runner.report.history import Curve, History, trainer_curves
from trainkit.runner.rundir.layout import RunLayout
from trainkit.runner.rundir.listing import read_plan, read_status
from trainkit.sweeps.space import named, overrides_of, shown
from trainkit.sweeps.study import Sampler, State, Trial
from trainkit.text import Column, fitted_table, format_measure, strip_control

FILE, BEST = "sweep.json", "best.yaml"
_ORDER: tuple[State, ...] = ("done", "stopped early", "running", "failed", "waiting")
_REASON = 60  # characters of a failure's reason in the table


@dataclass(frozen=True, slots=True)
class Definition:
    """A sweep as its folder keeps it (sweep.json). line: the words behind `trainkit sweep`, typed in `cwd`.

    axes: as they are typed. trials: how many there will be. digest: of all that makes its trials comparable: the recipe
    and the fixed overrides, the axes, sampler, seed, early stopping, metric.
    """

    recipe: str
    line: tuple[str, ...]
    cwd: str
    axes: tuple[str, ...]
    sampler: Sampler
    seed: int
    early_stop: bool
    metric: str
    lower_is_better: bool
    trials: int
    digest: str


@dataclass(frozen=True, slots=True)
class SweepResult:
    """A sweep as far as it has come; as text its table. trials: all, by number.

    stopped_by: the signal that ended it early. refusal: why it ended itself.
    """

    folder: Path
    definition: Definition
    trials: Sequence[Trial]
    stopped_by: int | None = None
    refusal: str = ""

    @property
    def best(self) -> Trial | None:
        """The trial with the best value of those that ended; of equal ones the first."""
        return next(iter(ranked(self.trials, lower=self.definition.lower_is_better, states=("done",))), None)

    @property
    def best_recipe(self) -> Path | None:
        """The recipe of the best trial; None where none has ended."""
        return self.folder / BEST if self.best else None

    @property
    def complete(self) -> bool:
        """Whether every trial has ended, and none has failed."""
        ended = [each for each in self.trials if each.state in ("done", "stopped early")]
        return len(ended) == len(self.trials) >= self.definition.trials

    def __str__(self) -> str:
        return in_words(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))


def read_definition(folder: Path) -> Definition:
    """What the folder of a sweep says of it. MachineError where it is none."""
    if (found := read_record(folder / FILE, Definition)) is None:
        raise MachineError(f"{folder} is not the folder of a sweep", hint="its sweep.json is missing, or damaged")
    return found


def write_definition(folder: Path, definition: Definition) -> None:
    """Write sweep.json."""
    write_json(folder / FILE, asdict(definition))


def ranked(trials: Sequence[Trial], *, lower: bool, states: Sequence[State] = _ORDER) -> list[Trial]:
    """The trials with these states in the order of a table: by state, and those of one state by value, best first."""
    sign = 1 if lower else -1

    def place(trial: Trial) -> tuple[int, float, int]:
        known = trial.value is not None and math.isfinite(trial.value)
        return _ORDER.index(trial.state), sign * (trial.value or 0.0) if known else math.inf, trial.number

    return sorted((each for each in trials if each.state in states), key=place)


def evaluations(layout: RunLayout, metric: str, program: str, history: History | None = None) -> Curve:
    """The values of a metric at the evaluations of a run so far. program: its kind; Trainer logs its own.

    history: of its metrics, where it was read before.
    """
    history = history or History(layout.metrics)
    history.read()
    own: Mapping[str, Curve] = {}
    if program == "hf" and (status := read_status(layout)) and status.started:  # its folder may have an older log
        own = trainer_curves(read_plan(layout), layout, status.started)
    return own.get(PREFIX + metric) or history.curves[PREFIX + metric]


def table(definition: Definition, trials: Sequence[Trial], totals: Mapping[int, int], width: int | None = None) -> str:
    """A line for each trial, the best first. totals: steps of all, by the numbers of trials whose runs say so."""
    rows = ranked(trials, lower=definition.lower_is_better)
    names = [axis.partition("=")[0] for axis in definition.axes]

    def state(trial: Trial) -> str:
        return f"{trial.state}: {trial.why[:_REASON]}" if trial.why else trial.state

    def steps(trial: Trial) -> str:
        known = (trial.step, totals.get(trial.number))
        return "/".join(str(each) for each in known if each is not None)

    columns = [
        Column("TRIAL", [str(each.number) for each in rows]),
        Column(definition.metric, ["" if each.value is None else format_measure(each.value) for each in rows]),
        *(Column(name, [shown(each.point.get(name, "")) for each in rows], 6) for name in names),
        Column("STATE", [state(each) for each in rows], 13),
        Column("STEP", [steps(each) for each in rows]),
        Column("RUN", [RunLayout(Path(each.run)).short_id if each.run else "" for each in rows]),
    ]
    return fitted_table(columns, ("TRIAL", definition.metric, "STATE", *names), ("STEP", "RUN"), width)


def in_words(found: SweepResult, width: int | None = None) -> str:
    """The table, and a line about the best trial."""
    text, best = table(found.definition, found.trials, {}, width), found.best
    if best is None or best.value is None:
        return text
    measured = f"{found.definition.metric} {format_measure(best.value)}"
    return f"{text}best: trial {best.number}, {measured}: {strip_control(named(best.point))}\n"


def as_data(found: SweepResult) -> dict[str, Any]:
    """All of it as JSON can hold it."""
    best = found.best
    return {
        "folder": str(found.folder),
        **{name: value for name, value in asdict(found.definition).items() if name not in ("line", "cwd", "digest")},
        "best": best and best.number,
        "best_recipe": best and str(found.best_recipe),
        "trials_made": [
            {
                **asdict(each),
                "point": dict(each.point),
                "overrides": overrides_of(each.point),
                "value": None if each.value is None else finite(each.value),
            }
            for each in ranked(found.trials, lower=found.definition.lower_is_better)
        ],
        "stopped_by": found.stopped_by,
        "refusal": found.refusal,
    }


def result_of(data: Mapping[str, Any]) -> SweepResult:
    """The same from `as_data`, with the definition that its folder has."""
    folder = Path(data["folder"])
    trials = [Trial(**{name: each[name] for name in Trial.__dataclass_fields__}) for each in data["trials_made"]]
    trials.sort(key=lambda each: each.number)
    return SweepResult(folder, read_definition(folder), trials, data["stopped_by"], data["refusal"])
