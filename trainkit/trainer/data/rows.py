"""Rows with named fields, each with its place for messages."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainkit.errors import TrainingError
from trainkit.recipe.schema import DatasetData, JsonlData
from trainkit.trainer.data.chat_template import ChatError
from trainkit.trainer.data.encoding import Encoder
from trainkit.trainer.data.source import NO_LABEL


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
            raise self.wrong(f"field {field!r} is no label: expected a whole number or a name, not {found!r}")
        if isinstance(found, int) and found < 0:
            raise self.wrong(f"field {field!r} has label {found}, and labels begin at 0")
        return found

    def ids(self, field: str) -> Sequence[int]:
        """The whole numbers in a field. TrainingError when there is anything else."""
        found = self.items(field)
        odd = next((each for each in found if not isinstance(each, int) or isinstance(each, bool)), None)
        if odd is not None:
            raise self.wrong(f"field {field!r} holds {odd!r}: expected whole numbers")
        return found

    def _given(self, field: str) -> Any:
        if field not in self.fields:
            raise self.wrong(f"field {field!r} is missing")
        return self.fields[field]


def _kind(value: Any) -> str:
    """What a value is, in JSON's terms."""
    kinds = ((bool, "true or false"), (int | float, "a number"), (str, "a text"), (list, "a list"), (dict, "an object"))
    return next((term for kind, term in kinds if isinstance(value, kind)), "null")


def json_lines(paths: Sequence[Path]) -> Iterator[Row]:
    """The objects in the lines of some files; blank lines are skipped. TrainingError for a line that is none."""
    for path in paths:
        try:
            with path.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield _parsed(line, f"{path}:{number}")
        except OSError as error:
            raise TrainingError(f"data.path: {path} cannot be read: {error.strerror}") from error


def _parsed(line: bytes, place: str) -> Row:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError too
        raise TrainingError(f"data.path: {place} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise TrainingError(f"data.path: {place} is not an object in braces")
    return Row(place, found)


Rows = JsonlData | DatasetData  # the sections whose samples come from rows


@dataclass(frozen=True, slots=True)
class Texts:
    """All texts as one row of token ids. predicted: which are targets. starts: each text's first token, and the end."""

    ids: NDArray[np.integer[Any]]
    predicted: NDArray[np.bool_]
    starts: NDArray[np.int64]
    highest: int  # token id; -1 without any
    where: str  # the place of the highest
    labels: Sequence[int | str] = ()  # of each text, where they are labelled
    label_places: Sequence[str] = ()


@dataclass(slots=True)
class Reading:
    """How the rows of a data set are read. limit: tokens that a text may have at most, its ends included."""

    data: Rows
    encoder: Encoder
    final: bool  # whether a text's end is to be learned
    limit: int | None = None

    def texts(self, rows: Iterable[Row]) -> Texts:
        """Every row. TrainingError names the place of one that does not hold what the recipe names."""
        # A corpus is held in memory: four bytes a token, or one, where Python's integers would take 28.
        small = self.encoder.unit == "bytes" and not self.data.tokens_field
        ids, answers, ends = array("B" if small else "I"), bytearray(), [0]
        highest, where = -1, ""
        labels: list[int | str] = []
        places: list[str] = []
        for row in rows:
            found, predicted = self._tokens(row)
            if max(found) > highest:
                highest, where = max(found), row.place
            ids.extend(found)
            answers += b"\0" + predicted[1:]  # the first token follows from nothing
            ends.append(len(ids))
            if self.data.label_field:
                labels.append(row.label(self.data.label_field))
                places.append(row.place)
        mask = np.frombuffer(bytes(answers), dtype=np.bool_)
        kind = np.uint8 if small else np.uint32
        return Texts(np.frombuffer(ids.tobytes(), dtype=kind), mask, np.array(ends), highest, where, labels, places)

    def _tokens(self, row: Row) -> tuple[Sequence[int], bytes]:
        """Ids, and a byte for each: 1 where it is predicted."""
        encoder, data = self.encoder, self.data
        if data.messages_field:
            return self._chat(row, data.messages_field)
        if data.tokens_field:
            return self._ready(row, data.tokens_field)
        opening, closing = encoder.opening(), encoder.closing(final=self.final)
        prompt = encoder.plain(row.text(data.prompt_field)) if data.prompt_field else []
        text = encoder.plain(row.text(data.field))
        if self.limit is not None:
            text = text[: max(0, self.limit - len(opening) - len(closing))]
        before = [*opening, *prompt]
        return [*before, *text, *closing], bytes(len(before)) + b"\1" * (len(text) + len(closing))

    def _chat(self, row: Row, name: str) -> tuple[Sequence[int], bytes]:
        messages = row.items(name)
        if not all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages):
            raise row.wrong(f"field {name!r} is no chat: expected a list of {{role, content}}")
        try:
            ids, predicted = self.encoder.chat(messages)
        except ChatError as error:
            raise row.wrong(f"field {name!r}: {error}") from error
        return ids, bytes(predicted)

    def _ready(self, row: Row, name: str) -> tuple[Sequence[int], bytes]:
        ids = row.ids(name)
        if min(ids) < 0 or max(ids) >= 2**32:
            raise row.wrong(f"field {name!r} holds {min(ids) if min(ids) < 0 else max(ids)}, which is no token id")
        if not self.data.targets_field:
            return ids[: self.limit], b"\1" * len(ids[: self.limit])
        targets = row.ids(self.data.targets_field)
        if len(targets) != len(ids):
            raise row.wrong(f"{len(targets)} targets in {self.data.targets_field!r} for {len(ids)} token ids")
        for place, (target, token) in enumerate(zip(targets, ids, strict=True)):
            if target not in (token, NO_LABEL):
                raise row.wrong(
                    f"target {place} in {self.data.targets_field!r} is {target}, which is neither the token id there "
                    f"({token}) nor {NO_LABEL}"
                )
        return ids, bytes(target != NO_LABEL for target in targets)
