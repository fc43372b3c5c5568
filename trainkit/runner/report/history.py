"""Every number of a run's metrics over its steps, for curves: followed while the run goes on, or read at its end."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainkit.runner.report.progress import Progress, Tail

PHASE = "phases."  # before the name of a phase: seconds of it in a step
NO_CURVES = frozenset({"step", "elapsed", "event"})


@dataclass(slots=True)
class Curve:
    """Values by step, in order of the steps; a value that was infinite or NaN is None."""

    steps: list[int] = field(default_factory=list)
    values: list[float | None] = field(default_factory=list)

    def cut(self, step: int) -> None:
        """Forget what is behind a step: training has gone back to it."""
        keep = bisect_right(self.steps, step)
        del self.steps[keep:], self.values[keep:]


class History:
    """The metrics of one run, read from where they were left.

    start: the latest start record, with what the trainer says of itself. curves: by the names of the metrics (`loss`,
    `eval_loss`, `learning_rate`, `samples_per_second`, …) and `phases.<phase>`. progress: as in the console.
    A restart from a checkpoint replaces what lay behind that.
    """

    def __init__(self, metrics: Path) -> None:
        self.start: Mapping[str, Any] = {}
        self.curves: dict[str, Curve] = {}
        self.progress = Progress()
        self._tail = Tail(metrics, kept=False)

    def read(self) -> bool:
        """Take what is new; whether there was anything."""
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
            self.start = record
            for curve in self.curves.values():
                curve.cut(self.progress.logged)
            return
        step = record.get("step")
        if not isinstance(step, int) or isinstance(step, bool):
            return
        for name, value in _numbers(record, max(1, step - before)):
            curve = self.curves.setdefault(name, Curve())
            if not curve.steps or curve.steps[-1] < step:
                curve.steps.append(step)
                curve.values.append(value)


def _numbers(record: Mapping[str, Any], steps: int) -> Iterator[tuple[str, float | None]]:
    """What a record has for curves. steps: since the record before, over which its phases are summed."""
    for name, value in record.items():
        if name == "phases" and isinstance(value, Mapping):
            parts = ((f"{PHASE}{phase}", seconds) for phase, seconds in value.items())
            yield from ((phase, seconds / steps) for phase, seconds in parts if isinstance(seconds, int | float))
        elif name not in NO_CURVES and (value is None or isinstance(value, int | float)):
            yield name, value
