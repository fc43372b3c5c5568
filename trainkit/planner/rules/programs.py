"""What transformers' Trainer and scripts on `Accelerator()` would do otherwise than asked, without a word."""

from __future__ import annotations

from trainkit.optimizers import ZERO
from trainkit.plan.combination import Refusal

REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        {"program": ("hf",), "strategy": ("fsdp",), "device": ("cpu",)},
        "strategy.kind",
        "on a CPU Trainer takes --fsdp and trains with DDP, without a word",
        "strategy.kind: ddp, or zero3, which shards on a CPU too",
    ),
    Refusal(
        {"program": ("hf",), "strategy": ("single", "ddp", "fsdp"), "device": ("cpu",), "dtype": ("fp16",)},
        "precision.dtype",
        "on a CPU Trainer takes --fp16 and computes in fp32, without a word",
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
