"""Which strategies and programs can run on which devices, and with how many processes."""

from __future__ import annotations

from trainkit.optimizers import ZERO
from trainkit.plan.combination import SHARED, Refusal

XLA = ("xla",)

REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        {"program": ("deepspeed",), "strategy": ("single", "ddp", "fsdp")},
        "strategy.kind",
        "a program on DeepSpeed's engine trains with ZeRO",
        "strategy.kind: zero1, which runs on one process too, or program.kind: torch",
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
        {"cards": ("mig",), "ranks": ("several",)},
        "devices.select",
        "NCCL takes two parts of a card for one device, and a process sees only the first part that it is shown",
        "one part with nodes.processes_per_node: 1, or whole cards",
    ),
    Refusal(
        {"cards": ("mig",), "strategy": ZERO},
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
        {"device": XLA, "strategy": ("ddp", *ZERO)},
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
)
