"""Advice on sizes that tensor cores like, from NVIDIA's table by number format and card.

Table and tile sizes: NVIDIA, Matrix Multiplication Background User's Guide, sections 2.2 (Tensor Core Requirements) and
3.1 (Tile Quantization). Its section 3.2 (Wave Quantization) asks for the number of tiles to fill a card's
multiprocessors: that depends on the kernel, which the library chooses as it runs, so there is no advice on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trainkit.errors import Diagnostic, note, warning
from trainkit.launch_plan.context import Context
from trainkit.machine.capability import AMPERE, VOLTA, has_tensor_cores
from trainkit.machine.facts import Gpu

SOURCE = "https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/index.html"
REQUIREMENTS, QUANTIZATION = f"{SOURCE}#requirements-tc", f"{SOURCE}#dim-quantization"

# format -> multiple for which products are most efficient, and the one on an A100
MULTIPLES: Mapping[str, tuple[int, int]] = {
    "fp16": (8, 64),  # REQUIREMENTS, table 1
    "bf16": (8, 64),  # not in the table, whose multiples are 16 bytes, and 128 on an A100: as wide as fp16
    "tf32": (4, 32),  # REQUIREMENTS, table 1
}
A100 = (8, 0)  # the A30 has the A100's chip
FIRST: Mapping[str, tuple[int, int]] = {"fp16": VOLTA, "bf16": AMPERE, "tf32": AMPERE}

# The sides of products in configurations of transformers, by the names that its architectures give them.
SIDES = (
    *("hidden_size", "n_embd", "d_model", "dim"),
    *("intermediate_size", "moe_intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size", "hidden_dim"),
    "vocab_size",
)
HEADS = ("heads", "num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads")

TILE = 128  # a usual side of the tiles that a product is cut into (QUANTIZATION)
WASTE = 0.25  # idle share of the tiles, above which a notice is worth it


def tensor_core_advice(context: Context) -> Iterator[Diagnostic]:
    """Sizes that leave tensor cores idle, where the built-in trainer computes on them."""
    used = "tf32" if context.dtype == "fp32" and context.recipe.precision.tf32 else context.dtype
    if used not in MULTIPLES or not context.cards:
        return
    # All ranks wait for a card without tensor cores for the format, and no size makes it faster.
    if any(gpu.compute_capability < FIRST[used] or not has_tensor_cores(gpu) for gpu in context.cards):
        return
    # The most demanding card decides: all ranks wait for each other.
    card = max(context.cards, key=lambda gpu: _multiple(used, gpu))
    # The feed-forward width of `gpt` is 4 hidden sizes, and fits if one does.
    sizes = dict(_settings(context, SIDES))
    if context.batch.micro and not context.batch.search:
        length = getattr(context.recipe.data, "sequence_length", 1)
        key = f"batch.micro {context.batch.micro} of {length} tokens:"
        sizes = {key: context.batch.micro * length, **sizes}
    multiple = _multiple(used, card)
    missed = [f"{key} {size} (next {_up(size, multiple)})" for key, size in sizes.items() if size % multiple]
    missed += _heads(context, MULTIPLES[used][0])
    if missed:
        what = f"{card.name} multiplies {used} fastest in multiples of {multiple}; not so: {', '.join(missed)}"
        yield warning(what, f"use sizes that fit, which are faster at the same cost: {REQUIREMENTS}")
    wasteful = [f"{key} {size}" for key, size in sizes.items() if size > TILE and 1 - size / _up(size, TILE) > WASTE]
    if wasteful:
        what = (
            f"products are cut into tiles of {TILE}, of which a quarter or more stays idle with {', '.join(wasteful)}"
        )
        yield note(what, f"use a multiple of {TILE}, which costs no more time: {QUANTIZATION}")


def _multiple(used: str, gpu: Gpu) -> int:
    usual, on_a100 = MULTIPLES[used]
    return on_a100 if gpu.compute_capability == A100 else usual


def _settings(context: Context, names: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    """Those of the model's settings that the recipe gives, by their keys."""
    model = context.recipe.model
    config = getattr(model, "config", None)
    for name in names:
        size = getattr(model, name, None)
        if isinstance(size, int):
            yield f"model.{name}", size
        elif isinstance(config, Mapping) and isinstance(config.get(name), int):
            yield f"model.config.{name}", config[name]


def _heads(context: Context, multiple: int) -> list[str]:
    """The width of a head is a side of attention's products. It is small, so only the least multiple is asked of it."""
    expected = f"(expected a multiple of {multiple})"
    if given := list(_settings(context, ("head_dim",))):
        return [f"{key} {size} {expected}" for key, size in given if size % multiple]
    width, heads = next(_settings(context, SIDES[:4]), None), next(_settings(context, HEADS), None)
    if not width or not heads or heads[1] < 1 or (wide := width[1] // heads[1]) % multiple == 0:
        return []
    return [f"{heads[0]} {heads[1]}, which makes heads {wide} wide {expected}"]


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
