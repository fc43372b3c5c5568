"""The loss of transformers' language models inside their output layer, so that whole logits are never there.

A model's own code calls its output layer last. Told the targets before, that layer gives the summed loss instead of
logits, and the model hands it on where it would hand on logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from trainkit.trainer.models.losses import linear_cross_entropy

# Architectures (`model_type`) whose logits are what one linear layer gives, as it is: neither scaled nor capped.
PLAIN = frozenset(
    (
        *("bloom", "falcon", "gemma", "gpt2", "gpt_neox", "llama", "mistral", "mixtral", "olmo2", "opt"),
        *("phi", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3", "stablelm", "starcoder2"),
        *("longt5", "mt5", "t5", "umt5"),
        *("albert", "bert", "camembert", "distilbert", "electra", "modernbert", "roberta", "xlm-roberta"),
    )
)


class OutputLayer:
    """The output layer of a model."""

    def __init__(self, layer: nn.Linear) -> None:
        self._layer = layer
        self._asked: tuple[Tensor, int, int | None] | None = None
        layer.forward = self._forward  # type: ignore[method-assign,assignment]

    @contextmanager
    def giving_loss(self, targets: Tensor, ignored: int, at_most: int | None = None) -> Iterator[None]:
        """Inside, it gives the loss of :func:`linear_cross_entropy`."""
        self._asked = targets, ignored, at_most
        try:
            yield
        finally:
            self._asked = None

    def _forward(self, hidden: Tensor) -> Tensor:
        weight, bias = self._layer.weight, self._layer.bias
        if self._asked is None:
            return functional.linear(hidden, weight, bias)
        targets, ignored, at_most = self._asked
        return linear_cross_entropy((hidden, weight, bias), targets, ignored, at_most)


def output_layer(inner: Any) -> OutputLayer | None:
    """The output layer of a model of transformers; None where its logits are more than that layer's, or it has none.

    To be called once adapters are in place: one around the output layer is part of what it gives.
    """
    layer = inner.get_output_embeddings() if inner.config.model_type in PLAIN else None
    return OutputLayer(layer) if type(layer) is nn.Linear else None
