"""What transformers' Trainer and scripts on `Accelerator()` would silently do otherwise than asked."""

from __future__ import annotations

from trainkit.optimizers import ZERO
from trainkit.plan.combination import Refusal

REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        {"program": ("hf",), "strategy": ("fsdp",), "device": ("cpu",)},
        "strategy.kind",
        "on a CPU Trainer takes --fsdp and silently trains with DDP",
        "strategy.kind: ddp, or zero3, which shards on a CPU too",
    ),
    Refusal(
        {"program": ("hf",), "strategy": ("single", "ddp", "fsdp"), "device": ("cpu",), "dtype": ("fp16",)},
        "precision.dtype",
        "on a CPU Trainer takes --fp16 and silently computes in fp32",
        "precision.dtype: bf16 or fp32",
    ),
    Refusal(
        {"program": ("hf",), "strategy": ZERO, "eval_dtype": ("other",)},
        "precision.eval",
        "DeepSpeed has one format for training and evaluation",
        "precision.eval: same",
    ),
    Refusal(
        {"program": ("accelerate",), "strategy": ("fsdp",), "device": ("cpu",)},
        "strategy.kind",
        "on a CPU accelerate silently trains with DDP, or with copies that never talk to one another",
        "strategy.kind: ddp, or zero3, which shards on a CPU too",
    ),
    Refusal(
        {"program": ("accelerate",), "strategy": ("single", "ddp"), "device": ("cpu",), "dtype": ("fp16",)},
        "precision.dtype",
        "on a CPU accelerate takes fp16 and silently computes in fp32",
        "precision.dtype: bf16 or fp32",
    ),
)
