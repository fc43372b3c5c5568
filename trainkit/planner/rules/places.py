"""Which processes can sit on which cards under which launcher: the corners of strategy, launcher and devices."""

from __future__ import annotations

from trainkit.plan.combination import SHARED, ZERO, Refusal

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
)
