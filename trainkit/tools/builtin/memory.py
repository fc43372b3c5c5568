"""How large a model may be under each strategy, and advice from it: the decision tree of the guides on ZeRO.

It fits on one GPU, with the activations of its micro batch: do not divide it, which only costs traffic. It does not
even without them: divide it; where that is not enough, or there is one GPU alone, ZeRO with offload. In between,
activations decide, which are only estimated: nothing is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainkit.errors import Diagnostic, note, warning
from trainkit.launch_plan.context import Context
from trainkit.optimizers import optimizer
from trainkit.recipe.schema import GptModel
from trainkit.text import format_memory

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

# Bytes that a block of `gpt` keeps for backward, for each token and each of its width, with fused attention: inputs of
# the norms (fp32) and of the products, query, key and value, what attention and GELU give (counted as in Korthikanti et
# al. 2022, arXiv:2205.05198, section 4; tests measure it). mixed -> bytes
KEPT: Mapping[bool, int] = {True: 36, False: 64}
INPUT = 4  # of a block alone, which is all that one keeps that recomputes the rest: the residual stream is fp32
LOGITS = 12  # bytes of each at most: in the format of the computation, in fp32, and their gradient

OFFLOAD = "strategy.kind: zero3 with offload_optimizer and offload_param cpu, or nvme where memory does not suffice"


def largest(strategy: str, ranks: int, memory: float, *, mixed: bool = True, whole_gradients: bool = False) -> float:
    """Parameters of the largest model whose weights, gradients and optimizer state fit; memory: bytes of one GPU.

    mixed: whether the computation is in 16 bits beside fp32 weights. whole_gradients: whether each rank holds them all,
    though the strategy divides them.
    """
    whole = (WEIGHTS if mixed else SINGLE_FORMAT) + GRADIENTS + STATE
    divided = min(DIVIDED.get(strategy, 0), whole) - (GRADIENTS if whole_gradients else 0)
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


def activations(context: Context) -> float | None:
    """Bytes of the native model's, of one micro batch on a rank, at most; None where they are not known."""
    recipe, micro = context.recipe, context.batch.micro
    model, length = recipe.model, getattr(recipe.data, "sequence_length", None)
    if not isinstance(model, GptModel) or micro is None or length is None or recipe.efficiency.attention == "eager":
        return None
    kept, recomputing = KEPT[context.dtype != "fp32"], recipe.efficiency.gradient_checkpointing
    spared = 0 if recomputing.selective else -(-model.layers // int(recomputing.every)) if recomputing.every else 0
    # One block more for what backward makes of it, or for the one that is just recomputed.
    of_blocks = (model.layers + 1 - spared) * kept + spared * INPUT
    return float(micro * length * (of_blocks * model.hidden_size + LOGITS * model.vocab_size))


def memory_advice(context: Context) -> Iterator[Diagnostic]:
    """For the native model on GPUs: its size is known. Adapters and formats of less than 32 bits train with less."""
    recipe = context.recipe
    size = parameters(vars(recipe.model))
    dense = not getattr(getattr(recipe.model, "moe", None), "experts", 0)
    usual = recipe.peft.kind == "none" and recipe.precision.weights == "fp32"
    if not context.cards or size is None or not (dense and usual):
        return
    memory = min(gpu.memory_total for gpu in context.cards)
    offloaded = any(
        getattr(recipe.strategy, name, None) not in (None, False, "none")
        for name in ("offload", "offload_optimizer", "offload_param")
    )
    if largest("single", 1, memory, mixed=context.dtype != "fp32") >= size:
        yield from _needlessly_divided(context, size, memory, offloaded=offloaded)
    # What is offloaded takes CPU memory, and is not counted.
    elif not offloaded and optimizer(recipe.optimizer.name).state_bytes == STATE:
        yield from _too_large(context, size, memory)


def _needlessly_divided(context: Context, size: float, memory: int, *, offloaded: bool) -> Iterator[Diagnostic]:
    kind, taken, mixed = context.recipe.strategy.kind, activations(context), context.dtype != "fp32"
    if kind in ("single", "ddp") or taken is None or largest("single", 1, memory - taken, mixed=mixed) < size:
        return
    what = (
        f"the model's {format_parameters(size)} parameters fit on one GPU with gradients, optimizer state and "
        "activations "
        f"(some {format_memory(taken)} or less for batch.micro {context.batch.micro}): {kind} makes room for larger "
        f"batches alone{', and offload slows each step' if offloaded else ''}"
    )
    several = context.topology.world_size > 1
    yield note(what, f"set strategy.kind to {'ddp' if several else 'single'}, which is faster")


def _too_large(context: Context, size: float, memory: int) -> Iterator[Diagnostic]:
    strategy, ranks, mixed = context.recipe.strategy, context.topology.world_size, context.dtype != "fp32"
    accumulating = (context.batch.accumulation or 1) > 1
    once = accumulating and getattr(strategy, "reduce_gradients", "each_micro_step") == "once"
    limit = largest(strategy.kind, ranks, memory, mixed=mixed, whole_gradients=once)
    if limit >= size:
        return
    enough = [kind for kind in ("zero2", "fsdp") if ranks > 1 and largest(kind, ranks, memory, mixed=mixed) >= size]
    gpus = f"{ranks} GPUs" if ranks > 1 else "one GPU"
    what = (
        f"the model's {format_parameters(size)} parameters do not fit with gradients and optimizer state: "
        f"{strategy.kind} has room for {format_parameters(limit)} on {gpus} of {memory / 1024**3:.0f} GiB, "
        "before activations"
        f"{', for strategy.reduce_gradients: once holds all gradients on each rank' if once else ''}"
    )
    if once and strategy.kind in enough:
        yield warning(what, "set strategy.reduce_gradients to each_micro_step")
    else:
        yield warning(what, f"set strategy.kind to {enough[0]}" if enough else f"set {OFFLOAD}")
