"""What the built-in trainer cannot do together: micro batch search, models, number formats, memory, optimizers."""

from __future__ import annotations

from trainkit.optimizers import OPTIMIZERS, ZERO, Unsupported
from trainkit.plan.combination import Refusal


def _optimizer(name: str, found: Unsupported) -> Refusal:
    when: dict[str, tuple[str, ...]] = {"program": found.programs, "optimizer": (name,)}
    when |= {"strategy": found.strategies} if found.strategies else {}
    when |= {"device": found.devices} if found.devices else {}
    return Refusal(when, "optimizer.name", found.reason, found.instead)


REFUSALS: tuple[Refusal, ...] = (
    # Where the largest micro batch cannot be looked for.
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
        "each size that is tried would be compiled again, and what is compiled after several sizes is not what one "
        "size gives",
        "batch.micro: a number, or efficiency.compile: false",
    ),
    Refusal(
        {"program": ("builtin",), "micro": ("searched",), "device": ("mps",)},
        "batch.micro",
        "MPS does not tell the peak of the memory that was used",
        "batch.micro: a number, or devices.type: cpu",
    ),
    # What models, their attention and adapters do not go with.
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
        "the attention of a model of your own is the model's own",
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
    # Which number formats a strategy or a device does not take.
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
    # Where recomputing, compiling and saving in the background do not work.
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
    # Which optimizers a strategy or a device cannot run.
    *(_optimizer(name, found) for name, each in OPTIMIZERS.items() for found in each.unsupported),
)
