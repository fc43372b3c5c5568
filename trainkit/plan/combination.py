"""What decides whether a recipe can run as a whole, and one corner of it that cannot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainkit.optimizers import ON_DEEPSPEED

Amount = Literal["one", "several"]
SHARED = ("ddp", "fsdp", *ON_DEEPSPEED)  # strategies that need a process group


@dataclass(frozen=True, slots=True)
class Combination:
    """The choices that may not go together. ranks: over all nodes. order: of the chosen cards' indices."""

    strategy: str
    launcher: str
    program: str
    device: str
    ranks: Amount
    nodes: Amount = "one"
    dtype: str = "fp32"
    eval_dtype: Literal["same", "other"] = "same"
    evaluates: str = "fp32"  # the format of evaluation
    recompute: Literal["whole", "selective"] = "whole"  # of the blocks that gradient_checkpointing names
    restarts: Literal["no", "yes"] = "no"
    order: Literal["ascending", "other"] = "ascending"
    cards: Literal["nvidia", "mig", "amd"] = "nvidia"
    seen: Amount = "one"  # cards that each process sees for every rank of its node
    total: Literal["open", "given"] = "open"  # the global batch
    saving: Literal["waited for", "asynchronous"] = "waited for"
    optimizer: str = "adamw_torch"
    weights: str = "fp32"
    compiled: Literal["no", "auto", "model", "blocks"] = "no"
    graphs: Literal["none", "recorded"] = "none"  # CUDA graphs, by what compiles the model
    passes: Amount = "one"  # forward and backward, in each optimizer step
    adapters: Literal["none", "lora", "dora"] = "none"
    quantized: str = "0"  # bits of frozen weights
    swapping: Literal["no", "nvme"] = "no"
    attention: str = "auto"
    model: str = "gpt"
    micro: Literal["given", "searched"] = "given"
    xla_settings: Literal["none", "given"] = "none"


@dataclass(frozen=True, slots=True)
class Refusal:
    """One unsupported corner. when: field of Combination -> values; all must match."""

    when: dict[str, tuple[str, ...]]
    key: str  # the recipe key to point at
    reason: str
    instead: str

    def matches(self, combination: Combination) -> bool:
        """Whether the combination lies in this corner."""
        return all(getattr(combination, name) in values for name, values in self.when.items())
