"""Samples out of texts: for language models packed or padded, for masked ones whole, for classifiers with labels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from trainkit.trainer.data.source import IGNORED, Batch
from trainkit.trainer.data.texts import Texts

Spans = NDArray[np.int64]  # (samples, 2): first token and end of each sample


def packed(texts: Texts, length: int, ahead: int = 1) -> Spans:
    """Texts end to end. ahead: tokens beyond a sample that its targets reach."""
    starts = np.arange(math.ceil((len(texts.ids) - ahead) / length)) * length
    return np.stack([starts, np.minimum(starts + length + ahead, len(texts.ids))], axis=1)


def padded(texts: Texts, length: int, ahead: int = 1) -> Spans:
    """A sample for each text, cut after `length` tokens and the target of the last."""
    starts, ends = texts.starts[:-1], texts.starts[1:]
    return np.stack([starts, np.minimum(starts + length + ahead, ends)], axis=1)


def with_targets(spans: Spans, texts: Texts) -> Spans:
    """The spans that hold something to predict: a prompt may fill a sample, and a text may be a single byte."""
    before = np.concatenate([[0], np.cumsum(texts.predicted)])
    kept: Spans = spans[before[spans[:, 1]] > before[np.minimum(spans[:, 0] + 1, spans[:, 1])]]
    return kept


class NextTokens:
    """Samples of which the next tokens are predicted; what a span does not fill is padding and not predicted.

    There is no attention mask: padding stands at the end, where no token before it looks.
    """

    def __init__(self, texts: Texts, spans: Spans, length: int, padding: int) -> None:
        self._texts, self._spans, self._length, self._padding = texts, spans, length, padding

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, indices: Sequence[int]) -> Batch:
        tokens = np.full((len(indices), self._length), self._padding, dtype=np.int64)
        targets = np.full((len(indices), self._length), IGNORED, dtype=np.int64)
        for row, index in enumerate(indices):
            start, stop = self._spans[index]
            ids, predicted = self._texts.ids[start:stop], self._texts.predicted[start + 1 : stop]
            tokens[row, : len(ids) - 1] = ids[:-1]
            targets[row, : len(ids) - 1] = np.where(predicted, ids[1:].astype(np.int64), IGNORED)
        counted = int(np.count_nonzero(targets != IGNORED))
        return Batch({"tokens": torch.from_numpy(tokens), "targets": torch.from_numpy(targets)}, counted)


class WholeTexts:
    """Samples that are read as a whole, with an attention mask where some are filled up."""

    def __init__(self, texts: Texts, spans: Spans, length: int, padding: int) -> None:
        self._texts, self._spans, self._length, self._padding = texts, spans, length, padding

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, indices: Sequence[int]) -> Batch:
        ids = np.full((len(indices), self._length), self._padding, dtype=np.int64)
        seen = np.zeros((len(indices), self._length), dtype=np.int64)
        for row, index in enumerate(indices):
            start, stop = self._spans[index]
            ids[row, : stop - start] = self._texts.ids[start:stop]
            seen[row, : stop - start] = 1
        inputs = {"input_ids": torch.from_numpy(ids)}
        if not seen.all():  # a mask would cost the flash kernel
            inputs["attention_mask"] = torch.from_numpy(seen)
        return Batch(inputs, len(indices))


class Labelled:
    """Whole texts with a label each."""

    def __init__(self, texts: WholeTexts, labels: NDArray[np.int64], first: int = 0) -> None:
        self._texts, self._labels, self._first = texts, labels, first

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, indices: Sequence[int]) -> Batch:
        batch = self._texts[indices]
        labels = self._labels[[self._first + index for index in indices]]
        return Batch({**batch.inputs, "labels": torch.from_numpy(labels)}, len(indices))
