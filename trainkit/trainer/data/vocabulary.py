"""Whether token ids lie in the vocabulary of the model, outside which a lookup fails far from its cause."""

from __future__ import annotations

from trainkit.errors import TrainingError
from trainkit.recipe.schema import Recipe


def vocabulary_size(recipe: Recipe) -> int | None:
    """How many token ids the model knows; None where the recipe does not say, but a model on disk."""
    size: int | None = getattr(recipe.model, "vocab_size", None)
    return size


def check_vocabulary(recipe: Recipe, highest: int, where: str) -> None:
    """TrainingError if an id does not lie in the vocabulary. where: the setting or place that it comes from."""
    size = vocabulary_size(recipe)
    if size is not None and highest >= size:
        raise TrainingError(
            f"model.vocab_size: {size} is too small for token id {highest} of {where}",
            hint=f"set model.vocab_size to {highest + 1} or more",
        )
