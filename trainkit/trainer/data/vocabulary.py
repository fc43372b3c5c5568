"""Whether the model knows every token id and label of the data: a lookup outside an embedding fails far from its cause.

On CUDA it even ends the process, so what is known before the first step is checked then, the rest sample by sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from trainkit.errors import TrainingError
from trainkit.recipe.schema import Recipe
from trainkit.trainer.data.mlm_masking import masked
from trainkit.trainer.data.pairs import is_writing
from trainkit.trainer.data.source import NO_LABEL, Batch, Samples, Source, Stream
from trainkit.trainer.models.base import Model

_NONE = torch.zeros(0)


def fitting_source(source: Source, model: Model, recipe: Recipe) -> Source:
    """The source as the model takes it. TrainingError for a token or a label that the model does not know."""
    known, labels, padding = model.vocabulary, model.labels, model.padding
    if known is not None and source.highest >= known:
        raise TrainingError(
            f"model: a vocabulary of {known} is too small for token {source.highest} of {source.where or 'the data'}",
            hint=f"set its vocab_size to {source.highest + 1} or more; 256 holds every byte",
        )
    if labels is not None and padding is None:
        raise TrainingError(
            "model.config.pad_token_id is not set, without which the model cannot tell where a text ends",
            hint=f"set it to {source.padding or 0}",
        )
    found = source.labels
    if labels is not None and found is not None and found.highest >= labels:
        raise TrainingError(
            f"data.path: {found.where}: label {found.highest} is too high: the model has {labels}, from 0",
            hint=f"set model.config.num_labels to {found.highest + 1} or more, or fix the data",
        )
    if model.told_padding and source.padding not in (None, padding):
        raise TrainingError(
            f"model.config.pad_token_id is {padding}, and texts are padded with {source.padding}, which the model "
            "would read as text",
            hint=f"set model.config.pad_token_id to {source.padding}",
        )
    if is_writing(recipe) and source.highest < 0:  # what a decoder writes are tokens, too
        labels = known
    return checked(masked(source, recipe, known), known, labels)


def checked(source: Source, vocabulary: int | None, labels: int | None) -> Source:
    """The source with samples that raise TrainingError, by number, for what the model does not know."""
    limits = {"labels": labels} if labels is not None else {}
    if vocabulary is not None and source.highest < 0:
        limits |= {"tokens": vocabulary, "input_ids": vocabulary}
    return source.with_batches(partial(_checked_batch, limits, source.stream)) if limits else source


def _checked_batch(limits: Mapping[str, int], stream: Stream | None, samples: Samples, indices: Sequence[int]) -> Batch:
    """limits: values by the name of an input lie below its limit."""
    batch = samples[indices]
    for name, limit in limits.items():
        values = batch.inputs.get(name, _NONE)
        outside = (values < 0) | (values >= limit)
        if name == "labels":
            outside &= values != NO_LABEL
        if outside.any():
            row = int(outside.nonzero()[0][0])
            what = "labels" if name == "labels" else "token ids"
            # The samples of a stream have numbers that nobody knows.
            which = f", from {stream.place(indices[row])} on," if stream and len(samples) == 0 else ""
            raise TrainingError(
                f"data: sample {indices[row]}{which} has {name} of {int(values[outside][0])}, and the model knows "
                f"{what} from 0 to {limit - 1}",
                hint="fix the data, or make the model larger",
            )
    return batch
