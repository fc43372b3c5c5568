"""Weights in 4 or 8 bits: what they do not go with, and what they do less than it seems (bitsandbytes 0.50)."""

from __future__ import annotations

from collections.abc import Iterator

from trainkit.plan.combination import Refusal
from trainkit.plan.context import Context
from trainkit.plan.model import Notice
from trainkit.recipe.schema.model import quantized_bits

QUANTIZED = ("4", "8")
REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        {"program": ("builtin",), "quantized": QUANTIZED, "adapters": ("none",)},
        "model.quantize",
        "quantised weights have no gradient and cannot train: adapters beside them do",
        "peft.kind: lora, or leave model.quantize out",
    ),
    Refusal(
        {"program": ("builtin",), "quantized": ("8",), "strategy": ("fsdp", "zero3")},
        "strategy.kind",
        "an 8-bit layer of bitsandbytes keeps its weights and their scales whole beside the parameter that is sharded",
        "model.quantize.bits: 4, or strategy.kind: ddp",
    ),
    Refusal(
        # peft 0.21, utils/integrations.py: dequantize_module_weight
        {"program": ("builtin",), "quantized": ("8",), "adapters": ("dora",), "device": ("cpu",)},
        "peft.dora",
        "on a CPU peft loses the scales of 8-bit layers while it computes DoRA's norms",
        "model.quantize.bits: 4, or peft.dora: false",
    ),
    Refusal(
        {"program": ("builtin",), "quantized": QUANTIZED, "device": ("mps",)},
        "model.quantize",
        "bitsandbytes brings no kernels of its own for MPS: it imitates them, or loads some from the Hub while it runs",
        "leave model.quantize out, or devices.type: cpu",
    ),
    Refusal(
        {"program": ("builtin",), "quantized": QUANTIZED, "weights": ("bf16",)},
        "precision.weights",
        "quantised weights have their own format, and what is not quantised (adapters, embeddings, norms, the output "
        "layer) is kept in fp32 beside them",
        "precision.weights: fp32",
    ),
    Refusal(
        {"program": ("builtin",), "quantized": ("4",), "eval_dtype": ("other",)},
        "precision.eval",
        "4-bit layers compute in one format, precision.dtype, for training and evaluation alike",
        "precision.eval: same",
    ),
    Refusal(
        {"program": ("builtin",), "quantized": QUANTIZED, "recompute": ("selective",)},
        "efficiency.gradient_checkpointing.selective",
        "products with quantised weights are operators of bitsandbytes', which would be done again all the same",
        "efficiency.gradient_checkpointing.selective: false",
    ),
)


def kept_inputs(context: Context) -> Iterator[Notice]:
    """A warning where recomputing spares less than it seems to: what an autograd node holds itself stays."""
    recipe = context.recipe
    if (
        recipe.program.kind == "builtin"
        and quantized_bits(recipe) == 8
        and recipe.efficiency.gradient_checkpointing.every
    ):
        what = (
            "8-bit layers of bitsandbytes keep their inputs by themselves until backward, also in blocks that are "
            "recomputed: efficiency.gradient_checkpointing spares the other activations alone"
        )
        yield Notice("warning", what, "set model.quantize.bits to 4, whose layers keep no input")
