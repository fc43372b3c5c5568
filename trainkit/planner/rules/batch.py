"""Where the largest micro batch cannot be looked for."""

from __future__ import annotations

from trainkit.plan.combination import ZERO, Refusal

REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        {"program": ("torch", "hf", "accelerate", "deepspeed"), "micro": ("searched",)},
        "batch.micro",
        "only the built-in trainer looks for the largest micro batch that fits",
        "batch.micro: a number, or left out",
    ),
    Refusal(
        {"program": ("builtin",), "micro": ("searched",), "strategy": ZERO},
        "batch.micro",
        "DeepSpeed reads the micro batch from its file, which is written before anything is tried",
        "batch.micro: a number, or strategy.kind: ddp",
    ),
    Refusal(
        {"program": ("builtin",), "micro": ("searched",), "strategy": ("fsdp",)},
        "batch.micro",
        "a rank that runs out of memory between two gathers of weights would leave the others waiting for it",
        "batch.micro: a number, or strategy.kind: ddp",
    ),
    Refusal(
        {"program": ("builtin",), "micro": ("searched",), "compiled": ("auto", "model", "blocks")},
        "batch.micro",
        "each size that is tried would be compiled anew, and what is compiled after several sizes is not what one size "
        "gives",
        "batch.micro: a number, or efficiency.compile: false",
    ),
    Refusal(
        {"program": ("builtin",), "micro": ("searched",), "device": ("mps",)},
        "batch.micro",
        "MPS does not tell the peak of the memory that was used",
        "batch.micro: a number, or devices.type: cpu",
    ),
)
