"""The space of a sweep, read from overrides: which settings take several values, and which values.

Lists ``a,b,c``, ``[a, b, c]`` of a setting that is no list, ``range(stop)``, ``range(start, stop, step)``; for samplers
that draw: ``uniform(0, 0.3)``, ``log(1e-5, 1e-3)``, ``int(1, 8)``, ends included.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, cast

from trainkit.errors import Diagnostic, Origin, UsageError
from trainkit.recipe.assignment import read_value
from trainkit.recipe.flags import assignments
from trainkit.recipe.schema.fields import schema
from trainkit.recipe.validate import accepts

Value = str | int | float  # of an axis at one point; texts are written as they were typed
Point = Mapping[str, Value]  # by the names of the axes
MOST_POINTS = 10_000  # of a grid
_CALL = re.compile(r"(range|uniform|log|int)\((.*)\)", re.DOTALL)
_OPENING, _CLOSING = "[{(", "]})"


@dataclass(frozen=True, slots=True)
class Interval:
    """Numbers between two ends, both included: as likely everywhere, or by their logarithms; or whole numbers."""

    kind: Literal["uniform", "log", "int"]
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.kind}({self.low:g}, {self.high:g})"


@dataclass(frozen=True, slots=True)
class Axis:
    """A setting with several values. name: its key, with `+` or `!` behind it as in an override."""

    name: str
    values: tuple[str, ...] = ()
    interval: Interval | None = None

    def __str__(self) -> str:
        return f"{self.name}={self.interval or ','.join(self.values)}"

    @property
    def ends(self) -> tuple[Value, ...]:
        """What stands for all values of it where each is validated: every one, or the ends of the interval."""
        if self.interval is None:
            return self.values
        ends = (self.interval.low, self.interval.high)
        return tuple(map(int, ends)) if self.interval.kind == "int" else ends


@dataclass(frozen=True, slots=True)
class Space:
    """The axes in the order of the line, and the overrides with one value."""

    axes: tuple[Axis, ...]
    fixed: tuple[str, ...]

    @property
    def size(self) -> int | None:
        """How many points it has; None where an axis is an interval."""
        return None if any(axis.interval for axis in self.axes) else math.prod(len(axis.values) for axis in self.axes)

    def grid(self) -> Iterator[Point]:
        """Every point; the last axis changes fastest."""
        names = [axis.name for axis in self.axes]
        yield from (dict(zip(names, values, strict=True)) for values in product(*(axis.values for axis in self.axes)))

    def corners(self) -> Iterator[Point]:
        """For each value of each axis, and each end of an interval, a point that has it; together, no two alike."""
        first = {axis.name: axis.ends[0] for axis in self.axes}
        yield first
        yield from ({**first, axis.name: value} for axis in self.axes for value in axis.ends[1:])


def overrides_of(point: Point) -> list[str]:
    """A point as overrides of `trainkit run`."""
    return [f"{name}={value}" for name, value in point.items()]


def named(point: Point) -> str:
    """A point for people: keys by their last part where that is clear, numbers short."""
    last = [name.rstrip("+!").rpartition(".")[2] for name in point]
    names = [short if last.count(short) == 1 else name for name, short in zip(point, last, strict=True)]
    return " ".join(f"{name}={shown(value)}" for name, value in zip(names, point.values(), strict=True))


def shown(value: Value) -> str:
    """A value for people: four digits of a drawn number."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def read_space(words: Sequence[str]) -> Space:
    """The space that overrides describe. Raises UsageError with everything that is wrong, and where nothing varies."""
    axes: list[Axis] = []
    fixed: list[str] = []
    wrong: list[Diagnostic] = []
    keys: list[str] = []
    for typed, key, modifier, text in assignments(words):
        try:
            axis = _axis(key, modifier, text) if key else None
        except ValueError as error:
            what, _, hint = str(error).partition("\n")
            wrong.append(Diagnostic("error", what, key, origin=_origin(" ".join(typed)), hint=hint))
            continue
        if axis is None:
            fixed += typed
        else:
            axes.append(axis)
        keys += [key] if key else []
    for axis in axes:
        key = axis.name.rstrip("+!")
        if keys.count(key) > 1:
            wrong.append(Diagnostic("error", f"{key} is given twice", key, hint="give its values once: a,b,c"))
    if wrong:
        raise UsageError(dict.fromkeys(wrong))
    if not axes:
        hint = "give one several: optimizer.lr=1e-4,3e-4 or train.seed=range(3); for a single run: `trainkit run`"
        raise UsageError("no setting has several values", hint=hint)
    return Space(tuple(axes), tuple(fixed))


def _axis(key: str, modifier: str, text: str) -> Axis | None:
    """The axis that a value describes; None for a single value. ValueError with what is wrong, and a hint below."""
    name, stripped = f"{key}{modifier}", text.strip()
    if call := _CALL.fullmatch(stripped):
        kind, arguments = call[1], [each.strip() for each in call[2].split(",")]
        if kind == "range":
            return Axis(name, tuple(map(str, _range(key, arguments))))
        return Axis(name, interval=_interval(key, kind, arguments))
    setting = schema().setting(key)
    is_list = setting is not None and not accepts(setting.annotation, list)
    if is_list and stripped.startswith("[") and stripped.endswith("]"):
        stripped = stripped[1:-1]
    parts = [each.strip() for each in _parts(stripped)]
    if len(parts) == 1:
        return None
    if "" in parts:
        raise ValueError(f"{key} has an empty value between commas\nwrite a,b,c; a value with commas of its own: 'a,b'")
    origin = _origin(f"{name}={text}")
    values = [str(read_value(key, part, origin)[0]) for part in parts]
    for position, value in enumerate(values):
        if value in values[:position]:
            raise ValueError(f"{key} has {parts[position]} twice\nremove one of them: nothing is trained twice")
    return Axis(name, tuple(parts))


def _parts(text: str) -> list[str]:
    """A text at its commas, but for those within quotes and brackets."""
    parts, depth, quote = [""], 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in _OPENING:
            depth += 1
        elif char in _CLOSING:
            depth -= 1
        elif char == "," and depth == 0:
            parts.append("")
            continue
        parts[-1] += char
    return parts


def _range(key: str, arguments: Sequence[str]) -> range:
    try:
        found = range(*map(int, arguments))
    except (ValueError, TypeError) as error:
        what = f"{key}: range({', '.join(arguments)}) is not a range of whole numbers"
        raise ValueError(f"{what}\nwrite range(3), range(1, 4) or range(0, 100, 10)") from error
    if len(found) > MOST_POINTS:
        raise ValueError(f"{key}: range({', '.join(arguments)}) has {len(found)} values\nwrite int(1, 8) to draw some")
    if len(found) < 2:
        how = "no value" if not found else "one value"
        raise ValueError(f"{key}: range({', '.join(arguments)}) has {how}\nwrite range(3) for 0, 1 and 2")
    return found


def _interval(key: str, kind: str, arguments: Sequence[str]) -> Interval:
    given = f"{kind}({', '.join(arguments)})"
    try:
        low, high = map(int if kind == "int" else float, arguments)
    except ValueError as error:
        example = {"uniform": "uniform(0, 0.3)", "log": "log(1e-5, 1e-3)", "int": "int(1, 8)"}[kind]
        numbers = "two whole numbers" if kind == "int" else "two numbers"
        raise ValueError(f"{key}: {given} needs {numbers}\nwrite {example}") from error
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"{key}: {given} has no numbers between its ends\nwrite the lower one first")
    if kind == "log" and low <= 0:
        raise ValueError(f"{key}: {given} begins at {low:g}, which has no logarithm\nbegin above 0, or write uniform")
    return Interval(cast("Literal['uniform', 'log', 'int']", kind), low, high)


def _origin(typed: str) -> Origin:
    return Origin("flag", 0, typed[:200], length=max(len(typed[:200]), 1), text=typed[:200])
