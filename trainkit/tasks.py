"""What a model is trained to do, by its name in `model.task`."""

from __future__ import annotations

from typing import Any

CAUSAL, WRITING, MASKED, LABELLING = "causal_lm", "seq2seq_lm", "masked_lm", "sequence_classification"


def task_of(recipe: Any) -> str:
    """The task of a recipe's model; the native one predicts the next token."""
    return getattr(recipe.model, "task", CAUSAL)
