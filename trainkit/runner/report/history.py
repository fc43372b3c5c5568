"""Every number of a run's metrics over its steps, for curves: followed while the run goes on, or read at its end."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any

from trainkit.decode import finite, whole
from trainkit.launch_plan.model import Plan
from trainkit.metrics import PREFIX
from trainkit.runner.report.progress import Progress, Tail
from trainkit.runner.report.summary import trainer_log
from trainkit.runner.rundir.layout import RunLayout

PHASE = "phases."  # before the name of a phase: seconds of it in a step
NUMBERS = (float, int, NoneType)  # of JSON, without true and false
NO_CHART = frozenset({"seconds", f"{PREFIX}seconds"})  # times without their steps say nothing
NO_CURVES = frozenset({"step", "elapsed", "event"})
NO_METRICS = ("_runtime", "_per_second", "epoch", "total_flos")  # the ends of names in Trainer's log


@dataclass(slots=True)
class Curve:
    """Values by step, in order of the steps; a value that was infinite or NaN is None."""

    steps: list[int] = field(default_factory=list)
    values: list[float | None] = field(default_factory=list)

    def add(self, step: int, value: float | None) -> None:
        """Add the value of a later step; a step that has a value keeps it."""
        if not self.steps or self.steps[-1] < step:
            self.steps.append(step)
            self.values.append(value)

    def cut(self, step: int) -> None:
        """Drop the values after a step: training has gone back to it."""
        keep = bisect_right(self.steps, step)
        del self.steps[keep:], self.values[keep:]


class History:
    """The metrics of one run, read from where they were left.

    start: the latest start record, with what the trainer says of itself. first_step: after which the run began, which
    is not 0 where it goes on from another run's checkpoint. curves: by the names of the metrics (`loss`,
    `eval_loss`, `learning_rate`, `samples_per_second`, …) and `phases.<phase>`. progress: as in the console.
    A restart from a checkpoint replaces what lay behind that.
    """

    def __init__(self, metrics: Path) -> None:
        self.start: Mapping[str, Any] = {}
        self.first_step = 0
        self.curves = defaultdict[str, Curve](Curve)
        self.times = Curve()
        self.progress = Progress()
        self._tail = Tail(metrics, kept=False)

    def read(self) -> bool:
        """Read what is new; False if there was nothing."""
        any_new = False
        for record in self._tail.records():
            any_new = True
            self._take(record)
        return any_new

    @property
    def refusal(self) -> str:
        """Why the metrics cannot be read; empty if they can."""
        return self._tail.refusal

    def _take(self, record: Mapping[str, Any]) -> None:
        before = self.progress.logged
        self.progress = self.progress.take(record, time.monotonic())
        if record.get("event") == "start":
            if not self.start:
                self.first_step = self.progress.logged
            self.start = record
            for curve in (self.times, *self.curves.values()):
                curve.cut(self.progress.logged)
            return
        if (step := whole(record.get("step"))) is None:
            return
        began, elapsed = finite(self.start.get("time")), finite(record.get("elapsed"))
        if began is not None and elapsed is not None:
            self.times.add(step, began + elapsed)
        steps = max(1, step - before)  # since the record before, over which the phases are summed
        for name, value in record.items():
            if name == "phases" and isinstance(value, dict):
                for phase, seconds in value.items():
                    if (known := finite(seconds)) is not None:
                        self.curves[f"{PHASE}{phase}"].add(step, known / steps)
            elif name not in NO_CURVES and type(value) in NUMBERS:
                self.curves[name].add(step, finite(value))


def trainer_curves(plan: Plan | None, layout: RunLayout, started: float) -> dict[str, Curve]:
    """What a script on Trainer has logged in a run, which has its metrics by the names of the built-in trainer's.

    started: of the run, seconds since the epoch.
    """
    found: dict[str, Curve] = {}
    for entry in trainer_log(plan, layout, started) if plan else ():
        if not (step := whole(entry.get("step"))):
            continue
        for name, value in entry.items():
            known = name != "step" and not name.startswith("train_") and not name.endswith(NO_METRICS)
            if known and isinstance(value, int | float):
                found.setdefault(name, Curve()).add(step, finite(value))
    return found
