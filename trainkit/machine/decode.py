"""Dataclasses from JSON: every value is checked against their own annotations, and a wrong one is named."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from trainkit.errors import UsageError

NUMBERS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
DEEPEST = 8  # far more than facts nest


def decode(kind: Any, data: Any, place: str) -> Any:
    """A value of type `kind` from builtins. place: dotted path for the message of the UsageError."""
    if place.count(".") > DEEPEST:
        raise _wrong(place, "a value that is nested less deeply", data)
    if is_dataclass(kind):
        return _dataclass(kind, data, place)
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
        if not isinstance(data, Mapping):
            raise _wrong(place, "a mapping", data)
        return {_plain(str, key, place): decode(arguments[1], value, f"{place}.{key}") for key, value in data.items()}
    return _plain(kind, data, place)


def _dataclass(kind: Any, data: Any, place: str) -> Any:
    if not isinstance(data, Mapping):
        raise _wrong(place, "a mapping", data)
    hints = _hints(kind)
    unknown = [str(name) for name in data if name not in hints]
    if unknown:
        raise UsageError(f"facts: unknown key `{_under(place, unknown[0])}`", hint="was it made by a newer trainkit?")
    missing = [each.name for each in fields(kind) if _required(each) and each.name not in data]
    if missing:
        raise UsageError(f"facts: `{_under(place, missing[0])}` is missing", hint="make the facts again there")
    return kind(**{name: decode(hints[name], value, _under(place, name)) for name, value in data.items()})


def _tuple(arguments: tuple[Any, ...], data: Any, place: str) -> tuple[Any, ...]:
    if not isinstance(data, list | tuple):
        raise _wrong(place, "a list", data)
    if arguments[1:] == (Ellipsis,):
        return tuple(decode(arguments[0], value, f"{place}.{number}") for number, value in enumerate(data))
    if len(data) != len(arguments):
        raise _wrong(place, f"a list of {len(arguments)}", data)
    pairs = zip(arguments, data, strict=True)
    return tuple(decode(each, value, f"{place}.{number}") for number, (each, value) in enumerate(pairs))


def _plain(kind: Any, data: Any, place: str) -> Any:
    number = kind in {int, float} and isinstance(data, bool)
    if number or not (isinstance(data, kind) or (kind is float and isinstance(data, int))):
        raise _wrong(place, NUMBERS[kind], data)
    if kind in {int, float} and not -(2**63) < data < 2**63:  # no such amount exists, and arithmetic would overflow
        raise _wrong(place, NUMBERS[kind], data)
    return kind(data)


def _required(each: Any) -> bool:
    return each.default is MISSING and each.default_factory is MISSING


@lru_cache(maxsize=32)
def _hints(kind: Any) -> Mapping[str, Any]:
    return get_type_hints(kind)


def _under(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _wrong(place: str, wanted: str, data: Any) -> UsageError:
    shown = repr(data)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return UsageError(f"facts: `{place}` should be {wanted}, and is {shown}", hint="`trainkit facts` shows the form")
