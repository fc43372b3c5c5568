"""What a plain YAML scalar means: the YAML 1.1 rules, floats without a dot, and the traps in those rules."""

from __future__ import annotations

import re
from collections.abc import Callable

Scalar = str | int | float | bool | None

_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_WORDS = {
    **dict.fromkeys(("true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON"), True),
    **dict.fromkeys(("false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF"), False),
}
_TRUE_FALSE = frozenset({"true", "True", "TRUE", "false", "False", "FALSE"})
# Longer digit strings are no setting of anything, and turning them into numbers costs quadratic time.
_MAX_DIGITS = 400


def _sexagesimal(text: str) -> int | float:
    sign = -1 if text.startswith("-") else 1
    total: float = 0
    for part in text.lstrip("+-").replace("_", "").split(":"):
        total = total * 60 + (float(part) if "." in part else int(part))
    return sign * total


def _integer(base: int) -> Callable[[str], int]:
    return lambda text: int(text.replace("_", ""), base)


# YAML 1.1 requires a dot and a signed exponent; `3e-4` is a number to everybody else.
_FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?")
_SPECIAL_FLOATS = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
# The first match counts: what begins with a zero is octal to YAML 1.1 (010 is 8), a lone 0 is not.
_NUMBERS: tuple[tuple[re.Pattern[str], Callable[[str], int | float]], ...] = (
    (re.compile(r"[-+]?(?:0|[1-9][0-9_]*)"), _integer(10)),
    (re.compile(r"[-+]?0[0-7_]+"), _integer(8)),
    (_FLOAT, lambda text: float(text.replace("_", ""))),
    (re.compile(r"[-+]?0x[0-9a-fA-F_]*[0-9a-fA-F][0-9a-fA-F_]*"), _integer(16)),
    (re.compile(r"[-+]?0b[01_]*[01][01_]*"), _integer(2)),
    (re.compile(r"[-+]?[1-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?"), _sexagesimal),
    (_SPECIAL_FLOATS, lambda text: float(text.replace(".", ""))),
)  # fmt: skip
# Most scalars are words: the patterns are tried only on what may be a number.
_NUMBER_START = frozenset("-+.0123456789")


def read_scalar(text: str) -> Scalar:
    """The value of a plain (unquoted) scalar. Dates stay text. ValueError for a number of absurd length."""
    if text in _NULL:
        return None
    if text in _WORDS:
        return _WORDS[text]
    if text[0] in _NUMBER_START:
        for pattern, convert in _NUMBERS:
            if pattern.fullmatch(text):
                if len(text) > _MAX_DIGITS:
                    raise ValueError(f"a number of {len(text)} characters")
                return convert(text)
    return text


def trap(text: str, value: Scalar) -> tuple[str, str] | None:
    """What a reader of this plain scalar may not expect, and what to write instead; None where there is no surprise."""
    if isinstance(value, bool):
        if text in _TRUE_FALSE:
            return None
        word = "true" if value else "false"
        return f"`{text}` is read as {word}", f'write {word}, or "{text}" in quotes if the word is meant'
    if isinstance(value, (int, float)) and ":" in text:
        return f"`{text}` is read as the number {value} (base 60)", f'write "{text}" in quotes, or the number itself'
    if isinstance(value, int) and re.match(r"[-+]*0[0-7_]", text):
        hint = f'write {text.lstrip("+-0") or "0"}, or "{text}" in quotes if the digits are meant'
        return f"`{text}` is read as the number {value} (base 8)", hint
    return None
