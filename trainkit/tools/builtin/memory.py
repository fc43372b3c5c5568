"""How large a model may be under each strategy, by bytes for each parameter alone: for questions before a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Bytes per parameter of mixed-precision AdamW: fp32 and 16-bit weights, fp32 gradients, two fp32 moments
# (https://huggingface.co/docs/transformers/model_memory_anatomy).
WEIGHTS, GRADIENTS, STATE = 6, 4, 8
SINGLE_FORMAT = 4  # of the weights, where no 16-bit copy of them is made
# What CUDA itself and a minimum of activations take, so that the figures promise nothing that cannot be had.
RESERVED = 2 * 1024**3
# strategy -> what it divides by the number of ranks
DIVIDED: Mapping[str, int] = {
    "zero1": STATE,
    "zero2": STATE + GRADIENTS,
    "zero3": STATE + GRADIENTS + WEIGHTS,
    "fsdp": STATE + GRADIENTS + WEIGHTS,
}


def largest(strategy: str, ranks: int, memory: float, *, mixed: bool = True) -> float:
    """Parameters of the largest model whose weights, gradients and optimizer state fit; memory: bytes of one GPU.

    mixed: whether the computation is in 16 bits beside fp32 weights.
    """
    whole = (WEIGHTS if mixed else SINGLE_FORMAT) + GRADIENTS + STATE
    divided = min(DIVIDED.get(strategy, 0), whole)
    return max(memory - RESERVED, 0) / (whole - divided + divided / ranks)


def format_parameters(parameters: float) -> str:
    """`1.2 B` or `0.8 M`, cut and not rounded; `41,120`."""
    if parameters < 1e5:
        return f"{int(parameters):,}"
    unit, name = (1e9, "B") if parameters >= 1e9 else (1e6, "M")
    return f"{int(parameters / unit * 10) / 10:g} {name}"


def parameters(model: Mapping[str, Any]) -> float | None:
    """Parameters of the native model, from its sizes; None for any other."""
    if model.get("kind") != "gpt":
        return None
    width, layers, vocabulary = (float(model[name]) for name in ("hidden_size", "layers", "vocab_size"))
    return 12 * layers * width**2 + vocabulary * width
