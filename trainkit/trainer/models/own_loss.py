"""A loss of the user's own, or that of a model of the user's own, as the sum over counted targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from trainkit.errors import TrainingError
from trainkit.recipe.schema import Recipe
from trainkit.trainer.data.source import IGNORED
from trainkit.trainer.optim.build import imported

_NOT_PREDICTED = -100  # among labels, as models of transformers have it
Judge = Callable[[Any, Mapping[str, Tensor]], Tensor]


def own_loss(recipe: Recipe) -> Judge | None:
    """What `train.loss` and `train.loss_reduction` say; None where the model's own loss is meant.

    TrainingError when the function cannot be imported.
    """
    if recipe.train.loss is None:
        return loss_of_outputs(recipe) if recipe.model.kind == "target" else None
    function = cast("Judge", imported(recipe.train.loss, "train.loss"))
    return _summed(function, recipe.train.loss, mean=recipe.train.loss_reduction == "mean")


def loss_of_outputs(recipe: Recipe) -> Judge:
    """The loss that a model returns itself: a number, `loss` of a mapping or an object, or the first of a tuple."""
    return _summed(_returned, "the model", mean=recipe.train.loss_reduction == "mean")


def _returned(outputs: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    if isinstance(outputs, Tensor):
        return outputs
    found = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if found is None and isinstance(outputs, tuple) and outputs:
        found = outputs[0]
    return cast("Tensor", found)


def _summed(function: Judge, name: str, *, mean: bool) -> Judge:
    def judge(outputs: Any, inputs: Mapping[str, Tensor]) -> Tensor:
        loss = function(outputs, inputs)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            given = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise TrainingError(f"{name} gives {given} and not one number as loss", hint="see train.loss")
        return loss.reshape(()) * counted(inputs) if mean else loss.reshape(())

    return judge


def counted(inputs: Mapping[str, Tensor]) -> Tensor | int:
    """Targets that count: `targets` that are not -1, `labels` that are not -100, or else the samples."""
    for name, ignored in (("targets", IGNORED), ("labels", _NOT_PREDICTED)):
        if name in inputs:
            return torch.count_nonzero(inputs[name] != ignored)
    return len(next(iter(inputs.values()), ()))
