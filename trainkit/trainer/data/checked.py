"""Samples of which each token id and label is compared with what the model knows, where that is not known before."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torch import Tensor

from trainkit.errors import TrainingError
from trainkit.trainer.data.source import Batch, Samples, Source

_NO_LABEL = -100  # what models of transformers leave out


def checked(source: Source, vocabulary: int | None, labels: int | None) -> Source:
    """The source with samples that raise TrainingError, by number, for what the model does not know.

    A lookup outside an embedding fails far from its cause, and on CUDA ends the process.
    """
    limits = {"labels": labels} if labels is not None else {}
    if vocabulary is not None and source.highest < 0:
        limits |= {"tokens": vocabulary, "input_ids": vocabulary}
    if not limits:
        return source
    train, validation = (Checked(samples, limits) for samples in (source.train, source.validation))
    return dataclasses.replace(source, train=train, validation=validation)


class Checked:
    """Samples with limits: values by the name of an input must lie below its limit."""

    def __init__(self, samples: Samples, limits: Mapping[str, int]) -> None:
        self._samples, self._limits = samples, limits

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, indices: Sequence[int]) -> Batch:
        batch = self._samples[indices]
        for name, limit in self._limits.items():
            if name in batch.inputs:
                self._compare(name, batch.inputs[name], limit, indices)
        return batch

    def _compare(self, name: str, values: Tensor, limit: int, indices: Sequence[int]) -> None:
        if not values.numel() or (int(values.min()) >= 0 and int(values.max()) < limit):
            return
        outside = (values < 0) | (values >= limit)
        if name == "labels":
            outside &= values != _NO_LABEL
        if outside.any():
            row = int(outside.nonzero()[0][0])
            what = "labels" if name == "labels" else "token ids"
            raise TrainingError(
                f"data: sample {indices[row]} has {name} of {int(values[outside][0])}, and the model knows "
                f"{what} from 0 to {limit - 1}",
                hint="mend the data, or make the model larger",
            )
