"""What cannot work together, as one table: devices and strategies, programs, techniques, optimizers.

Each row has its reason and what to choose instead; a launcher keeps its own rows (`UNSUPPORTED`).
"""

from __future__ import annotations

from trainkit.optimizers import ON_DEEPSPEED, OPTIMIZERS, ZERO, Unsupported
from trainkit.plan.combination import SHARED, Refusal
from trainkit.planner.quantized import REFUSALS as OF_QUANTIZED

XLA = ("xla",)
WITHOUT_GRAPHS = (
    "efficiency.compile.backend: inductor with mode: default, or max-autotune-no-cudagraphs, which record no graphs"
)


def _optimizer(name: str, found: Unsupported) -> Refusal:
    when: dict[str, tuple[str, ...]] = {"program": found.programs, "optimizer": (name,)}
    when |= {"strategy": found.strategies} if found.strategies else {}
    when |= {"device": found.devices} if found.devices else {}
    return Refusal(when, "optimizer.name", found.reason, found.instead)


REFUSALS: tuple[Refusal, ...] = (
    # Which strategies and programs can run on which devices, and with how many processes.
    Refusal(
        {"program": ("deepspeed",), "strategy": ("fsdp",)},
        "strategy.kind",
        "a program on DeepSpeed's engine trains with ZeRO, or with what its own code configures",
        "strategy.kind: zero3, which shards too; ddp or single for a script that configures the engine in its code",
    ),
    Refusal(
        {"program": ("builtin",), "strategy": ("zero0",)},
        "strategy.kind",
        "without partitioning, DeepSpeed's engine is plain data parallelism, which the built-in trainer has by itself",
        "strategy.kind: ddp, or name a program of your own",
    ),
    Refusal(
        {"strategy": ("single",), "ranks": ("several",)},
        "strategy.kind",
        "`single` is one process on one device: several would train separate copies that never talk to one another",
        "strategy.kind: ddp for several processes, or nodes.processes_per_node: 1",
    ),
    Refusal(
        {"device": ("mps",), "ranks": ("several",)},
        "nodes.processes_per_node",
        "MPS takes one process: neither gloo nor nccl can exchange its tensors",
        "nodes.processes_per_node: 1 with strategy.kind: single, or devices.type: cpu",
    ),
    Refusal(
        {"device": ("mps",), "strategy": SHARED},
        "strategy.kind",
        "this strategy needs a process group, and neither gloo nor nccl can exchange MPS tensors",
        "strategy.kind: single, or devices.type: cpu",
    ),
    Refusal(
        # CUDA shows a process one MIG device, the first that it is given (NVIDIA MIG user guide).
        {"cards": ("mig",), "ranks": ("several",)},
        "devices.select",
        "NCCL takes two parts of a card for one device, and a process sees only the first part that it is shown",
        "one part with nodes.processes_per_node: 1, or whole cards",
    ),
    Refusal(
        {"cards": ("mig",), "seen": ("several",)},
        "devices.select",
        "a process sees only the first part of a card that it is shown",
        "one part, or whole cards",
    ),
    # Where one process sees several cards.
    Refusal(
        {"launcher": ("deepspeed",), "seen": ("several",)},
        "devices.select",
        "the deepspeed launcher starts a process for each card that it is given",
        "as many cards as nodes.processes_per_node, or launcher.kind: torchrun",
    ),
    Refusal(
        {"program": ("hf",), "launcher": ("python",), "seen": ("several",), "total": ("given",)},
        "batch.global",
        "in one process that sees several cards Trainer multiplies the batch by their number, unless the script has "
        "laid the model over them (device_map): the sum cannot be promised",
        "batch.micro and batch.accumulation instead, strategy.kind: ddp, or devices.select: 1",
    ),
    Refusal(
        {"cards": ("mig",), "strategy": ON_DEEPSPEED},
        "strategy.kind",
        "DeepSpeed reads CUDA_VISIBLE_DEVICES as numbers, and parts of a card have none",
        "strategy.kind: single",
    ),
    # A TPU runs through torch_xla, as one process of the user's own script.
    Refusal(
        {"device": XLA, "program": ("builtin",)},
        "devices.type",
        "the built-in trainer computes on CUDA, MPS and CPU",
        "program.kind: hf with a script on transformers' Trainer, or kind accelerate or torch",
    ),
    Refusal(
        {"device": XLA, "program": ("deepspeed",)},
        "devices.type",
        "DeepSpeed does not run through torch_xla",
        "program.kind: hf with strategy.kind: fsdp, which shards over the chips",
    ),
    Refusal(
        {"device": XLA, "ranks": ("several",)},
        "nodes.processes_per_node",
        "torch_xla makes the processes of a TPU itself, inside the script's interpreter (xmp.spawn), so no launcher "
        "can give each its rank",
        "nodes.count: 1 and nodes.processes_per_node: 1, with strategy.kind: fsdp for every chip of the machine; a "
        "script of kind torch that calls xmp.spawn itself is one process too, with strategy.kind: single",
    ),
    Refusal(
        {"device": XLA, "strategy": ("ddp", *ON_DEEPSPEED)},
        "strategy.kind",
        "this strategy is a process for each chip, and a run on XLA is one process",
        "strategy.kind: fsdp with program.kind: hf, or single for one chip",
    ),
    Refusal(
        {"device": XLA, "strategy": ("fsdp",), "program": ("accelerate",)},
        "strategy.kind",
        "under XLA accelerate takes its FSDP settings and silently shards nothing",
        "strategy.kind: single, or program.kind: hf, whose Trainer shards with torch_xla",
    ),
    Refusal(
        {"device": XLA, "program": ("hf", "accelerate"), "dtype": ("fp16",)},
        "precision.dtype",
        "accelerate ends with an error at fp16 on a TPU",
        "precision.dtype: bf16 or fp32",
    ),
    Refusal(
        {"device": ("cpu", "cuda", "mps"), "xla_settings": ("given",)},
        "strategy.xla_settings",
        "only torch_xla's FSDP has these settings",
        "devices.type: xla with strategy.version: 1, or leave strategy.xla_settings out",
    ),
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
        # https://github.com/Dao-AILab/flash-attention: fp16 and bf16, on CUDA and ROCm
        {"program": ("builtin",), "model": ("hf",), "attention": ("flash_attention_2",), "dtype": ("fp32",)},
        "efficiency.attention",
        "FlashAttention-2 computes in 16 bits only",
        "precision.dtype: bf16, or efficiency.attention: sdpa",
    ),
    Refusal(
        {
            "program": ("builtin",),
            "model": ("hf",),
            "attention": ("flash_attention_2",),
            "dtype": ("bf16", "fp16"),
            "evaluates": ("fp32",),
        },
        "precision.eval",
        "FlashAttention-2 computes in 16 bits only, and evaluation is to be in fp32",
        "precision.eval: same, or efficiency.attention: sdpa",
    ),
    Refusal(
        {"program": ("builtin",), "model": ("hf",), "attention": ("flash_attention_2",), "device": ("cpu", "mps")},
        "efficiency.attention",
        "FlashAttention-2 runs on CUDA only",
        "efficiency.attention: sdpa",
    ),
    *OF_QUANTIZED,
    # Which number formats a strategy or a device does not take.
    Refusal(
        # accelerator/cpu_accelerator.py: is_fp16_supported
        {"strategy": ON_DEEPSPEED, "device": ("cpu",), "dtype": ("fp16",)},
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
        # https://github.com/pytorch/pytorch/issues/169545 ends with an error, issues/96693 with a wrong sum
        {"program": ("builtin",), "graphs": ("recorded",), "passes": ("several",)},
        "efficiency.compile",
        "a CUDA graph writes its gradients to the same places in each pass, over those that are being accumulated",
        f"{WITHOUT_GRAPHS}, or batch.accumulation: 1",
    ),
    Refusal(
        {"program": ("builtin",), "graphs": ("recorded",), "strategy": ("fsdp", "zero3")},
        "efficiency.compile",
        "a CUDA graph reads the weights from where they were when it was recorded, and this strategy gathers them "
        "anew for each use",
        WITHOUT_GRAPHS,
    ),
    Refusal(
        {"program": ("builtin",), "strategy": ("zero3",), "recompute": ("selective",)},
        "efficiency.gradient_checkpointing.selective",
        "under ZeRO-3 DeepSpeed's linear layers add their bias onto the product that was to be kept: gradients come "
        "out wrong",
        "efficiency.gradient_checkpointing.selective: false, or strategy.kind: fsdp",
    ),
    # What transformers' Trainer and scripts on `Accelerator()` would silently do otherwise than asked.
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
        {"program": ("hf",), "strategy": ON_DEEPSPEED, "eval_dtype": ("other",)},
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
    # Which optimizers a strategy or a device cannot run.
    *(_optimizer(name, found) for name, each in OPTIMIZERS.items() for found in each.unsupported),
)
