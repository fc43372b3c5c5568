"""What the summary says of steps that were watched: time by groups of operators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def profile_rows(profile: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    """A row for forward, backward and the rest, and one for the trace file. Times are for one step."""
    if not profile:
        return
    steps = profile["steps"]
    for phase, groups in profile["operators"].items():
        yield f"Operators, {phase}", _shares(groups, steps)
    yield "Profiled", f"{steps} step{'s' if steps != 1 else ''}, {profile['seconds'] / steps:.4f} s each"
    if profile["trace"]:
        yield "Trace", profile["trace"]


def _shares(groups: Mapping[str, float], steps: int) -> str:
    whole = sum(groups.values())
    shares = ", ".join(f"{seconds / whole:.1%} {group}" for group, seconds in groups.items()) if whole else "none"
    return f"{whole / steps:.4f} s: {shares}"
