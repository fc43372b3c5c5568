"""How far a run is, in one line: pure functions over its metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

BAR = 12  # characters
NEWEST = 0.1  # weight of the latest pace in the smoothed one


@dataclass(frozen=True, slots=True)
class Progress:
    """What the metrics show so far. Times are seconds; seen is a monotonic clock's."""

    total: int | None = None
    step: int = 0
    latest: Mapping[str, Any] | None = None
    seconds_per_step: float | None = None  # smoothed: the first records count alike, later ones a tenth each
    paces: int = 0  # records that it was computed from
    seen: float = 0.0

    def take(self, record: Mapping[str, Any], now: float) -> Progress:
        """The progress after one more record of metrics.jsonl."""
        if record.get("event") == "start":
            total = record.get("steps")
            return replace(self, total=total if isinstance(total, int) else None)
        step = record.get("step")
        if not isinstance(step, int) or "loss" not in record:
            return self
        steps, seconds = step - self.step, record.get("seconds")
        known = replace(self, step=step, latest=record, seen=now)
        if not self.latest or steps <= 0 or not isinstance(seconds, int | float):
            return known
        before, paces = self.seconds_per_step or 0.0, self.paces + 1
        # Whole steps between two records: a run may log every n-th.
        pace = before + (seconds / steps - before) * max(1 / paces, NEWEST)
        return replace(known, seconds_per_step=pace, paces=paces)

    def remaining(self, now: float) -> float | None:
        """Seconds to the last step at the latest pace; None while that is unknown."""
        if self.total is None or self.seconds_per_step is None:
            return None
        return max(0.0, (self.total - self.step) * self.seconds_per_step - (now - self.seen))


def live_line(progress: Progress, now: float, width: int) -> str:
    """The line for a terminal of so many columns. When it is narrow the bar goes first, then parts from the right."""
    parts = _parts(progress.latest or {})
    remaining = progress.remaining(now)
    if remaining is not None:
        parts.insert(1, f"{duration(remaining)} left")
    head = f"step {progress.step}/{progress.total}" if progress.total else f"step {progress.step}"
    candidates = ["  ".join([head, *parts[:kept]]) for kept in range(len(parts), -1, -1)]
    if progress.total:
        filled = min(BAR, BAR * progress.step // progress.total)
        candidates.insert(0, f"[{'#' * filled}{'.' * (BAR - filled)}] {candidates[0]}")
    return next((line for line in candidates if len(line) < width), head[: max(0, width - 1)])


def plain_line(progress: Progress, record: Mapping[str, Any]) -> str:
    """The line for a log, from one record; empty for records that say nothing of progress."""
    step = record.get("step")
    if not isinstance(step, int):
        return ""
    head = f"step {step}/{progress.total}" if progress.total else f"step {step}"
    if "eval_loss" in record:
        return f"{head}  evaluation loss {_number(record['eval_loss'])}"
    return "  ".join([head, *_parts(record)]) if "loss" in record else ""


def _parts(record: Mapping[str, Any]) -> list[str]:
    parts = [f"loss {_number(record['loss'])}"] if "loss" in record else []
    unit = next((unit for unit in ("tokens", "samples") if record.get(f"{unit}_per_second")), None)
    if unit is not None:
        parts.append(f"{count(record[f'{unit}_per_second'])} {unit}/s")
    if record.get("memory_bytes"):
        parts.append(size(record["memory_bytes"]))
    return parts


def _number(value: object) -> str:
    """Four decimals; metrics hold null for what is infinite or no number."""
    return f"{value:.4f}" if isinstance(value, int | float) else "not finite"


def count(value: float) -> str:
    """A rate with a sensible number of digits: ``7.12``, ``431``, ``52.3k``."""
    if value >= 10_000:
        return f"{value / 1000:.1f}k" if value < 1e6 else f"{value / 1e6:.2f}M"
    return f"{value:.0f}" if value >= 100 else f"{value:.2f}"


def size(value: float) -> str:
    """Bytes as MiB or GiB."""
    return f"{value / 2**20:.0f} MiB" if value < 10 * 2**30 else f"{value / 2**30:.1f} GiB"


def duration(seconds: float) -> str:
    """``42 s``, ``3:07``, ``1:02:30``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
