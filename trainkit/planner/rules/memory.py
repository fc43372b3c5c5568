"""Where recomputing, compiling and saving in the background do not work."""

from __future__ import annotations

from trainkit.plan.combination import ZERO, Refusal

REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        {"program": ("builtin",), "strategy": ZERO, "saving": ("asynchronous",)},
        "checkpoint.asynchronous",
        "DeepSpeed writes its own files from the tensors that it trains, so training must wait",
        "checkpoint.asynchronous: false, or strategy.kind: fsdp",
    ),
    Refusal(
        {"program": ("builtin",), "strategy": ("fsdp", "zero3"), "compiled": ("model",)},
        "efficiency.compile.scope",
        "this strategy gathers the weights of each block in hooks around it, where a graph of the whole model breaks",
        "efficiency.compile.scope: blocks",
    ),
    Refusal(
        {"program": ("builtin",), "strategy": ("zero3",), "recompute": ("selective",)},
        "efficiency.gradient_checkpointing.selective",
        "under ZeRO-3 DeepSpeed's linear layers add their bias onto the product that was to be kept: gradients come "
        "out wrong",
        "efficiency.gradient_checkpointing.selective: false, or strategy.kind: fsdp",
    ),
)
