"""Advice on whether a model of known size wants its memory divided: the decision tree of the guides on ZeRO.

It fits on one card: nothing is to be divided, which only costs traffic. It does not: divide it; where that is not
enough, or there is one card alone, ZeRO with offload.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainkit.optimizers import optimizer
from trainkit.plan.context import Context
from trainkit.plan.model import Notice
from trainkit.planner.advice.model_states import STATE, in_words, largest, parameters

OFFLOAD = "strategy.kind: zero3 with offload_optimizer and offload_param cpu, or nvme where memory does not suffice"
SIZES = {"hidden_size", "layers", "vocab_size"}


def room_advice(context: Context) -> Iterator[Notice]:
    """For the native model on cards: its size is known. Adapters and formats of less than 32 bits train with less."""
    recipe = context.recipe
    size = parameters({"kind": recipe.model.kind, **recipe.model.model_dump(include=SIZES)})
    dense = not getattr(getattr(recipe.model, "moe", None), "experts", 0)
    usual = recipe.peft.kind == "none" and recipe.precision.weights == "fp32"
    if recipe.program.kind != "builtin" or not context.cards or size is None or not (dense and usual):
        return
    if largest("single", 1, _memory(context), mixed=_mixed(context)) >= size:
        yield from _needless(context, size)
    elif optimizer(recipe.optimizer.name).state_bytes == STATE:
        yield from _too_large(context, size)


def _needless(context: Context, size: float) -> Iterator[Notice]:
    """Whether the recipe divides or moves away what has its place on each card."""
    strategy = context.recipe.strategy
    if strategy.kind in ("single", "ddp"):
        return
    moved = [name for name in ("offload", "offload_optimizer", "offload_param") if _moves(strategy, name)]
    what = (
        f"The model's {in_words(size)} parameters fit on one card with gradients and optimizer state: {strategy.kind} "
        f"is needed only if activations take the rest{', and offload slows each step' if moved else ''}."
    )
    yield Notice("note", what, f"strategy.kind: {'ddp' if context.topology.world_size > 1 else 'single'} is faster.")


def _too_large(context: Context, size: float) -> Iterator[Notice]:
    """Whether the strategy divides enough; what is offloaded takes CPU memory, and is not counted."""
    strategy, ranks, memory = context.recipe.strategy, context.topology.world_size, _memory(context)
    if any(_moves(strategy, name) for name in ("offload", "offload_optimizer", "offload_param")):
        return
    mixed = _mixed(context)
    if (room := largest(strategy.kind, ranks, memory, mixed=mixed)) >= size:
        return
    enough = [kind for kind in ("zero2", "fsdp") if ranks > 1 and largest(kind, ranks, memory, mixed=mixed) >= size]
    what = (
        f"The model's {in_words(size)} parameters do not fit with gradients and optimizer state: {strategy.kind} has "
        f"room for {in_words(room)} on {_where(context)}, before activations."
    )
    yield Notice("warning", what, f"Choose strategy.kind: {enough[0]}." if enough else f"Choose {OFFLOAD}.")


def _moves(strategy: object, name: str) -> bool:
    return getattr(strategy, name, None) not in (None, False, "none")


def _mixed(context: Context) -> bool:
    return context.dtype != "fp32"


def _memory(context: Context) -> int:
    """Bytes of the smallest card."""
    return min(gpu.memory_total for gpu in context.cards)


def _where(context: Context) -> str:
    ranks, each = context.topology.world_size, f"{_memory(context) / 1024**3:.0f} GiB"
    return f"{ranks} cards of {each}" if ranks > 1 else f"one card of {each}"
