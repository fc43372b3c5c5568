"""A model of the user's own, by import path."""

from __future__ import annotations

import inspect
from typing import Any, cast

from torch import Tensor, nn

from trainkit.errors import TrainingError
from trainkit.recipe.schema import Recipe, TargetModel
from trainkit.trainer.data.target import blaming
from trainkit.trainer.models.hf import blocks_of, tied_modules
from trainkit.trainer.models.model import Model
from trainkit.trainer.optim.build import imported


class OwnModel(Model):
    """Calls the user's module with the inputs of a batch by name.

    Its blocks are the modules that its `_no_split_modules` names, or else the longest of its module lists.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner.train()
        self.blocks = blocks_of(inner)
        self.tied = tied_modules(inner)
        self.stochastic = True  # nobody can tell, and masks that nobody draws cost next to nothing
        self.vocabulary, self.attention = None, "its own"
        parameters = inspect.signature(inner.forward).parameters
        takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
        self._takes = None if takes_all else frozenset(parameters)

    def forward(self, **inputs: Tensor) -> Any:
        """The loss summed over counted targets. What only a loss of the user's own needs is kept from the model."""
        judge = self.judge
        withheld = self.own_loss and self._takes is not None
        taken = {name: each for name, each in inputs.items() if name in (self._takes or ())} if withheld else inputs
        outputs = self.inner(**taken)
        return outputs if judge is None else judge(outputs, inputs)


def build_target(recipe: Recipe) -> OwnModel:
    """The model of a recipe, on the CPU. TrainingError names the target when it cannot be made."""
    asked = cast("TargetModel", recipe.model)
    with blaming("model.target", asked.target):
        made: Any = imported(asked.target, "model.target")(**asked.args)
    if not isinstance(made, nn.Module):
        raise TrainingError(f"model.target: {asked.target} gives {type(made).__name__}, which is no torch.nn.Module")
    return OwnModel(made)
