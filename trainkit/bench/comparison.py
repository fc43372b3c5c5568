"""From the accounts of runs to the rows of a comparison, and these as text for people, as CSV and as plain data."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, Literal

from trainkit.runner.report.exit_status import KILLED
from trainkit.text import MIB

Outcome = Literal["ok", "failed", "out of memory", "interrupted", "refused"]
MemoryKind = Literal["gpu", "rss"]
Figure = Literal["seconds", "samples_per_second", "final_loss"]  # of which several runs have a median

# What a rank's standard error holds when memory, of a card or of the machine, ran out.
OUT_OF_MEMORY = ("OutOfMemoryError", "out of memory", "MemoryError", "can't allocate memory", "bad_alloc")
# Long heads for prose, short ones for columns.
MEMORY_MEANING: Mapping[MemoryKind, str] = {
    "gpu": "GPU memory occupied (NVML, fullest card)",
    "rss": "peak resident memory (RSS of the largest rank)",
}
MEMORY_HEAD: Mapping[MemoryKind, str] = {"gpu": "GPU memory", "rss": "peak RSS"}
_REASON = 100  # characters of a failure's reason in the table; files hold all of it


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
    def spread(self) -> tuple[float, float] | None:
        """Lowest and highest samples per second; None for fewer than two runs."""
        rates = self._known("samples_per_second")
        return (min(rates), max(rates)) if len(rates) > 1 else None

    @property
    def memory_bytes(self) -> int | None:
        """The highest of the runs."""
        return max(self._known("memory_bytes"), default=None)

    def median(self, figure: Figure) -> float | None:
        """Of the runs that report it."""
        known = self._known(figure)
        # A loss that is not a number is the result of its variant, and has no order.
        return next((value for value in known if math.isnan(value)), median(known)) if known else None

    def _known(self, figure: Figure | Literal["memory_bytes"]) -> list[Any]:
        values = [getattr(run, figure) for run in self.runs if run.outcome == "ok"]
        return [value for value in values if value is not None]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A bench as far as it has come. machine: a description of what it ran on; not_run: variants without a run."""

    recipe: str
    machine: str
    memory: MemoryKind
    rows: Sequence[Row]
    not_run: Sequence[str] = ()

    @property
    def complete(self) -> bool:
        """Whether every variant ran, and succeeded."""
        return not self.not_run and all(row.outcome == "ok" for row in self.rows)


def measure(summary: Mapping[str, Any], kind: MemoryKind, errors: str, run_directory: str) -> Measurement:
    """What a run's summary says. errors: the end of the ranks' standard error, which shows what a failure was."""
    outcome, reason = _outcome(summary, errors)
    seconds = _number(summary.get("train_seconds"))
    ranks, cards = summary.get("memory") or (), summary.get("gpu_memory_occupied") or {}
    used = cards.values() if kind == "gpu" else [rank["rss"] for rank in ranks if rank.get("rss")]
    return Measurement(
        outcome,
        summary.get("exit_code"),
        reason,
        seconds if seconds is not None else _number(summary.get("wall_seconds")),
        _number(summary.get("samples_per_second")),
        max(used, default=None),
        _number(summary.get("final_loss")),
        run_directory,
    )


def compare(rows: Sequence[Row], base: str) -> list[Row]:
    """The rows with their speed and memory relative to the row named `base`, where that succeeded."""
    reference = next((row for row in rows if row.name == base and row.outcome == "ok"), None)
    if reference is None:
        return list(rows)
    speed, memory = reference.median("samples_per_second"), reference.memory_bytes
    return [
        replace(row, speed=_ratio(row.median("samples_per_second"), speed), memory=_ratio(row.memory_bytes, memory))
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


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _ratio(value: float | None, reference: float | None) -> float | None:
    return value / reference if value is not None and reference else None


def render(found: Comparison) -> str:
    """The table, with what its memory column means below."""
    head = ("variant", "time", "samples/s", "vs base", MEMORY_HEAD[found.memory], "vs base", "final loss")
    lines = [head, *(_cells(row) for row in found.rows)]
    widths = [max(len(line[column]) for line in lines if len(line) == len(head)) for column in range(len(head))]
    widths[0] = max(len(line[0]) for line in lines)
    text = "".join(_line(line, widths) for line in lines)
    text += f"{found.recipe} on {found.machine}; memory is {MEMORY_MEANING[found.memory]}\n"
    return text + (f"not run: {', '.join(found.not_run)}\n" if found.not_run else "")


def as_csv(found: Comparison) -> str:
    """One line for each variant. Seconds, samples per second and bytes; an empty cell is unknown."""
    stream = io.StringIO()
    columns = list(_record(Row("", "", ()), found.memory))  # the head is there before the first row is
    writer = csv.DictWriter(stream, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(_record(row, found.memory) for row in found.rows)
    return stream.getvalue()


def as_data(found: Comparison) -> dict[str, Any]:
    """Everything, each run included, as JSON can hold it: a loss that is no number is null."""
    return {
        "recipe": found.recipe,
        "machine": found.machine,
        "memory": MEMORY_MEANING[found.memory],
        "rows": [
            {**_record(row, found.memory), "runs": [_finite(asdict(run)) for run in row.runs]} for row in found.rows
        ],
        "not_run": list(found.not_run),
    }


def rate(value: float) -> str:
    """Samples per second with three digits that mean something."""
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _record(row: Row, memory: MemoryKind) -> dict[str, Any]:
    lowest, highest = row.spread or (None, None)
    return _finite(
        {
            "variant": row.name,
            "description": row.description,
            "outcome": row.outcome,
            "reason": row.reason,
            "runs": len(row.runs),
            "seconds": row.median("seconds"),
            "samples_per_second": row.median("samples_per_second"),
            "samples_per_second_lowest": lowest,
            "samples_per_second_highest": highest,
            "memory_bytes": row.memory_bytes,
            "memory_kind": memory,
            "relative_speed": row.speed,
            "relative_memory": row.memory,
            "final_loss": row.median("final_loss"),
        }
    )


def _finite(record: dict[str, Any]) -> dict[str, Any]:
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()
    }


def _cells(row: Row) -> tuple[str, ...]:
    if row.outcome != "ok":
        return (row.name, f"{row.outcome}: {row.reason[:_REASON]}" if row.reason else row.outcome)
    figures: tuple[tuple[float | None, Callable[[float], str]], ...] = (
        (row.median("seconds"), "{:.2f} s".format),
        (row.median("samples_per_second"), rate),
        (row.speed, "{:.2f}".format),
        (row.memory_bytes, lambda value: f"{value / MIB:,.0f} MiB"),
        (row.memory, "{:.2f}".format),
        (row.median("final_loss"), "{:.4f}".format),
    )
    return (row.name, *("-" if value is None else text(value) for value, text in figures))


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    if len(cells) < len(widths):  # a reason takes the place of the figures
        return f"{cells[0]:<{widths[0]}}  {cells[1]}\n"
    rest = (f"{cell:>{width}}" for cell, width in zip(cells[1:], widths[1:], strict=True))
    return "  ".join([f"{cells[0]:<{widths[0]}}", *rest]) + "\n"
