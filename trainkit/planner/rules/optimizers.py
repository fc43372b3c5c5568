"""Which optimizers a strategy or a device cannot run."""

from __future__ import annotations

from trainkit.planner.rules.rule import ZERO, Refusal

REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        {"program": ("builtin",), "strategy": ("fsdp",), "optimizer": ("adafactor",)},
        "optimizer.name",
        "torch's Adafactor needs the norms of whole matrices, and has no rule for sharded ones (DTensor)",
        "optimizer.name: adamw_torch, or strategy.kind: ddp",
    ),
    Refusal(
        {"program": ("builtin",), "strategy": ZERO, "optimizer": ("adafactor",)},
        "optimizer.name",
        "DeepSpeed hands the optimizer one flat vector per rank, in which there are no rows and columns to factor",
        "optimizer.name: adamw_torch, or strategy.kind: ddp",
    ),
    Refusal(
        {"program": ("builtin",), "strategy": ZERO, "optimizer": ("adagrad",)},
        "optimizer.name",
        "DeepSpeed makes torch's Adagrad anew without its parameter groups, and then fails",
        "optimizer.name: sgd or adamw_torch, or strategy.kind: fsdp",
    ),
    Refusal(
        {"program": ("builtin",), "strategy": ("zero3",), "optimizer": ("adamw_anyprecision",)},
        "optimizer.name",
        "ZeRO-3 calls the optimizer once for each group of parameters, and this one counts each call as a step of all: "
        "its bias correction comes out wrong",
        "optimizer.name: adamw_torch, or strategy.kind: fsdp or zero2",
    ),
    Refusal(
        {"program": ("builtin",), "strategy": ("fsdp",), "optimizer": ("adamw_bnb_8bit", "adamw_apex_fused")},
        "optimizer.name",
        "its kernels take whole tensors, and fsdp hands it sharded ones (DTensor)",
        "optimizer.name: adamw_torch_fused, or strategy.kind: ddp",
    ),
    Refusal(
        {"program": ("builtin",), "strategy": ZERO, "optimizer": ("adamw_bnb_8bit",)},
        "optimizer.name",
        "DeepSpeed hands the optimizer one flat vector per rank, in which embeddings cannot be kept in 32-bit",
        "optimizer.name: adamw_torch, or strategy.kind: ddp",
    ),
    Refusal(
        {"program": ("builtin",), "device": ("cpu", "mps"), "optimizer": ("adamw_apex_fused",)},
        "optimizer.name",
        "apex's kernels run on CUDA only",
        "optimizer.name: adamw_torch_fused",
    ),
    Refusal(
        {"program": ("builtin",), "device": ("mps",), "optimizer": ("adamw_bnb_8bit",)},
        "optimizer.name",
        "bitsandbytes has no 8-bit optimizer for MPS",
        "optimizer.name: adafactor, or adamw_torch",
    ),
)
