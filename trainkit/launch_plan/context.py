"""What launchers and programs may know when they write their part of the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from trainkit.hub.cache import Copy
from trainkit.launch_plan.model import BatchArithmetic, Resume, Topology
from trainkit.machine.facts import Facts, Gpu
from trainkit.recipe.schema import Recipe

if TYPE_CHECKING:
    from trainkit.recipe.resolved import Resolved

Dtype = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, slots=True)
class Context:
    """All decisions of the plan, taken; what is left is to write them down.

    launcher: the chosen kind. cards: the chosen GPUs in rank order, empty off CUDA.
    dtype: of the forward and backward computation, `auto` resolved. hub: what the recipe names there.
    """

    resolved: Resolved
    facts: Facts
    topology: Topology
    launcher: str
    cards: tuple[Gpu, ...]
    batch: BatchArithmetic
    dtype: Dtype
    training_digest: str
    resume: Resume
    hub: Sequence[Copy] = ()

    @property
    def recipe(self) -> Recipe:
        """The validated recipe."""
        return self.resolved.recipe

    @property
    def processes(self) -> int:
        """Ranks on each node."""
        return self.topology.groups[0].processes

    @property
    def devices(self) -> tuple[str, ...]:
        """What each local rank uses, and behind that what every rank of a node sees besides."""
        return self.topology.groups[0].devices

    @property
    def sees_several(self) -> bool:
        """Whether a process sees more cards than the one that its rank stands for."""
        return len(self.devices) > self.processes

    @property
    def zero(self) -> bool:
        """Whether the plan configures DeepSpeed's engine."""
        return self.recipe.strategy.kind.startswith("zero")

    @property
    def deepspeed(self) -> bool:
        """Whether the program runs on DeepSpeed's engine, be it that its own code configures it."""
        return self.zero or self.recipe.program.kind == "deepspeed"
