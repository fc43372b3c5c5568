"""Dataclasses from JSON: every value is checked against their own annotations, and a wrong one is named.

pydantic would do it too, but takes 6 ms to read these annotations and refuses names that are not UTF-8.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

PLAIN = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
_hints = lru_cache(maxsize=64)(get_type_hints)  # annotations are texts, which are costly to read
DEEPEST = 8  # far more than facts and plans nest


class DecodeError(ValueError):
    """A value that does not fit. The text is a sentence that names its place."""


def decode(kind: Any, data: Any, place: str = "") -> Any:
    """A value of type `kind` from builtins. Raises DecodeError, with the dotted place of the first wrong value."""
    if place.count(".") > DEEPEST:
        raise _wrong(place, "nested less deeply", data)
    if place and hasattr(kind, "from_json"):  # it is not written as its fields
        return kind.from_json(data)
    if is_dataclass(kind):
        return data if isinstance(data, kind) else _dataclass(kind, data, place)  # type: ignore[arg-type]
    origin, arguments = get_origin(kind), get_args(kind)
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
        return {_scalar(str, key, place): decode(arguments[1], value, f"{place}.{key}") for key, value in entries}
    return _scalar(kind, data, place)


def _dataclass(kind: Any, data: Any, place: str) -> Any:
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
