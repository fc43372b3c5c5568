"""What models, their attention and adapters do not go with."""

from __future__ import annotations

from trainkit.plan.combination import Refusal

REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        {"program": ("builtin",), "adapters": ("lora", "dora"), "swapping": ("nvme",)},
        "strategy.nvme_path",
        "DeepSpeed swaps what trains, which with adapters is next to nothing, and checkpoints of such a run would not "
        "hold the frozen weights",
        "strategy.offload_optimizer: none with strategy.offload_param: cpu, or peft.kind: none",
    ),
    Refusal(
        {"program": ("builtin",), "strategy": ("fsdp", "zero3"), "adapters": ("dora",)},
        "peft.dora",
        "DoRA takes the norms of whole weights, and this strategy shards them",
        "peft.dora: false, or strategy.kind: ddp",
    ),
    Refusal(
        {"program": ("builtin",), "model": ("target",), "attention": ("sdpa", "eager", "flash_attention_2")},
        "efficiency.attention",
        "the attention of a model of your own is its own affair",
        "efficiency.attention: auto, and an argument of the model in model.args",
    ),
    Refusal(
        {"program": ("builtin",), "model": ("gpt",), "attention": ("flash_attention_2",)},
        "efficiency.attention",
        "the native model has sdpa, which takes the flash kernel by itself, and eager",
        "efficiency.attention: sdpa, or model.kind: hf",
    ),
    Refusal(
        {"program": ("builtin",), "model": ("hf",), "attention": ("flash_attention_2",), "dtype": ("fp32",)},
        "efficiency.attention",
        "FlashAttention-2 computes in 16 bits only",
        "precision.dtype: bf16, or efficiency.attention: sdpa",
    ),
    Refusal(
        {"program": ("builtin",), "model": ("hf",), "attention": ("flash_attention_2",), "device": ("cpu", "mps")},
        "efficiency.attention",
        "FlashAttention-2 runs on CUDA only",
        "efficiency.attention: sdpa",
    ),
)
