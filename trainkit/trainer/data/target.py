"""A user's own data set and collate function, by import path."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch import Tensor
from torch.utils.data import Subset, default_collate

from trainkit.errors import TrainingError
from trainkit.recipe.schema import Recipe, TargetData
from trainkit.trainer.data.source import Batch, Samples, Source, count_targets, is_writing
from trainkit.trainer.user_code import blaming, imported


def open_source(recipe: Recipe, run_dir: Path) -> Source:
    """The source of a recipe whose `data.kind` is target. TrainingError names the target and the line that failed."""
    data = cast("TargetData", recipe.data)
    with blaming("data.target", data.target):
        made: Any = imported(data.target, "data.target")(**data.args)
        collate = default_collate
        if not isinstance(made, tuple):  # without a separate validation set, the end is held out
            border = len(made) - max(1, int(len(made) * data.validation_fraction))
            made = Subset(made, range(border)), Subset(made, range(border, len(made)))
        train, validation = made
        sizes = len(train), len(validation)
    if data.collate:
        with blaming("data.collate", data.collate):
            collate = cast("Callable[[list[Any]], Any]", imported(data.collate, "data.collate"))
    if not all(sizes):
        which = "validation" if sizes[0] else "training"
        raise TrainingError(f"data.target: {data.target} gives no {which} sample")
    train, validation = (
        Samples(size, partial(_batch, each, data, collate, writes=is_writing(recipe)))
        for each, size in zip((train, validation), sizes, strict=True)
    )
    return Source(train, validation, f"{sizes[0]:,} samples of {data.target}", {"samples": sizes[0]})


def _batch(
    samples: Any, data: TargetData, collate: Callable[[list[Any]], Any], indices: Sequence[int], *, writes: bool
) -> Batch:
    """The user's samples, collated by the user's function, and checked.

    writes: whether the labels are a decoder's text.
    """
    with blaming("data.target", data.target):
        found = [samples[index] for index in indices]
    name = data.collate or data.target
    with blaming("data.collate" if data.collate else "data.target", name):
        inputs = collate(found)
    if not isinstance(inputs, Mapping) or not all(isinstance(each, Tensor) for each in inputs.values()):
        raise TrainingError(
            f"data.collate: a batch of {name} must be a mapping of tensors by the names of the model's arguments",
            hint="make samples mappings, or name a function in data.collate",
        )
    if any(len(each) != len(indices) for each in inputs.values()):
        shapes = ", ".join(f"{key} {tuple(each.shape)}" for key, each in inputs.items())
        raise TrainingError(f"data.collate: {name} gives {shapes} for {len(indices)} samples: they must come first")
    written = inputs["labels"].numel() if writes and "labels" in inputs else 0
    return Batch(dict(inputs), int(count_targets(inputs)), written)
