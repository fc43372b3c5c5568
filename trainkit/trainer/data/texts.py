"""Rows turned into token ids: texts, prompts with answers, chats, labelled texts, or ids that are there already."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainkit.recipe.schema import DatasetData, JsonlData
from trainkit.trainer.data.chat_template import ChatError
from trainkit.trainer.data.encoding import Encoder
from trainkit.trainer.data.rows import Row

Rows = JsonlData | DatasetData  # the sections whose samples come from rows
_NOT_PREDICTED = -100  # among target ids, as models of transformers have it


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
        """Every row. TrainingError names the place of one that does not hold what the recipe says."""
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
            answers += predicted
            ends.append(len(ids))
            if self.data.label_field:
                labels.append(row.label(self.data.label_field))
                places.append(row.place)
        mask = np.frombuffer(bytes(answers), dtype=np.bool_)
        kind = np.uint8 if small else np.uint32
        return Texts(np.frombuffer(ids.tobytes(), dtype=kind), mask, np.array(ends), highest, where, labels, places)

    def _tokens(self, row: Row) -> tuple[Sequence[int], bytes]:
        """Ids, and a byte for each: 1 where it is predicted. The first token follows from nothing."""
        data = self.data
        if data.messages_field:
            ids, answers = self._chat(row, data.messages_field)
        elif data.tokens_field:
            ids, answers = self._ready(row, data.tokens_field)
        else:
            ids, answers = self._written(row)
        return ids, b"\0" + answers[1:]

    def _written(self, row: Row) -> tuple[Sequence[int], bytes]:
        encoder, data = self.encoder, self.data
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
            raise row.wrong(f"field {name!r} is no chat: a list of {{role, content}} is wanted")
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
            raise row.wrong(f"{len(targets)} targets in {self.data.targets_field!r} stand beside {len(ids)} token ids")
        for place, (target, token) in enumerate(zip(targets, ids, strict=True)):
            if target not in (token, _NOT_PREDICTED):
                raise row.wrong(
                    f"target {place} in {self.data.targets_field!r} is {target}, which is neither the token id there "
                    f"({token}) nor {_NOT_PREDICTED}"
                )
        return ids, bytes(target != _NOT_PREDICTED for target in targets)
