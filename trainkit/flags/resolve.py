"""From a request to its recipe: the layers of files and environment, and those of the command line above them."""

from __future__ import annotations

from collections.abc import Sequence

from trainkit.errors import Diagnostic
from trainkit.flags.overrides import argument_layer, override_layers
from trainkit.recipe.layers.layer import Layer
from trainkit.recipe.layers.merge import merge
from trainkit.recipe.layers.paths import Files
from trainkit.recipe.resolve import resolve_with
from trainkit.recipe.resolved import Request, Resolved
from trainkit.recipe.validation.rule_context import KindOf, no_kind


def resolve(request: Request, files: Files, kind_of: KindOf = no_kind) -> Resolved:
    """The recipe that a request means; kind_of looks into programs. Raises RecipeError with all that is wrong."""
    return resolve_with(_layers_of_arguments, request, files, kind_of)


def _layers_of_arguments(
    request: Request, strength: int, files: Files, below: Sequence[Layer]
) -> tuple[list[Layer], list[Diagnostic]]:
    """The overrides as typed, and behind them the arguments for the program."""
    layers, found = override_layers(request.overrides, strength, request.cwd, files, merge(below).get)
    if request.arguments:
        above = merge([*below, *layers]).get
        layers.append(argument_layer(request.arguments, strength, request.cwd, above))
    return layers, found
