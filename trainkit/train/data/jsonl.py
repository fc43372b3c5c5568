"""Texts in JSON lines, one token per byte, packed end to end or padded; prompts are read and not predicted."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from trainkit.errors import TrainingError
from trainkit.recipe.schema import JsonlData, Recipe
from trainkit.train.data.source import IGNORED, Batch, Source
from trainkit.train.data.vocabulary import check_vocabulary


@dataclass(frozen=True, slots=True)
class Texts:
    """All texts as one row of bytes. predicted: which are targets. starts: each text's first byte, and the end."""

    ids: NDArray[np.uint8]
    predicted: NDArray[np.bool_]
    starts: NDArray[np.int64]


def open_source(recipe: Recipe, run_dir: Path) -> Source:
    """The source of a recipe whose `data.kind` is jsonl. TrainingError names the file and the line to blame."""
    data = cast("JsonlData", recipe.data)
    texts = read_texts(data)
    check_vocabulary(recipe, int(texts.ids.max(initial=0)), "the texts of data.path")
    spans = with_targets((packed if data.packing else padded)(texts, data.sequence_length), texts)
    if len(spans) < 2:
        raise TrainingError(
            f"data.path: {data.path} fills {len(spans)} samples of {data.sequence_length} tokens, and one for training "
            "and one for validation are the least",
            hint="lower data.sequence_length, or bring more text",
        )
    border = len(spans) - max(1, int(len(spans) * data.validation_fraction))
    train, validation = (JsonlSamples(texts, some, data.sequence_length) for some in (spans[:border], spans[border:]))
    count = len(texts.starts) - 1
    return Source(
        train,
        validation,
        f"{count:,} texts of {len(texts.ids):,} bytes",
        {"texts": count, "bytes": len(texts.ids)},
        highest=int(texts.ids.max()),
    )


def read_texts(data: JsonlData) -> Texts:
    """Every text of every file, in order."""
    ids, answers, ends = bytearray(), bytearray(), [0]
    for file in [data.path] if isinstance(data.path, str) else data.path:
        for prompt, text in _objects(Path(file).absolute(), data):
            ids += prompt + text
            # The first byte follows from nothing, least of all from the text before it.
            answers += bytes(len(prompt)) + b"\1" * len(text) if prompt else b"\0" + b"\1" * (len(text) - 1)
            ends.append(len(ids))
    return Texts(
        np.frombuffer(bytes(ids), dtype=np.uint8), np.frombuffer(bytes(answers), dtype=np.bool_), np.array(ends)
    )


def _objects(path: Path, data: JsonlData) -> Iterator[tuple[bytes, bytes]]:
    """Prompt ("" without one) and text of each line; blank lines are skipped."""
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    found = _parsed(line, path, number)
                    prompt = _text(found, data.prompt_field, path, number) if data.prompt_field else b""
                    yield prompt, _text(found, data.field, path, number)
    except OSError as error:
        raise TrainingError(f"data.path: {path} cannot be read: {error.strerror}") from error


def _parsed(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:  # UnicodeDecodeError too
        raise TrainingError(f"data.path: {path}:{number} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise TrainingError(f"data.path: {path}:{number} is not an object in braces")
    return found


def _text(found: dict[str, Any], field: str, path: Path, number: int) -> bytes:
    text = found.get(field)
    if not isinstance(text, str) or not text:
        state = "is empty" if text == "" else "is no text" if field in found else "is missing"
        raise TrainingError(f"data.path: {path}:{number}: field {field!r} {state}", hint=f"it has {', '.join(found)}")
    return text.encode("utf-8", "surrogatepass")


def packed(texts: Texts, length: int) -> NDArray[np.int64]:
    """(samples, 2): first byte and end of each sample, with the target of its last token; texts end to end."""
    starts = np.arange(math.ceil((len(texts.ids) - 1) / length)) * length
    return np.stack([starts, np.minimum(starts + length + 1, len(texts.ids))], axis=1)


def padded(texts: Texts, length: int) -> NDArray[np.int64]:
    """(samples, 2): first byte and end of each text, cut after `length` tokens and the target of the last."""
    starts, ends = texts.starts[:-1], texts.starts[1:]
    return np.stack([starts, np.minimum(starts + length + 1, ends)], axis=1)


def with_targets(spans: NDArray[np.int64], texts: Texts) -> NDArray[np.int64]:
    """The spans that hold something to predict: a prompt may fill a sample, and a text may be a single byte."""
    before = np.concatenate([[0], np.cumsum(texts.predicted)])
    kept: NDArray[np.int64] = spans[before[spans[:, 1]] > before[np.minimum(spans[:, 0] + 1, spans[:, 1])]]
    return kept


class JsonlSamples:
    """Samples of some spans of the texts; the rest of a sample that its span does not fill is not predicted."""

    def __init__(self, texts: Texts, spans: NDArray[np.int64], length: int) -> None:
        self._texts, self._spans, self._length = texts, spans, length

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, indices: Sequence[int]) -> Batch:
        tokens = np.zeros((len(indices), self._length), dtype=np.int64)
        targets = np.full((len(indices), self._length), IGNORED, dtype=np.int64)
        for row, index in enumerate(indices):
            start, stop = self._spans[index]
            ids, predicted = self._texts.ids[start:stop], self._texts.predicted[start + 1 : stop]
            tokens[row, : len(ids) - 1] = ids[:-1]
            targets[row, : len(ids) - 1] = np.where(predicted, ids[1:].astype(np.int64), IGNORED)
        counted = int(np.count_nonzero(targets != IGNORED))
        return Batch({"tokens": torch.from_numpy(tokens), "targets": torch.from_numpy(targets)}, counted)
