"""What launchers and programs may know when they write their part of the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from trainkit.data.seen import SeenData
from trainkit.errors import Origin
from trainkit.hub.cache import CachedRepo
from trainkit.launch_plan.model import BatchArithmetic, Device, Foresight, GpuWait, NodeGroup, Resume, Topology
from trainkit.machine.capability import Dtype
from trainkit.machine.facts import Facts, Gpu
from trainkit.machine.selection import kind_of_cards
from trainkit.recipe.schema import Recipe

if TYPE_CHECKING:
    from trainkit.recipe.resolved import Resolved


NOT_LOOKED_FOR = Resume(None, 0, "no checkpoint has been looked for")


@dataclass(frozen=True, slots=True)
class Context:
    """All decisions of the plan, taken; what is left is to write them down.

    launcher: the chosen kind. cards: the chosen GPUs in rank order, empty off CUDA.
    dtype: of the forward and backward computation, `auto` resolved. hub: what the recipe names there. seen: the data.
    foresight: what the run is expected to take, where that can be told. waits: for which GPUs, where it does.
    """

    resolved: Resolved
    facts: Facts
    topology: Topology
    launcher: str
    cards: tuple[Gpu, ...]
    batch: BatchArithmetic
    dtype: Dtype
    training_digest: str = ""  # until the batch is solved
    resume: Resume = NOT_LOOKED_FOR
    hub: Sequence[CachedRepo] = ()
    seen: SeenData = field(default_factory=SeenData)
    foresight: Foresight | None = None
    waits: GpuWait | None = None
    recipe: Recipe = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "recipe", self.resolved.recipe)

    @property
    def program(self) -> str:
        return self.recipe.program.kind

    @property
    def strategy(self) -> str:
        return self.recipe.strategy.kind

    @property
    def device(self) -> str:
        return self.topology.device

    @property
    def ranks(self) -> int:
        return self.topology.world_size

    @property
    def model_type(self) -> str:
        """What transformers calls the model's architecture; empty for others, and where it is not known."""
        named = getattr(self.recipe.model, "architecture", None)
        return str(self.resolved.described.model.get("model_type") or named or "")

    @property
    def eval_dtype(self) -> str:
        """The number format of evaluation."""
        asked = self.recipe.precision.eval
        return self.dtype if asked == "same" else asked

    @property
    def kind_of_cards(self) -> Literal["nvidia", "mig", "amd"]:
        """What launchers and programs must know of the GPUs; `nvidia` also where there are none."""
        return kind_of_cards(self.cards)

    @property
    def searches_micro(self) -> bool:
        """Whether the largest micro batch that fits is looked for; with `accumulation` given, `auto` follows."""
        return self.recipe.batch.micro == self.recipe.batch.accumulation == "auto"

    def origin(self, key: str) -> Origin | None:
        """Where the value of a setting comes from."""
        return self.resolved.origin(key)

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
        """Whether a process sees more GPUs than the one that its rank stands for."""
        return len(self.devices) > self.processes

    @property
    def zero(self) -> bool:
        """Whether the plan configures DeepSpeed's engine."""
        return self.recipe.strategy.kind.startswith("zero")

    @property
    def deepspeed(self) -> bool:
        """Whether the program runs on DeepSpeed's engine, be it that its own code configures it."""
        return self.zero or self.recipe.program.kind == "deepspeed"


def bare_context(
    strategy: str, launcher: str, program: str, device: Device, ranks: int, *, nodes: int = 1, dtype: Dtype = "fp32"
) -> Context:
    """A plan with these choices and nothing else: to ask whether they can run together. ranks: over all nodes."""
    from trainkit.recipe.resolved import Resolved

    recipe = Recipe.model_validate({"strategy": {"kind": strategy}, "program": {"kind": program}})
    processes = max(ranks // nodes, 1)
    topology = Topology(device, (NodeGroup(nodes, processes, (device,) * processes),))
    batch = BatchArithmetic(None, None, None, ranks, None)
    facts = Facts(platform="", machine="", hostname="", python="", executable="", cpu_cores=1, memory_total=0)
    return Context(Resolved(recipe, {}, {}), facts, topology, launcher, (), batch, dtype)
