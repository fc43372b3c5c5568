"""What a plan can be exported to, and which settings of the recipe each format carries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from trainkit.errors import RecipeError
from trainkit.frameworks.accelerate import exporter as accelerate
from trainkit.frameworks.accelerate.fields import SETTINGS
from trainkit.frameworks.deepspeed import exporter as deepspeed
from trainkit.frameworks.deepspeed.fields import CARRIED as OF_DEEPSPEED
from trainkit.frameworks.deepspeed.optimizer import TYPES, has_schedule
from trainkit.frameworks.hf_trainer import exporter as hf_trainer
from trainkit.frameworks.hf_trainer.support import REACH
from trainkit.frameworks.torch_xla import on_xla
from trainkit.plan.combination import Combination
from trainkit.plan.context import Context
from trainkit.planner.compatibility import refusals


class Export(Protocol):
    """What a module for one tool offers; all functions are pure."""

    def unfit(self, context: Context) -> str:
        """Why the tool has no way to run this plan; empty where it has."""

    def combination(self, context: Context) -> Combination | None:
        """What the tool would start, where that is not what the plan starts."""

    def files(self, context: Context, folder: str) -> dict[str, str]:
        """Content by name. folder: where they will lie, as the files name one another."""

    def notes(self, context: Context) -> tuple[str, ...]:
        """What somebody who uses the files has to do besides."""


EXPORTS: dict[str, Export] = {"accelerate": accelerate, "deepspeed": deepspeed, "hf": hf_trainer}

_SHARDS = tuple(
    f"strategy.{name}" for name in ("offload_optimizer", "offload_param", "nvme_path", "overlap_comm", "gather_16bit")
)
_ZERO = ("strategy.kind", *_SHARDS, "strategy.bucket_mb", "precision.dtype", "train.max_grad_norm")
_FLAGS = (key for key, way in REACH.items() if way.by.startswith("--") or way.by == "fsdp_config.json")
# The settings that an import of the exported files gives back. A key stands for all below it.
CARRIED: Mapping[str, frozenset[str]] = {
    "hf": frozenset({
        *_FLAGS, *_SHARDS, "nodes.count", "nodes.processes_per_node", "nodes.rendezvous", "strategy.kind", "program",
        "launcher.kind", "launcher.max_restarts", "output.root", "env", "devices.type", "devices.select",
        "devices.order",
    }),
    "deepspeed": frozenset({*_ZERO, *OF_DEEPSPEED}),
    "accelerate": frozenset({
        *_ZERO, *(key for each in SETTINGS for key in each.keys), "batch.global", "batch.micro", "efficiency.compile",
    }),
}  # fmt: skip


def _always(context: Context) -> bool:
    return True


def _never(context: Context) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Partly:
    """A setting that a format does not always carry.

    comes_back: whether an import gives it back. reaches: whether the tool follows it nevertheless.
    """

    comes_back: Callable[[Context], bool] = _never
    reaches: Callable[[Context], bool] = _always


def _both(condition: Callable[[Context], bool]) -> Partly:
    return Partly(condition, condition)


def _listed(context: Context) -> bool:
    return isinstance(context.recipe.devices.select, list)


def _on_cpu(context: Context) -> bool:
    return context.topology.device == "cpu"


def _alone_on_cpu(context: Context) -> bool:
    return _on_cpu(context) and context.topology.world_size == 1 and not context.zero


def _several(context: Context) -> bool:
    return context.topology.world_size > 1


def _is_zero(context: Context) -> bool:
    return context.zero


_COMMON: Mapping[str, Partly] = {
    # The exported file takes its place as base.
    "strategy.config": Partly(),
    # One process is what there is anyway, with replicas or without.
    "nodes.processes_per_node": Partly(_several),
    "strategy.kind": Partly(lambda context: _several(context) or context.recipe.strategy.kind != "ddp"),
    # The backend of what is off is written nowhere.
    "efficiency.compile": Partly(lambda context: context.recipe.efficiency.compile.enabled),
}
_FILELESS = ("builtin", "torch")  # programs that get no file of DeepSpeed's in a run: an export makes all of it


def _has_buckets(context: Context) -> bool:
    """A script on another library gets the file as its base, and there the size of the buckets stays."""
    return context.recipe.program.kind in (*_FILELESS, "deepspeed")


EXCEPTIONS: Mapping[str, Mapping[str, Partly]] = {
    "hf": {
        **_COMMON,
        # It follows from the other two corners and the ranks, and Trainer has no flag for it.
        "batch.global": Partly(),
        # Under ZeRO it stays in the base.
        "strategy.bucket_mb": Partly(lambda context: context.recipe.strategy.kind == "ddp"),
        # Trainer takes cards, or MPS, by itself; only the CPU and a TPU are asked for.
        "devices.type": Partly(lambda context: _on_cpu(context) or on_xla(context)),
        # A count is the number of ranks; `all` and `free` are cards of one machine at one time.
        "devices.select": Partly(
            lambda context: (
                _listed(context) or (context.recipe.devices.select == "none" and context.launcher != "deepspeed")
            )
        ),
        # Without a list there is nothing to count; DeepSpeed's launcher counts by itself.
        "devices.order": Partly(lambda context: _listed(context) and context.launcher != "deepspeed"),
        # A line that begins with python names no launcher, and an import leaves the choice open.
        "launcher.kind": Partly(lambda context: context.launcher != "python"),
        # A command names what `auto` found.
        "checkpoint.resume": _both(lambda context: context.recipe.checkpoint.resume != "auto"),
        # How the proof is done is trainkit's own affair.
        "program.verify": Partly(),
    },
    "deepspeed": {
        # It follows from the other two corners and the ranks, which the file does not have.
        "batch.accumulation": Partly(),
        "strategy.bucket_mb": Partly(_has_buckets),
        "strategy.config": _COMMON["strategy.config"],
    },
    "accelerate": {
        **_COMMON,
        # Under ZeRO it follows from the other two corners; else the script has it.
        "batch.accumulation": Partly(reaches=_is_zero),
        "strategy.bucket_mb": Partly(_has_buckets, _is_zero),
        # Several processes on a CPU, and DeepSpeed, take it from a variable.
        "devices.type": Partly(
            lambda context: _alone_on_cpu(context) or on_xla(context),
            lambda context: not _on_cpu(context) or _alone_on_cpu(context),
        ),
        # A count is the number of ranks.
        "devices.select": Partly(_listed),
        # accelerate does not set CUDA_DEVICE_ORDER.
        "devices.order": _both(lambda context: not _listed(context) or context.recipe.devices.order == "fastest"),
        # accelerate recomputes what FSDP wraps.
        "efficiency.gradient_checkpointing.every": _both(lambda context: context.recipe.strategy.kind == "fsdp"),
    },
}


def carried(context: Context, name: str) -> frozenset[str]:
    """The settings that the format carries for this plan; each stands for all below it."""
    lost = {key for key, each in EXCEPTIONS[name].items() if not each.comes_back(context)}
    absent = _absent(context, name)
    return frozenset(key for key in CARRIED[name] if not below(key, lost) and not key.startswith(absent))


def _absent(context: Context, name: str) -> tuple[str, ...]:
    """Beginnings of the keys that this plan's files do not have."""
    if name == "accelerate" and not context.zero:  # they are in DeepSpeed's file, beside accelerate's
        return ("batch.", "train.max_grad_norm", "strategy.bucket_mb")
    kind = context.recipe.program.kind
    if name != "deepspeed":
        return ()
    makes = kind == "deepspeed" or (kind in _FILELESS and context.recipe.optimizer.name in TYPES.values())
    if makes and has_schedule(context):
        return ()
    return ("schedule.", "train.steps") if makes else ("schedule.", "train.steps", "optimizer.", "logging.")


def below(key: str, keys: frozenset[str] | set[str]) -> bool:
    """Whether a key is one of the keys, or below one."""
    parts = key.split(".")
    return any(".".join(parts[:length]) in keys for length in range(1, len(parts) + 1))


@dataclass(frozen=True, slots=True)
class Exported:
    """Files by name, the settings that a layer gives and that they do not carry, and what their user has to know."""

    files: dict[str, str]
    left: tuple[str, ...]
    notes: tuple[str, ...] = ()


def unfit(context: Context, name: str) -> str:
    """Why a format has no such files; empty where it has."""
    combination = EXPORTS[name].combination(context)
    reasons = (each.reason for each in refusals(combination)) if combination else iter(())
    return EXPORTS[name].unfit(context) or next(reasons, "")


def export(context: Context, name: str, folder: str) -> Exported:
    """The files of a format. Raises RecipeError where it has none for this plan."""
    reason = unfit(context, name)
    if reason:
        hint = f"other formats: {', '.join(each for each in EXPORTS if each != name)}"
        raise RecipeError(f"the plan cannot be exported to {name}: {reason}", hint=hint)
    return Exported(EXPORTS[name].files(context, folder), _left(context, name), EXPORTS[name].notes(context))


def _left(context: Context, name: str) -> tuple[str, ...]:
    """Settings that a layer gives and that do not reach the tool, in the order in which they were given."""
    resolved = context.resolved
    there = carried(context, name) | {key for key, each in EXCEPTIONS[name].items() if each.reaches(context)}
    given = [key for key in resolved.history if resolved.given(key) and key not in ("version", "name")]
    return tuple(key for key in given if not below(key, there))
