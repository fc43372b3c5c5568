"""How `program.args` become the words that a program is started with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def argument_words(arguments: Mapping[str, Any] | Sequence[Any]) -> list[str]:
    """The words of a list as they are; those of a mapping as flags.

    `key: value` becomes `--key value`, `true` a bare `--key`, `false` and `null` nothing, a list `--key a b`.
    """
    if not isinstance(arguments, Mapping):
        return [str(word) for word in arguments]
    return [word for name, value in arguments.items() for word in _words(f"--{name}", value)]


def _words(flag: str, value: Any) -> list[str]:
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    return [flag, *(str(each) for each in (value if isinstance(value, list) else [value]))]
