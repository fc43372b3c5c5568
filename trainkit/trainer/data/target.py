"""A data set and a collate function of the user's own, by import path."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from torch import Tensor
from torch.utils.data import default_collate

from trainkit.errors import TrainingError
from trainkit.recipe.schema import Recipe, TargetData
from trainkit.trainer.data.source import Batch, Source, count_targets
from trainkit.trainer.optim.build import imported


def open_source(recipe: Recipe, run_dir: Path) -> Source:
    """The source of a recipe whose `data.kind` is target. TrainingError names the target and the line that failed."""
    data = cast("TargetData", recipe.data)
    with blaming("data.target", data.target):
        made: Any = imported(data.target, "data.target")(**data.args)
        collate = default_collate
        train, validation = made if isinstance(made, tuple) else _held_out(made, data)
        sizes = len(train), len(validation)
    if data.collate:
        with blaming("data.collate", data.collate):
            collate = cast("Callable[[list[Any]], Any]", imported(data.collate, "data.collate"))
    if not all(sizes):
        which = "validation" if sizes[0] else "training"
        raise TrainingError(f"data.target: {data.target} gives no {which} sample")
    sets = (TargetSamples(each, size, data, collate) for each, size in zip((train, validation), sizes, strict=True))
    samples, held_out = sets
    return Source(samples, held_out, f"{sizes[0]:,} samples of {data.target}", {"samples": sizes[0]})


def _held_out(made: Any, data: TargetData) -> tuple[Any, Any]:
    size = len(made)
    border = size - max(1, int(size * data.validation_fraction))
    return Stretch(made, range(border)), Stretch(made, range(border, size))


@contextmanager
def blaming(key: str, target: str) -> Iterator[None]:
    """What the user's code raises becomes one line that names the target, the error and its place in the code."""
    try:
        yield
    except TrainingError:
        raise
    except Exception as error:  # whatever it may be
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise TrainingError(
            f"{key}: {target} failed: {type(error).__name__}: {error}", hint=f"at {last.filename}:{last.lineno}"
        ) from error


class Stretch:
    """Some neighbouring samples of a data set."""

    def __init__(self, samples: Any, places: range) -> None:
        self._samples, self._places = samples, places

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Any:
        return self._samples[self._places[index]]


class TargetSamples:
    """The user's samples, collated by the user's function, and checked."""

    def __init__(self, samples: Any, size: int, data: TargetData, collate: Callable[[list[Any]], Any]) -> None:
        self._samples, self._size, self._data, self._collate = samples, size, data, collate

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, indices: Sequence[int]) -> Batch:
        with blaming("data.target", self._data.target):
            found = [self._samples[index] for index in indices]
        name = self._data.collate or self._data.target
        with blaming("data.collate" if self._data.collate else "data.target", name):
            inputs = self._collate(found)
        if not isinstance(inputs, Mapping) or not all(isinstance(each, Tensor) for each in inputs.values()):
            raise TrainingError(
                f"data.collate: a batch of {name} must be a mapping of tensors by the names of the model's arguments",
                hint="let samples be mappings, or name a function in data.collate",
            )
        if any(len(each) != len(indices) for each in inputs.values()):
            shapes = ", ".join(f"{key} {tuple(each.shape)}" for key, each in inputs.items())
            raise TrainingError(f"data.collate: {name} gives {shapes} for {len(indices)} samples: all must come first")
        return Batch(dict(inputs), int(count_targets(inputs)))
