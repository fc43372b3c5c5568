"""Dataclasses and named tuples from JSON: every value is checked against its annotation, and a wrong one is named.

pydantic takes 6 ms to read these annotations, and refuses names that are not UTF-8. Named tuples are the records of a
run directory: each rank reads them, so that they import nothing slow, and unknown keys, perhaps of a newer trainkit,
are ignored.
"""

from __future__ import annotations

import re
import types
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

PLAIN = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
DEEPEST = 8  # far more than facts and plans nest
HUGE = 1e300  # arithmetic with a larger number would overflow
LARGEST = 1 << 53  # of a whole number: a float is exact up to here


@lru_cache(maxsize=64)
def _hints(kind: Any) -> dict[str, Any]:
    """Cached, for annotations are texts that have to be evaluated."""
    return get_type_hints(kind, include_extras=True)


class DecodeError(ValueError):
    """A value that does not fit. The text names its key."""


class Between(NamedTuple):
    """Bounds of a number, both included: ``Annotated[int, Between(0, 9)]``."""

    least: float
    most: float

    def expected(self, value: Any) -> str:
        """What a value should be; empty if it fits."""
        return "" if self.least <= value <= self.most else f"{self.least:.15g} to {self.most:.15g}"


class Like(NamedTuple):
    """A text that matches the whole pattern; what: its description for people."""

    pattern: str
    what: str

    def expected(self, value: Any) -> str:
        return "" if re.fullmatch(self.pattern, value, re.DOTALL) else self.what


def finite(value: object, most: float = HUGE) -> float | None:
    """A number between -most and most, else None: a file of another program may have NaN, or any other value."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and -most < value < most else None  # type: ignore[operator, arg-type]


def whole(value: object) -> int | None:
    """A number of steps, bytes or the like, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < LARGEST else None


def decode(kind: Any, data: Any, place: str = "") -> Any:  # a branch for each kind of annotation
    """A value of type `kind` from builtins. Raises DecodeError with the dotted key of the first wrong value."""
    if place.count(".") > DEEPEST:
        raise _wrong(place, "nested less deeply", data)
    if place and hasattr(kind, "from_json"):  # it is not written as its fields
        return kind.from_json(data)
    if hasattr(kind, "__dataclass_fields__"):
        return data if isinstance(data, kind) else _dataclass(kind, data, place)
    if hasattr(kind, "_field_defaults"):
        if isinstance(data, list) and len(data) == len(kind._fields):  # as json.dumps writes one
            data = dict(zip(kind._fields, data, strict=True))
        return _named_tuple(kind, data, place)
    if kind is Any:
        return data
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        value = decode(arguments[0], data, place)
        for bound in arguments[1:]:
            if expected := bound.expected(value):
                raise _wrong(place, expected, data)
        return value
    if origin in {types.UnionType, Union}:
        if data is None and type(None) in arguments:
            return None
        return decode(next(each for each in arguments if each is not type(None)), data, place)
    if origin is Literal:
        if data not in arguments:
            raise _wrong(place, "one of " + ", ".join(map(str, arguments)), data)
        return data
    if origin is tuple:
        values = _checked((list, tuple), "a list", data, place)
        kinds = arguments[:1] * len(values) if arguments[1:] == (Ellipsis,) else arguments
        if len(values) != len(kinds):
            raise _wrong(place, f"a list of {len(kinds)}", data)
        return tuple(decode(each, values[index], f"{place}.{index}") for index, each in enumerate(kinds))
    if origin is Mapping:
        entries = _checked(Mapping, "a mapping", data, place).items()
        return {
            decode(arguments[0], key, place): decode(arguments[1], value, f"{place}.{key}") for key, value in entries
        }
    fits = isinstance(data, (int, float) if kind is float else kind)
    if kind in {int, float}:
        # Python counts true as 1; larger numbers are no amounts, and arithmetic with them would overflow.
        fits = fits and not isinstance(data, bool) and -(2**63) < data < 2**63
    if not fits:
        raise _wrong(place, PLAIN[kind], data)
    return kind(data)


def _named_tuple(kind: Any, data: Any, place: str) -> Any:
    given, prefix = _checked(Mapping, "a mapping", data, place), f"{place}." if place else ""
    for name in kind._fields:
        if name not in given and name not in kind._field_defaults:
            raise DecodeError(f"`{prefix}{name}` is missing")
    hints = _hints(kind)
    return kind(**{each: decode(hints[each], given[each], f"{prefix}{each}") for each in kind._fields if each in given})


def _dataclass(kind: Any, data: Any, place: str) -> Any:
    from dataclasses import MISSING, fields

    hints, given = _hints(kind), _checked(Mapping, "a mapping", data, place)
    prefix = f"{place}." if place else ""
    for name in given:
        if name not in hints:
            raise DecodeError(f"unknown key `{prefix}{name}`, perhaps of a newer trainkit")
    for each in fields(kind):
        if each.name not in given and each.default is MISSING and each.default_factory is MISSING:
            raise DecodeError(f"`{prefix}{each.name}` is missing")
    return kind(**{name: decode(hints[name], value, f"{prefix}{name}") for name, value in given.items()})


def _checked(kind: Any, expected: str, data: Any, place: str) -> Any:
    if not isinstance(data, kind):
        raise _wrong(place, expected, data)
    return data


def _wrong(place: str, expected: str, data: Any) -> DecodeError:
    shown = repr(data)
    return DecodeError(f"`{place}` must be {expected}, not {shown if len(shown) <= 60 else shown[:57] + '...'}")
