"""A model or a loss of the user's own, by import path; losses as sums over counted targets."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from trainkit.errors import TrainingError
from trainkit.recipe.schema import Recipe, TargetModel
from trainkit.trainer.data.source import count_targets
from trainkit.trainer.models.base import LossFunction, Wrapped
from trainkit.trainer.optim import DTYPES
from trainkit.trainer.user_code import blaming, imported


class OwnModel(Wrapped):
    """Calls the user's module with the inputs of a batch by name."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.stochastic = True  # it may be, and a seed that is not used costs next to nothing
        self.vocabulary, self.attention = None, "its own"
        # Of transformers' models `**kwargs` reaches the attention's kernels; of the user's own it may be for anything.
        self._takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in self._takes.values())

    def forward(self, **inputs: Tensor) -> Any:
        """The loss summed over counted targets."""
        outputs = self.inner(**(inputs if self._takes_all else self.known(inputs)))
        return outputs if self.loss_function is None else self.loss_function(outputs, inputs)


def build_target(recipe: Recipe, device: str = "cpu", mesh: DeviceMesh | None = None) -> OwnModel:
    """The model of a recipe. TrainingError names the target when it cannot be made.

    It is whole and on the CPU, whatever the device and mesh: the user's code builds it and sets its weights.
    """
    asked = cast("TargetModel", recipe.model)
    with blaming("model.target", asked.target):
        made: Any = imported(asked.target, "model.target")(**asked.args)
    if not isinstance(made, nn.Module):
        raise TrainingError(f"model.target: {asked.target} gives {type(made).__name__}, which is not a torch.nn.Module")
    return OwnModel(made).to(DTYPES[recipe.precision.weights])


def loss_function(recipe: Recipe) -> LossFunction | None:
    """The loss of `train.loss` and `train.loss_reduction`; None for the model's own. TrainingError without it."""
    path = recipe.train.loss
    if path is None and recipe.model.kind != "target":
        return None
    function = cast("LossFunction", imported(path, "train.loss")) if path else _returned

    def summed(outputs: Any, inputs: Mapping[str, Tensor]) -> Tensor:
        loss = function(outputs, inputs)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            given = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            what = f"{path or 'the model'} gives {given} and not one number as loss"
            raise TrainingError(what, hint="see train.loss")
        # The loop divides by the counted targets of the global batch, so it needs sums.
        mean = recipe.train.loss_reduction == "mean"
        return loss.reshape(()) * count_targets(inputs) if mean else loss.reshape(())

    return summed


def _returned(outputs: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """The loss that a model returns itself: a number, `loss` of a mapping or an object, or the first of a tuple."""
    if isinstance(outputs, Tensor):
        return outputs
    found = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if found is None and isinstance(outputs, tuple) and outputs:
        found = outputs[0]
    return cast("Tensor", found)
