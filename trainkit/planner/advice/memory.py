"""How large a model may be under each strategy, and advice from it: the decision tree of the guides on ZeRO.

It fits on one card: do not divide it, which only costs traffic. It does not: divide it; where that is not enough, or
there is one card alone, ZeRO with offload.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainkit.optimizers import optimizer
from trainkit.plan.context import Context
from trainkit.plan.model import Notice

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

OFFLOAD = "strategy.kind: zero3 with offload_optimizer and offload_param cpu, or nvme where memory does not suffice"


def largest(strategy: str, ranks: int, memory: int, *, mixed: bool = True) -> float:
    """Parameters of the largest model whose weights, gradients and optimizer state fit; memory: bytes of one card.

    mixed: whether the computation is in 16 bits beside fp32 weights.
    """
    whole = (WEIGHTS if mixed else SINGLE_FORMAT) + GRADIENTS + STATE
    divided = min(DIVIDED.get(strategy, 0), whole)
    return max(memory - RESERVED, 0) / (whole - divided + divided / ranks)


def in_words(parameters: float) -> str:
    """`1.2 B` or `0.8 M`, cut and not rounded."""
    unit, name = (1e9, "B") if parameters >= 1e9 else (1e6, "M")
    return f"{int(parameters / unit * 10) / 10:g} {name}"


def parameters(model: Mapping[str, Any]) -> float | None:
    """Parameters of the native model, from its sizes; None for any other."""
    if model.get("kind") != "gpt":
        return None
    width, layers, vocabulary = (float(model[name]) for name in ("hidden_size", "layers", "vocab_size"))
    return 12 * layers * width**2 + vocabulary * width


def memory_advice(context: Context) -> Iterator[Notice]:
    """For the native model on cards: its size is known. Adapters and formats of less than 32 bits train with less."""
    recipe, strategy, ranks = context.recipe, context.recipe.strategy, context.topology.world_size
    size = parameters(recipe.model.model_dump(include={"kind", "hidden_size", "layers", "vocab_size"}))
    dense = not getattr(getattr(recipe.model, "moe", None), "experts", 0)
    usual = recipe.peft.kind == "none" and recipe.precision.weights == "fp32"
    if recipe.program.kind != "builtin" or not context.cards or size is None or not (dense and usual):
        return
    memory, mixed = min(gpu.memory_total for gpu in context.cards), context.dtype != "fp32"
    offloaded = any(
        getattr(strategy, name, None) not in (None, False, "none")
        for name in ("offload", "offload_optimizer", "offload_param")
    )
    if largest("single", 1, memory, mixed=mixed) >= size:
        if strategy.kind not in ("single", "ddp"):
            what = (
                f"the model's {in_words(size)} parameters fit on one card with gradients and optimizer state: "
                f"{strategy.kind} helps only if activations take the rest"
                f"{', and offload slows each step' if offloaded else ''}"
            )
            yield Notice("note", what, f"set strategy.kind to {'ddp' if ranks > 1 else 'single'}, which is faster")
        return
    limit = largest(strategy.kind, ranks, memory, mixed=mixed)
    # What is offloaded takes CPU memory, and is not counted.
    if offloaded or limit >= size or optimizer(recipe.optimizer.name).state_bytes != STATE:
        return
    enough = [kind for kind in ("zero2", "fsdp") if ranks > 1 and largest(kind, ranks, memory, mixed=mixed) >= size]
    cards = f"{ranks} cards" if ranks > 1 else "one card"
    what = (
        f"the model's {in_words(size)} parameters do not fit with gradients and optimizer state: {strategy.kind} has "
        f"room for {in_words(limit)} on {cards} of {memory / 1024**3:.0f} GiB, before activations"
    )
    yield Notice("warning", what, f"set strategy.kind to {enough[0]}" if enough else f"set {OFFLOAD}")
