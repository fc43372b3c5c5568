"""Which processes can sit on which cards under which launcher: the corners of strategy, launcher and devices."""

from __future__ import annotations

from trainkit.planner.rules.rule import SHARED, ZERO, Refusal

REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        {"program": ("deepspeed",), "strategy": ("single", "ddp", "fsdp")},
        "strategy.kind",
        "a program on DeepSpeed's engine trains with ZeRO",
        "strategy.kind: zero1, which runs on one process too, or program.kind: torch",
    ),
    Refusal(
        {"launcher": ("deepspeed",), "local_rank": ("passed",)},
        "program.local_rank",
        "the deepspeed launcher says the local rank only to scripts that it starts by itself, without a wrapper",
        "launcher.kind: torchrun, or program.local_rank: false for a script that reads LOCAL_RANK",
    ),
    Refusal(
        {"strategy": ("single",), "ranks": ("several",)},
        "strategy.kind",
        "`single` is one process on one device: several would train separate copies that never talk to one another",
        "strategy.kind: ddp for several processes, or nodes.processes_per_node: 1",
    ),
    Refusal(
        {"launcher": ("python",), "ranks": ("several",)},
        "launcher.kind",
        "`python` starts one process",
        "launcher.kind: torchrun",
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
        {"device": ("mps",), "launcher": ("torchrun", "deepspeed")},
        "launcher.kind",
        "this launcher is for several processes, and MPS takes one",
        "launcher.kind: python",
    ),
    Refusal(
        {"launcher": ("deepspeed",), "nodes": ("several",)},
        "launcher.kind",
        "the deepspeed launcher wants a hostfile that names every machine, and numbers the ranks by that file",
        "launcher.kind: torchrun, which runs every strategy on several nodes, the zero ones too",
    ),
    Refusal(
        {"launcher": ("deepspeed",), "device": ("cuda",), "order": ("other",)},
        "devices.select",
        "the deepspeed launcher sorts the cards, so ranks would sit on other cards than the recipe says",
        "devices.select in ascending order, or launcher.kind: torchrun",
    ),
    Refusal(
        {"cards": ("mig",), "ranks": ("several",)},
        "devices.select",
        "NCCL takes two parts of a card for one device, and a process sees only the first part that it is shown",
        "one part with nodes.processes_per_node: 1, or whole cards",
    ),
    Refusal(
        {"cards": ("mig",), "launcher": ("deepspeed",)},
        "launcher.kind",
        "the deepspeed launcher takes cards by number only, and parts of a card have none",
        "launcher.kind: python",
    ),
    Refusal(
        {"cards": ("mig",), "strategy": ZERO},
        "strategy.kind",
        "DeepSpeed reads CUDA_VISIBLE_DEVICES as numbers, and parts of a card have none",
        "strategy.kind: single",
    ),
    Refusal(
        {"cards": ("amd",), "launcher": ("deepspeed",)},
        "launcher.kind",
        "the deepspeed launcher renumbers cards in CUDA_VISIBLE_DEVICES, while ROCm goes by HIP_VISIBLE_DEVICES",
        "launcher.kind: torchrun, which runs the zero strategies too",
    ),
    Refusal(
        {"launcher": ("python", "deepspeed"), "restarts": ("yes",)},
        "launcher.max_restarts",
        "this launcher never restarts ranks",
        "launcher.kind: torchrun, or launcher.max_restarts: 0",
    ),
    Refusal(
        {"launcher": ("accelerate",), "ranks": ("one",), "restarts": ("yes",)},
        "launcher.max_restarts",
        "accelerate starts a single process directly and never restarts it",
        "launcher.kind: torchrun, or launcher.max_restarts: 0",
    ),
)
