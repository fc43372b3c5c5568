"""Dataclasses and named tuples from JSON: every value is checked against its annotation, and a wrong one is named.

pydantic would do it too, but takes 6 ms to read these annotations and refuses names that are not UTF-8. Named tuples
are the records of a run directory: each rank reads them, so that nothing slow to load is imported for them, and keys
that they do not have, perhaps of a newer trainkit, are ignored.
"""

from __future__ import annotations

import re
import types
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

PLAIN = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


@lru_cache(maxsize=64)
def _hints(kind: Any) -> dict[str, Any]:
    """Annotations are texts, which are costly to read."""
    return get_type_hints(kind, include_extras=True)


DEEPEST = 8  # far more than facts and plans nest


class DecodeError(ValueError):
    """A value that does not fit. The text is a sentence that names its place."""


class Between(NamedTuple):
    """Bounds of a number, both included: ``Annotated[int, Between(0, 9)]``."""

    least: float
    most: float

    def expected(self, value: Any) -> str:
        """What a value should be that does not fit; empty for one that does."""
        return "" if self.least <= value <= self.most else f"{self.least:.15g} to {self.most:.15g}"


class Like(NamedTuple):
    """A text that the whole of a pattern describes; what: in words."""

    pattern: str
    what: str

    def expected(self, value: Any) -> str:
        """What a value should be that does not fit; empty for one that does."""
        return "" if re.fullmatch(self.pattern, value, re.DOTALL) else self.what


def decode(kind: Any, data: Any, place: str = "") -> Any:  # a branch for each kind of annotation
    """A value of type `kind` from builtins. Raises DecodeError, with the dotted place of the first wrong value."""
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
        return _tuple(arguments, data, place)
    if origin is Mapping:
        entries = _checked(Mapping, "a mapping", data, place).items()
        return {
            decode(arguments[0], key, place): decode(arguments[1], value, f"{place}.{key}") for key, value in entries
        }
    return _scalar(kind, data, place)


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


def _tuple(arguments: tuple[Any, ...], data: Any, place: str) -> tuple[Any, ...]:
    values = _checked((list, tuple), "a list", data, place)
    if arguments[1:] == (Ellipsis,):
        arguments = arguments[:1] * len(values)
    if len(values) != len(arguments):
        raise _wrong(place, f"a list of {len(arguments)}", data)
    pairs = zip(arguments, values, strict=True)
    return tuple(decode(each, value, f"{place}.{position}") for position, (each, value) in enumerate(pairs))


def _scalar(kind: Any, data: Any, place: str) -> Any:
    fits = isinstance(data, (int, float) if kind is float else kind)
    if kind in {int, float}:
        # Python counts true as 1; and no amount is that large, while arithmetic with it would overflow.
        fits = fits and not isinstance(data, bool) and -(2**63) < data < 2**63
    if not fits:
        raise _wrong(place, PLAIN[kind], data)
    return kind(data)


def _checked(kind: Any, expected: str, data: Any, place: str) -> Any:
    if not isinstance(data, kind):
        raise _wrong(place, expected, data)
    return data


def _wrong(place: str, expected: str, data: Any) -> DecodeError:
    shown = repr(data)
    return DecodeError(f"`{place}` must be {expected}, not {shown if len(shown) <= 60 else shown[:57] + '...'}")
