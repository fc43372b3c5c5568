"""The trials of a sweep in Optuna's study, a SQLite file in its folder: which there are, and which comes next."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trainkit.distribution import install
from trainkit.errors import MachineError, UsageError
from trainkit.files import open_regular, try_lock
from trainkit.sweeps.space import Axis, Point, Space

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

Sampler = Literal["grid", "random", "tpe"]
State = Literal["waiting", "running", "done", "stopped early", "failed"]
FILE, LOCK, NAME = "study.db", ".lock", "sweep"
# Early stopping compares with the median of the trials that have ended; before so many have, it ends none.
COMPARED = 2


@dataclass(frozen=True, slots=True)
class Trial:
    """One trial as the study has it. value: of the metric at its last evaluation, at `step`. run: its directory.

    why: of a failure, or of a value that is another trial's. job: of a scheduler, where it was submitted.
    """

    number: int
    point: Point
    state: State
    value: float | None = None
    step: int | None = None
    run: str = ""
    why: str = ""
    job: str = ""


def require_optuna() -> None:
    """Raise MachineError where Optuna is not installed; nothing of it is loaded."""
    if find_spec("optuna") is None:
        raise MachineError(
            "sweeps need optuna, which is not installed",
            hint=f"{install(sys.executable, 'optuna')} (the extra `sweep`)",
        )


class Study:
    """The study of one sweep, to which results are told. Who has it holds the lock of its folder."""

    def __init__(  # noqa: PLR0917 - what a study is made of
        self, folder: Path, space: Space, sampler: Sampler, seed: int, lower: bool, early_stop: bool, trials: int
    ) -> None:
        """trials: how many there will be. lower: whether the lowest value is the best."""
        optuna = _optuna()
        self._early_stop = early_stop
        self._distributions = {axis.name: _distribution(axis) for axis in space.axes}
        self._trials: dict[int, Any] = {}  # Optuna's, of those that are running
        self._study = optuna.create_study(
            storage=_storage(folder),
            study_name=NAME,
            direction="minimize" if lower else "maximize",
            load_if_exists=True,
            # As Optuna stops by the median: Vizier, section 3.2 (Golovin et al. 2017).
            pruner=optuna.pruners.MedianPruner(n_startup_trials=COMPARED) if early_stop else optuna.pruners.NopPruner(),
        )
        before = len(self._study.get_trials(deepcopy=False))
        # A sampler that begins anew with the same seed would draw again what it has drawn.
        draws = max(3, min(10, trials // 3))  # at random, before the model of TPE decides
        self._study.sampler = (
            optuna.samplers.TPESampler(seed=seed + before, n_startup_trials=draws)
            if sampler == "tpe"
            else optuna.samplers.RandomSampler(seed=seed + before)
        )

    def trials(self) -> list[Trial]:
        """All trials by number, without failed ones whose point was tried again."""
        return _without_retried(self._study)

    def plan(self, points: Sequence[Point]) -> None:
        """Have these points tried, if they are not yet, and failed ones once more. Adds only what is missing."""
        known = self.trials()
        there = [each.point for each in known if each.state != "failed"]
        again = [each.point for each in known if each.state == "failed"]
        for point in [*again, *(each for each in points if each not in there and each not in again)]:
            self._study.enqueue_trial(dict(point))

    def next(self, most: int) -> Trial | None:
        """The next trial, which counts as running from now on; None where there is none left.

        most: how many trials there may be. A point that the sampler draws a second time takes the first one's value.
        """
        while True:
            before = self.trials()
            if all(each.state != "waiting" for each in before) and len(before) >= most:
                return None
            asked = self._study.ask(self._distributions)
            twin = next((each for each in before if each.point == asked.params and each.state != "waiting"), None)
            if twin is None or twin.number == asked.number:
                self._trials[asked.number] = asked
                return Trial(asked.number, asked.params, "running")
            asked.set_user_attr("why", f"as trial {twin.number}: not trained twice")
            if twin.value is None or twin.state != "done":
                self._study.tell(asked.number, state=_optuna().trial.TrialState.FAIL)
            else:
                self._keep(asked, run=twin.run, step=twin.step)
                self._study.tell(asked.number, twin.value)

    def keep(self, number: int, **known: Any) -> None:
        """Note something of a running trial: its `run`, `job`, `step`."""
        self._keep(self._running(number), **known)

    def report(self, number: int, step: int, value: float) -> bool:
        """Report the value of an evaluation. Whether the trial is to be stopped early."""
        trial = self._running(number)
        if step not in self._study.get_trials(deepcopy=False)[number].intermediate_values:  # it may have gone back
            trial.report(value, step)
        return self._early_stop and (math.isnan(value) or bool(trial.should_prune()))

    def finish(self, number: int, value: float) -> None:
        """A trial has ended with this value."""
        self._study.tell(number, value)

    def stop(self, number: int) -> None:
        """A trial was stopped early; its last reported value stays."""
        self._study.tell(number, state=_optuna().trial.TrialState.PRUNED)

    def fail(self, number: int, why: str) -> None:
        """A trial has failed."""
        self._running(number).set_user_attr("why", why)
        self._study.tell(number, state=_optuna().trial.TrialState.FAIL)

    def _running(self, number: int) -> Any:
        if number not in self._trials:  # of an earlier start of the sweep
            frozen = self._study.get_trials(deepcopy=False)[number]
            self._trials[number] = _optuna().Trial(self._study, frozen._trial_id)
        return self._trials[number]

    @staticmethod
    def _keep(trial: optuna.Trial, **known: Any) -> None:
        for name, value in known.items():
            trial.set_user_attr(name, value)


def read_trials(folder: Path) -> list[Trial]:
    """The trials of a sweep that may be running, by number. MachineError where there is no study."""
    optuna = _optuna()
    try:
        study = optuna.load_study(study_name=NAME, storage=_storage(folder, there=True))
    except (KeyError, OSError) as error:
        raise MachineError(f"{folder} has no study that can be read", hint="name the folder of a sweep") from error
    return _without_retried(study)


def draw_points(space: Space, count: int, seed: int) -> list[Point]:
    """Points drawn at random, no two alike; more of them begin with the same. UsageError where there are too few."""
    if space.size is not None and count > space.size:
        what = f"--trials {count}: the lists have {space.size} points in all"
        raise UsageError(what, hint="--sampler grid runs all of them")
    optuna = _optuna()
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    distributions = {axis.name: _distribution(axis) for axis in space.axes}
    points: list[Point] = []
    while len(points) < count:
        point = study.ask(distributions).params
        points += [point] if point not in points else []
    return points


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a sweep's folder. MachineError where another process has it."""
    fd = open_regular(folder / LOCK, os.O_RDWR | os.O_CREAT)
    try:
        if not try_lock(fd):
            hint = f"see it with `trainkit sweep {folder} --show`, or wait for its end"
            raise MachineError(f"the sweep in {folder} is running", hint=hint)
        yield
    finally:
        os.close(fd)


def _optuna() -> Any:
    require_optuna()
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _storage(folder: Path, *, there: bool = False) -> str:
    path = folder.absolute() / FILE
    if there and not path.is_file():
        raise FileNotFoundError(path)
    # As SQLAlchemy reads a URL: `%`, `?` and `#` of a folder's name would end or change the path.
    return f"sqlite:///{str(path).replace('%', '%25').replace('?', '%3F').replace('#', '%23')}"


def _distribution(axis: Axis) -> BaseDistribution:
    from optuna import distributions

    if axis.interval is None:
        return distributions.CategoricalDistribution(axis.values)
    low, high = axis.interval.low, axis.interval.high
    if axis.interval.kind == "int":
        return distributions.IntDistribution(int(low), int(high))
    return distributions.FloatDistribution(low, high, log=axis.interval.kind == "log")


def _without_retried(study: optuna.Study) -> list[Trial]:
    found = [_read(each) for each in study.get_trials(deepcopy=False)]
    return [
        each
        for each in found
        if each.state != "failed" or not any(later.point == each.point for later in found[each.number + 1 :])
    ]


def _read(frozen: FrozenTrial) -> Trial:
    states: Mapping[str, State] = {
        "WAITING": "waiting", "RUNNING": "running", "COMPLETE": "done", "PRUNED": "stopped early", "FAIL": "failed",
    }  # fmt: skip
    # What is enqueued has its parameters as an attribute, until it is asked for.
    point = frozen.params or frozen.system_attrs.get("fixed_params", {})
    known, reported = frozen.user_attrs, frozen.intermediate_values
    value = frozen.value if frozen.state.name == "COMPLETE" else reported[max(reported)] if reported else None
    return Trial(
        frozen.number,
        point,
        states[frozen.state.name],
        value,
        known.get("step", max(reported, default=None)),
        known.get("run", ""),
        known.get("why", ""),
        known.get("job", ""),
    )
