"""The rows of a comparison as text for people, as CSV, and as plain data for JSON."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trainkit.bench.rows import MEMORY_HEAD, MEMORY_MEANING, MemoryKind, Row
from trainkit.text import MIB

_REASON = 100  # characters of a failure's reason in the table; files hold all of it


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


def mebibytes(value: float) -> str:
    """``812 MiB``."""
    return f"{value / MIB:,.0f} MiB"


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
            "seconds": row.seconds,
            "samples_per_second": row.samples_per_second,
            "samples_per_second_lowest": lowest,
            "samples_per_second_highest": highest,
            "memory_bytes": row.memory_bytes,
            "memory_kind": memory,
            "relative_speed": row.speed,
            "relative_memory": row.memory,
            "final_loss": row.final_loss,
        }
    )


def _finite(record: dict[str, Any]) -> dict[str, Any]:
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()
    }


def _cells(row: Row) -> tuple[str, ...]:
    if row.outcome != "ok":
        return (row.name, f"{row.outcome}: {row.reason[:_REASON]}" if row.reason else row.outcome)
    return (
        row.name,
        _shown(row.seconds, "{:.2f} s".format),
        _shown(row.samples_per_second, rate),
        _shown(row.speed, "{:.2f}".format),
        _shown(row.memory_bytes, mebibytes),
        _shown(row.memory, "{:.2f}".format),
        _shown(row.final_loss, "{:.4f}".format),
    )


def _shown(value: float | None, text: Callable[[float], str]) -> str:
    return "-" if value is None else text(value)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    if len(cells) < len(widths):  # a reason takes the place of the figures
        return f"{cells[0]:<{widths[0]}}  {cells[1]}\n"
    rest = (f"{cell:>{width}}" for cell, width in zip(cells[1:], widths[1:], strict=True))
    return "  ".join([f"{cells[0]:<{widths[0]}}", *rest]) + "\n"
