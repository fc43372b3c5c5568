"""What a plan can be exported to, and which settings of the recipe each format carries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from trainkit.errors import RecipeError
from trainkit.launch_plan.context import Context
from trainkit.planner.rules import refusals
from trainkit.recipe.schema.fields import lies_in
from trainkit.tools.accelerate import exporter as accelerate
from trainkit.tools.accelerate.fields import SETTINGS
from trainkit.tools.deepspeed import exporter as deepspeed
from trainkit.tools.deepspeed.fields import CARRIED as OF_DEEPSPEED
from trainkit.tools.deepspeed.fields import STRATEGY_KEYS, TYPES, has_schedule
from trainkit.tools.hf import exporter as hf
from trainkit.tools.hf.fsdp_config import CONFIG as FSDP_CONFIG
from trainkit.tools.hf.support import SUPPORT


class Export(Protocol):
    """What a module for one tool offers; all functions are pure."""

    def unfit(self, context: Context) -> str:
        """Why the tool has no way to run this plan; empty where it has."""

    def started(self, context: Context) -> tuple[Context, ...]:
        """What the tool would start, where that is not what the plan starts."""

    def files(self, context: Context, folder: str) -> dict[str, str]:
        """Content by name. folder: where they will lie, as the files name one another."""

    def notes(self, context: Context) -> tuple[str, ...]:
        """What somebody who uses the files has to do besides."""


EXPORTS: dict[str, Export] = {"accelerate": accelerate, "deepspeed": deepspeed, "hf": hf}

_ZERO = ("strategy.kind", *STRATEGY_KEYS, "precision.dtype", "train.max_grad_norm")
_OF_PROGRAMS = {"strategy.gather_16bit"}  # which the built-in trainer has not, and programs keep in their file
_FLAGS = (key for key, way in SUPPORT.items() if way.by.startswith("--") or way.by == FSDP_CONFIG)
# The settings that an import of the exported files gives back. A key stands for all below it.
CARRIED: Mapping[str, frozenset[str]] = {
    "hf": frozenset({
        *_FLAGS, "nodes.count", "nodes.processes_per_node", "nodes.rendezvous", "strategy.kind",
        "program", "launcher.kind", "launcher.max_restarts", "output.root", "env", "devices.type", "devices.select",
        "devices.order",
    }),
    "deepspeed": frozenset({*_ZERO, *OF_DEEPSPEED}) - _OF_PROGRAMS,
    "accelerate": frozenset({
        *_ZERO, *(key for each in SETTINGS for key in each.keys), "batch.global", "batch.micro", "efficiency.compile",
    }) - _OF_PROGRAMS,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PartialSetting:
    """A setting that a format does not carry in every plan.

    comes_back: whether an import gives it back. reaches: whether the tool follows it nevertheless.
    """

    comes_back: bool = False
    reaches: bool = True


_FILELESS = ("builtin", "torch")  # programs that get no file of DeepSpeed's in a run: an export makes all of it


def exceptions(context: Context, name: str) -> dict[str, PartialSetting]:
    """The settings that this plan's files carry in part, or not at all."""
    recipe, compiles = context.recipe, context.recipe.efficiency.compile.enabled
    several = context.topology.world_size > 1
    # The exported file takes its place as base.
    found = {"strategy.config": PartialSetting()}
    if name != "deepspeed":
        # One process is what there is anyway, with replicas or without.
        found["nodes.processes_per_node"] = PartialSetting(several)
        found["strategy.kind"] = PartialSetting(several or recipe.strategy.kind != "ddp")
        # The backend of what is off is written nowhere.
        found["efficiency.compile"] = PartialSetting(compiles)
    if name == "deepspeed":
        # It follows from the other two corners and the ranks, which the file does not have.
        found["batch.accumulation"] = PartialSetting()
    elif name == "accelerate":
        found |= {"strategy.bucket_mb": PartialSetting(context.zero, context.zero), **_partial_in_accelerate(context)}
    else:
        found |= _partial_in_hf(context)
    if context.zero and recipe.program.kind != "builtin":
        # An import leaves it in the exported file, which a program of the user's own gets as its base.
        keys = {"deepspeed": {*_ZERO[1:], *OF_DEEPSPEED}, "accelerate": {*_ZERO[1:], "batch"}}
        found |= dict.fromkeys(sorted(keys.get(name, STRATEGY_KEYS)), PartialSetting())
    return found


def _partial_in_hf(context: Context) -> dict[str, PartialSetting]:
    devices, device = context.recipe.devices, context.topology.device
    listed, counts = isinstance(devices.select, list), context.launcher == "deepspeed"
    named = context.recipe.checkpoint.resume != "auto"
    return {
        # It follows from the other two corners and the ranks, and Trainer has no flag for it.
        "batch.global": PartialSetting(),
        # Under ZeRO it stays in the base.
        "strategy.bucket_mb": PartialSetting(context.recipe.strategy.kind == "ddp"),
        # Trainer takes GPUs, or MPS, by itself; only the CPU and a TPU are asked for.
        "devices.type": PartialSetting(device in ("cpu", "xla")),
        # A count is the number of ranks; `all` and `free` are GPUs of one machine at one time.
        "devices.select": PartialSetting(listed or (devices.select == "none" and not counts)),
        # Without a list there is nothing to count; DeepSpeed's launcher counts by itself.
        "devices.order": PartialSetting(listed and not counts),
        # A line that begins with python names no launcher, and an import leaves the choice open.
        "launcher.kind": PartialSetting(context.launcher != "python"),
        # A command names what `auto` found.
        "checkpoint.resume": PartialSetting(named, named),
        # How the proof is done is trainkit's own affair.
        "program.verify": PartialSetting(),
    }


def _partial_in_accelerate(context: Context) -> dict[str, PartialSetting]:
    devices, device = context.recipe.devices, context.topology.device
    listed = isinstance(devices.select, list)
    alone_on_cpu = device == "cpu" and context.topology.world_size == 1 and not context.zero
    as_cuda, sharded = not listed or devices.order == "fastest", context.recipe.strategy.kind == "fsdp"
    return {
        # Under ZeRO it follows from the other two corners; else the script has it.
        "batch.accumulation": PartialSetting(reaches=context.zero),
        # Several processes on a CPU, and DeepSpeed, take it from a variable.
        "devices.type": PartialSetting(alone_on_cpu or device == "xla", device != "cpu" or alone_on_cpu),
        # A count is the number of ranks.
        "devices.select": PartialSetting(listed),
        # accelerate does not set CUDA_DEVICE_ORDER.
        "devices.order": PartialSetting(as_cuda, as_cuda),
        # accelerate recomputes what FSDP wraps.
        "efficiency.gradient_checkpointing.every": PartialSetting(sharded, sharded),
    }


def carried(context: Context, name: str) -> frozenset[str]:
    """The settings that the format carries for this plan; each stands for all below it."""
    lost = {key for key, each in exceptions(context, name).items() if not each.comes_back}
    program, absent = context.recipe.program.kind, tuple[str, ...]()  # beginnings of keys that the files do not have
    if name == "accelerate" and not context.zero:  # they are in DeepSpeed's file, beside accelerate's
        absent = ("batch.", "train.max_grad_norm", "strategy.bucket_mb")
    elif name == "deepspeed":
        own = program in _FILELESS and context.recipe.optimizer.name in TYPES.values()
        makes = program == "deepspeed" or own
        absent = () if makes else ("optimizer.", "logging.")
        if not (makes and has_schedule(context)):
            absent += ("schedule.", "train.steps")
    return frozenset(key for key in CARRIED[name] if not lies_in(key, lost) and not key.startswith(absent))


@dataclass(frozen=True, slots=True)
class Exported:
    """Files by name, the settings that a layer gives and that they do not carry, and what their user has to know."""

    files: dict[str, str]
    left: tuple[str, ...]
    notes: tuple[str, ...] = ()


def unfit(context: Context, name: str) -> str:
    """Why a format has no such files; empty where it has."""
    reasons = (each.why for started in EXPORTS[name].started(context) for each in refusals(started))
    return EXPORTS[name].unfit(context) or next(reasons, "")


def export(context: Context, name: str, folder: str) -> Exported:
    """The files of a format. Raises RecipeError where it has none for this plan."""
    reason = unfit(context, name)
    if reason:
        hint = f"other formats: {', '.join(each for each in EXPORTS if each != name)}"
        raise RecipeError(f"the plan cannot be exported to {name}: {reason}", hint=hint)
    resolved = context.resolved
    there = carried(context, name) | {key for key, each in exceptions(context, name).items() if each.reaches}
    given = [key for key in resolved.history if resolved.given(key) and key not in ("version", "name")]
    left = tuple(key for key in given if not lies_in(key, there))
    return Exported(EXPORTS[name].files(context, folder), left, EXPORTS[name].notes(context))
