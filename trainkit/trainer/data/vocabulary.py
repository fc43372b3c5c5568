"""Fit a source to its model: check token ids and labels, and mask tokens for masked models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from trainkit.data.encode import IGNORE_INDEX
from trainkit.data.tokenizer import require_known
from trainkit.errors import TrainingError
from trainkit.recipe.schema import HfModel, Recipe
from trainkit.seeds import derived_seed
from trainkit.trainer.data.sampler import RankSamples
from trainkit.trainer.data.source import Batch, Samples, Source, Stream, is_writing
from trainkit.trainer.models.base import Model

_HIDDEN, _REPLACED = 0.8, 0.1  # shares of the chosen tokens; the rest stay unchanged


def masked(source: Source, recipe: Recipe, vocabulary: int | None) -> Source:
    """The source with masked tokens and their labels, for a masked model. TrainingError without a mask token."""
    model, encoder = recipe.model, source.encoder
    if not isinstance(model, HfModel) or model.task != "masked_lm" or recipe.data.kind == "target":
        return source
    mask = model.mask_token if model.mask_token is not None else encoder.mask
    if mask is None:
        raise TrainingError(
            "model.mask_token: the id of the mask token is unknown: "
            + ("the tokenizer has no mask token" if encoder.unit == "tokens" else "there is no tokenizer that has one"),
            hint="set it, or name a tokenizer that has a mask token in data.tokenizer",
        )
    if vocabulary is not None and mask >= vocabulary:
        raise TrainingError(
            f"model.mask_token: {mask} is not a token id of the model, whose ids are 0 to {vocabulary - 1}",
            hint="set model.config.vocab_size higher",
        )
    special = np.array(sorted({*encoder.special, mask}), dtype=np.int64)
    written = encoder.size if encoder.unit == "tokens" else max(encoder.size, source.highest + 1)
    # Ready-made ids may be any of the model's; ids of texts are the encoder's, read or streamed.
    of_texts = source.highest >= 0 or (source.stream is not None and source.facts.get("format") != "ids")
    known = min(written, vocabulary) if vocabulary and of_texts else vocabulary or written
    replacements = np.setdiff1d(np.arange(known), special)
    return source.with_batches(Masking(recipe.train.seed, model.mask_share, mask, special, replacements).batch)


@dataclass(frozen=True, slots=True)
class Masking:
    """How tokens are masked (BERT, Devlin et al. 2019, section 3.1).

    special: ids that are never chosen. replacements: ids that may replace a token.
    """

    seed: int
    share: float  # share of tokens that are chosen
    mask: int
    special: NDArray[np.int64]
    replacements: NDArray[np.int64]

    def batch(self, samples: Samples, indices: Sequence[int]) -> Batch:
        """Samples with some tokens masked."""
        batch = samples[indices]
        inputs = whole(batch)
        ids = inputs["input_ids"].numpy()
        length = ids.shape[1]
        seen = inputs["attention_mask"].numpy() if "attention_mask" in inputs else np.ones_like(ids)
        shown, labels = ids.copy(), np.full_like(ids, IGNORE_INDEX)
        for row, index in enumerate(indices):
            # The choice depends on seed, step and position in the global batch, or, where samples are not drawn
            # for a step (evaluation), on their numbers: not on loader processes, ranks or interruptions.
            place = (indices.step, indices.first + row) if isinstance(indices, RankSamples) else ("numbered", index)
            chance = np.random.default_rng(derived_seed(self.seed, "masking", *place))
            chosen = (chance.random(length) < self.share) & (seen[row] == 1) & ~np.isin(ids[row], self.special)
            dice, drawn = chance.random(length), chance.choice(self.replacements, length)
            labels[row, chosen] = ids[row, chosen]
            shown[row, chosen & (dice < _HIDDEN)] = self.mask
            replaced = chosen & (dice >= _HIDDEN) & (dice < _HIDDEN + _REPLACED)
            shown[row, replaced] = drawn[replaced]
        found = {**inputs, "input_ids": torch.from_numpy(shown), "labels": torch.from_numpy(labels)}
        return batch._replace(inputs=found, counted=int(np.count_nonzero(labels != IGNORE_INDEX)))


def whole(batch: Batch) -> dict[str, torch.Tensor]:
    """Samples to read as a whole, made from next-token samples: everything after the last target is padding."""
    if "tokens" not in batch.inputs:
        return batch.inputs
    seen = (batch.inputs["targets"] != IGNORE_INDEX).flip(1).cumsum(1).flip(1) > 0
    inputs = {"input_ids": batch.inputs["tokens"]}
    if not seen.all():
        inputs["attention_mask"] = seen.long()
    return inputs


_NONE = torch.zeros(0)


def fitting_source(source: Source, model: Model, recipe: Recipe) -> Source:
    """The source fitted to the model. TrainingError for a token or a label outside the model's range."""
    known, labels, padding = model.vocabulary, model.labels, model.padding
    require_known(source.highest, known, source.where)
    if labels is not None and padding is None:
        raise TrainingError(
            "model.config.pad_token_id is not set, and the model needs it to see where a text ends",
            hint=f"set it to {source.padding or 0}",
        )
    found = source.labels
    if labels is not None and found is not None and found.highest >= labels:
        hint = f"set model.config.num_labels to {found.highest + 1} or more, or fix the data"
        if isinstance(recipe.model, HfModel) and recipe.model.path and "num_labels" not in recipe.model.config:
            hint = "fix the data, or take the model that this classifier was made of, without its head"
        raise TrainingError(
            f"data.path: {found.where}: label {found.highest} is too high: the model has {labels}, from 0", hint=hint
        )
    if model.told_padding and source.padding not in (None, padding):
        raise TrainingError(
            f"model.config.pad_token_id is {padding}, and texts are padded with {source.padding}, which the model "
            "would read as text",
            hint=f"set model.config.pad_token_id to {source.padding}",
        )
    if is_writing(recipe) and source.highest < 0:  # a decoder's targets are token ids too
        labels = known
    # For a user's own loss, targets may be anything.
    return checked(masked(source, recipe, known), known, labels, targets=recipe.train.loss is None)


def checked(source: Source, vocabulary: int | None, labels: int | None, *, targets: bool = True) -> Source:
    """The source, whose samples raise TrainingError for values outside the model's range.

    targets: whether they are token ids too.
    """
    limits = {"labels": labels} if labels is not None else {}
    if vocabulary is not None and source.highest < 0:
        limits |= {"tokens": vocabulary, "input_ids": vocabulary} | ({"targets": vocabulary} if targets else {})
    return source.with_batches(partial(_checked_batch, limits, source.stream)) if limits else source


def _checked_batch(limits: Mapping[str, int], stream: Stream | None, samples: Samples, indices: Sequence[int]) -> Batch:
    """limits: the values of an input must be below its limit."""
    batch = samples[indices]
    for name, limit in limits.items():
        values = batch.inputs.get(name, _NONE)
        outside = (values < 0) | (values >= limit)
        if name in ("labels", "targets"):
            outside &= values != IGNORE_INDEX
        if outside.any():
            row = int(outside.nonzero()[0][0])
            what = "labels" if name == "labels" else "token ids"
            # The numbers of a stream's samples tell the user nothing.
            which = f", from {stream.place(indices[row])} on," if stream and len(samples) == 0 else ""
            raise TrainingError(
                f"data: sample {indices[row]}{which} has {name} of {int(values[outside][0])}, and the model has "
                f"{what} from 0 to {limit - 1}",
                hint="fix the data, or make the model's vocabulary larger",
            )
    return batch
