"""Rows with named fields, each with its place for messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainkit.errors import TrainingError


class Row(NamedTuple):
    """One row of a data set. place: file and line, or folder and number."""

    place: str
    fields: dict[str, Any]

    def wrong(self, what: str) -> TrainingError:
        """An error that names this row and the fields that it has."""
        names = ", ".join(self.fields) or "no field"
        return TrainingError(f"data.path: {self.place}: {what}", hint=f"the row has {names}")

    def text(self, field: str) -> str:
        """The text of a field. TrainingError when there is none."""
        found = self._given(field)
        if not isinstance(found, str) or not found:
            raise self.wrong(f"field {field!r} is {'empty' if found == '' else f'no text but {_kind(found)}'}")
        return found

    def items(self, field: str) -> Sequence[Any]:
        """The list in a field. TrainingError when there is none."""
        found = self._given(field)
        if not isinstance(found, list) or not found:
            raise self.wrong(f"field {field!r} is {'empty' if found == [] else f'no list but {_kind(found)}'}")
        return found

    def label(self, field: str) -> int | str:
        """The label in a field, a number from 0 on or a name. TrainingError when there is none."""
        found = self._given(field)
        if isinstance(found, bool) or not isinstance(found, int | str) or found == "":
            raise self.wrong(f"field {field!r} is no label: a whole number or a name is wanted, not {found!r}")
        if isinstance(found, int) and found < 0:
            raise self.wrong(f"field {field!r} has label {found}, and labels begin at 0")
        return found

    def ids(self, field: str) -> Sequence[int]:
        """The whole numbers in a field. TrainingError when there is anything else."""
        found = self.items(field)
        odd = next((each for each in found if not isinstance(each, int) or isinstance(each, bool)), None)
        if odd is not None:
            raise self.wrong(f"field {field!r} holds {odd!r}, and whole numbers are wanted")
        return found

    def _given(self, field: str) -> Any:
        if field not in self.fields:
            raise self.wrong(f"field {field!r} is missing")
        return self.fields[field]


def _kind(value: Any) -> str:
    """What a value is, in JSON's words."""
    kinds = ((bool, "true or false"), (int | float, "a number"), (str, "a text"), (list, "a list"), (dict, "an object"))
    return next((words for kind, words in kinds if isinstance(value, kind)), "null")


def json_lines(paths: Sequence[Path]) -> Iterator[Row]:
    """The objects in the lines of some files; blank lines are skipped. TrainingError for a line that is none."""
    for path in paths:
        try:
            with path.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield Row(f"{path}:{number}", _parsed(line, f"{path}:{number}"))
        except OSError as error:
            raise TrainingError(f"data.path: {path} cannot be read: {error.strerror}") from error


def _parsed(line: bytes, place: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError too
        raise TrainingError(f"data.path: {place} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise TrainingError(f"data.path: {place} is not an object in braces")
    return found
