"""Which number formats a strategy or a device does not take."""

from __future__ import annotations

from trainkit.plan.combination import ZERO, Refusal

REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        {"strategy": ZERO, "device": ("cpu",), "dtype": ("fp16",)},
        "precision.dtype",
        "DeepSpeed trains fp16 on a CPU only where oneDNN has fp16 kernels for it",
        "precision.dtype: bf16 or fp32",
    ),
    Refusal(
        {"program": ("builtin",), "strategy": ("fsdp", *ZERO), "eval_dtype": ("other",)},
        "precision.eval",
        "this strategy casts the weights once, to precision.dtype, for training and evaluation alike",
        "precision.eval: same, or strategy.kind: ddp",
    ),
    Refusal(
        {"program": ("builtin",), "weights": ("bf16",), "dtype": ("fp32", "fp16")},
        "precision.weights",
        "weights that are kept in bf16 are computed with in bf16",
        "precision.dtype: bf16, or precision.weights: fp32",
    ),
    Refusal(
        {"program": ("builtin",), "weights": ("bf16",), "eval_dtype": ("other",)},
        "precision.eval",
        "weights that are kept in bf16 are evaluated in bf16",
        "precision.eval: same",
    ),
    Refusal(
        {"program": ("builtin",), "weights": ("bf16",), "strategy": ZERO},
        "precision.weights",
        "DeepSpeed keeps an fp32 copy of the weights with the optimizer, so nothing would be saved",
        "strategy.kind: fsdp, or precision.weights: fp32",
    ),
)
