"""Scripts on `Accelerator()`: what accelerate would do instead, in silence."""

from __future__ import annotations

from trainkit.plan.combination import Refusal

REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        {"program": ("accelerate",), "strategy": ("fsdp",), "device": ("cpu",)},
        "strategy.kind",
        "on a CPU accelerate trains with DDP, or with copies that never talk to one another, without a word",
        "strategy.kind: ddp, or zero3, which shards on a CPU too",
    ),
    Refusal(
        {"program": ("accelerate",), "strategy": ("single", "ddp"), "device": ("cpu",), "dtype": ("fp16",)},
        "precision.dtype",
        "on a CPU accelerate takes fp16 and computes in fp32, without a word",
        "precision.dtype: bf16 or fp32",
    ),
)
