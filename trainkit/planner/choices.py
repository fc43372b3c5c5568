"""What a plan chooses by name and gives a reason for: device and launcher, also where they are `auto`, and strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from trainkit.errors import RecipeError
from trainkit.machine.facts import Facts
from trainkit.machine.selection import allocation, restriction
from trainkit.plan.model import Choice, Topology
from trainkit.recipe.schema import Fsdp, Recipe
from trainkit.text import counted

if TYPE_CHECKING:
    from trainkit.recipe.resolved import Resolved

Device = Literal["cpu", "cuda", "mps", "xla"]

STRATEGY_REASON = {
    "single": "one process trains on one device",
    "ddp": "each rank holds the whole model; gradients are averaged",
    "fsdp": "parameters, gradients and optimizer state are sharded over the ranks (FSDP2)",
    "zero1": "DeepSpeed partitions the optimizer state",
    "zero2": "DeepSpeed partitions optimizer state and gradients",
    "zero3": "DeepSpeed partitions optimizer state, gradients and parameters",
}
# kind of program -> who sets the strategy up there; the built-in trainer does by itself
SET_UP_BY = {
    "hf": "done by Trainer, which is told: ",
    "accelerate": "done by Accelerator(), which is told: ",
    "deepspeed": "done by DeepSpeed, which is told in its file: ",
    "torch": "your program's own part: ",
}


def choose_device(resolved: Resolved, facts: Facts) -> tuple[Device, str]:
    """The kind of device and why: as asked for, else CUDA, then MPS, then CPU; never XLA by itself."""
    devices = resolved.recipe.devices
    if devices.select == "none":
        if devices.type in {"cuda", "mps", "xla"}:
            what = f"devices.type is {devices.type}, but devices.select is none"
            hint = "leave devices.select out to use a card, or set devices.type to cpu"
            raise RecipeError(resolved.error("devices.select", what, hint))
        return "cpu", "devices.select is none"
    if devices.type != "auto":
        return devices.type, f"devices.type is {devices.type}"
    if not isinstance(devices.select, str) or devices.select == "free":
        return "cuda", "devices.select asks for cards"
    if allocation(facts):
        return "cuda", f"{counted(len(allocation(facts)), 'GPU')} can be used here"
    if facts.gpus:
        return "cpu", f"{restriction(facts) or 'MIG'} hides every GPU"
    return ("mps", "Apple silicon without a CUDA card") if facts.mps else ("cpu", "there is no GPU here")


def choose_launcher(recipe: Recipe, topology: Topology) -> Choice:
    """As asked for, else the program's own launcher, else `python` for one process and `torchrun` for several."""
    if recipe.launcher.kind != "auto":
        return Choice(recipe.launcher.kind, "launcher.kind asks for it")
    if recipe.program.kind == "accelerate" and topology.device != "xla":
        return Choice("accelerate", "scripts on Accelerator() are made for it")
    if topology.world_size == 1:
        return Choice("python", "one process needs no launcher")
    return Choice("torchrun", f"{topology.world_size} processes")


def strategy_choice(recipe: Recipe, device: str) -> Choice:
    """The recipe's strategy, with what it does and who sees to it."""
    reason = STRATEGY_REASON[recipe.strategy.kind]
    if isinstance(recipe.strategy, Fsdp) and device == "xla":
        reason = reason.replace("ranks (FSDP2)", "chips (torch_xla's FSDP)")
    elif isinstance(recipe.strategy, Fsdp) and recipe.strategy.version == 1:
        reason = reason.replace("FSDP2", "FSDP1")
    return Choice(recipe.strategy.kind, f"{SET_UP_BY.get(recipe.program.kind, '')}{reason}")
