"""From the accounts of runs to the rows of a comparison: plain data and pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Literal

from trainkit.runner.report.exit_status import KILLED

Outcome = Literal["ok", "failed", "out of memory", "interrupted", "refused"]
MemoryKind = Literal["gpu", "rss"]

# What a rank's standard error holds when memory, of a card or of the machine, ran out.
OUT_OF_MEMORY = ("OutOfMemoryError", "out of memory", "MemoryError", "can't allocate memory", "bad_alloc")
# Long heads for prose, short ones for columns.
MEMORY_MEANING: Mapping[MemoryKind, str] = {
    "gpu": "GPU memory occupied (NVML, fullest card)",
    "rss": "peak resident memory (RSS of the largest rank)",
}
MEMORY_HEAD: Mapping[MemoryKind, str] = {"gpu": "GPU memory", "rss": "peak RSS"}


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run, or one that was refused. Seconds and bytes; None is what the run did not report.

    seconds: of training where the trainer reports it, else of the whole run.
    """

    outcome: Outcome
    exit_code: int | None = None
    reason: str = ""
    seconds: float | None = None
    samples_per_second: float | None = None
    memory_bytes: int | None = None
    final_loss: float | None = None
    run_directory: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One variant with all its runs. Figures are those of the runs that succeeded.

    speed, memory: samples per second and memory as multiples of the base's; None where either is unknown.
    """

    name: str
    description: str
    runs: tuple[Measurement, ...]
    speed: float | None = None
    memory: float | None = None

    @property
    def outcome(self) -> Outcome:
        """Of the first run that did not succeed; ``ok`` when all did."""
        return next((run.outcome for run in self.runs if run.outcome != "ok"), "ok")

    @property
    def reason(self) -> str:
        """Why it did not succeed."""
        return next((run.reason for run in self.runs if run.outcome != "ok"), "")

    @property
    def seconds(self) -> float | None:
        """Median over the runs."""
        return _median(run.seconds for run in self._good)

    @property
    def samples_per_second(self) -> float | None:
        """Median over the runs."""
        return _median(run.samples_per_second for run in self._good)

    @property
    def spread(self) -> tuple[float, float] | None:
        """Lowest and highest samples per second; None for fewer than two runs."""
        rates = [run.samples_per_second for run in self._good if run.samples_per_second is not None]
        return (min(rates), max(rates)) if len(rates) > 1 else None

    @property
    def memory_bytes(self) -> int | None:
        """The highest of the runs."""
        return max((run.memory_bytes for run in self._good if run.memory_bytes is not None), default=None)

    @property
    def final_loss(self) -> float | None:
        """Median over the runs."""
        return _median(run.final_loss for run in self._good)

    @property
    def _good(self) -> list[Measurement]:
        return [run for run in self.runs if run.outcome == "ok"]


def measure(summary: Mapping[str, Any], kind: MemoryKind, errors: str, run_directory: str) -> Measurement:
    """What a run's summary says. errors: the end of the ranks' standard error, which shows what a failure was."""
    outcome, reason = _outcome(summary, errors)
    seconds = _number(summary.get("train_seconds"))
    return Measurement(
        outcome,
        summary.get("exit_code"),
        reason,
        seconds if seconds is not None else _number(summary.get("wall_seconds")),
        _number(summary.get("samples_per_second")),
        _occupied(summary, kind),
        _number(summary.get("final_loss")),
        run_directory,
    )


def compare(rows: Sequence[Row], base: str) -> list[Row]:
    """The rows with their speed and memory relative to the row named `base`, where that succeeded."""
    reference = next((row for row in rows if row.name == base and row.outcome == "ok"), None)
    if reference is None:
        return list(rows)
    speed, memory = reference.samples_per_second, reference.memory_bytes
    return [
        replace(row, speed=_ratio(row.samples_per_second, speed), memory=_ratio(row.memory_bytes, memory))
        for row in rows
    ]


def remaining(walls: Sequence[float], left: int, spent: float = 0.0) -> float | None:
    """Seconds that so many more runs may take, by the mean of those before; None before the first has ended.

    spent: seconds that the first of them has taken so far.
    """
    if not walls or not left:
        return None
    mean = sum(walls) / len(walls)
    return mean * (left - 1) + max(mean - spent, 0.0)


def _outcome(summary: Mapping[str, Any], errors: str) -> tuple[Outcome, str]:
    code, why = summary.get("exit_code"), str(summary.get("why") or "")
    if code == 0:
        return "ok", ""
    if summary.get("failure") == "signal":
        return "interrupted", why
    traces = (line.strip() for line in reversed(errors.splitlines()) if any(trace in line for trace in OUT_OF_MEMORY))
    if line := next(traces, ""):
        return "out of memory", line
    if code == KILLED:
        return "out of memory", f"{why} (exit code {KILLED}: most likely the kernel's, when memory ran out)"
    return "failed", f"{why} (exit code {code})" if str(code) not in why else why


def _occupied(summary: Mapping[str, Any], kind: MemoryKind) -> int | None:
    if kind == "gpu":
        return max((summary.get("gpu_memory_occupied") or {}).values(), default=None)
    return max((rank["rss"] for rank in summary.get("memory") or () if rank.get("rss")), default=None)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    # A loss that is not a number is the result of its variant, and has no order.
    return next((value for value in known if math.isnan(value)), median(known)) if known else None


def _ratio(value: float | None, reference: float | None) -> float | None:
    return value / reference if value is not None and reference else None
