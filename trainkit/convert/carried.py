"""Which settings of a recipe each format carries, as data: what an import of the exported files gives back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trainkit.frameworks.accelerate.fields import SETTINGS
from trainkit.frameworks.deepspeed.program import OPTIMIZERS, has_schedule
from trainkit.frameworks.hf_trainer.support import REACH
from trainkit.frameworks.torch_xla import on_xla
from trainkit.plan.context import Context

_HF = (key for key, way in REACH.items() if way.by.startswith("--") or way.by == "fsdp_config.json")
_SHARDS = ("offload_optimizer", "offload_param", "nvme_path", "overlap_comm", "gather_16bit")
_SWAPS = tuple(f"strategy.{name}" for name in _SHARDS)
_RANKS = ("nodes.count", "nodes.processes_per_node", "nodes.rendezvous")
# What DeepSpeed's file says, whoever reads it.
_ZERO = ("strategy.kind", *_SWAPS, "strategy.bucket_mb", "precision.dtype", "train.max_grad_norm")

# A key stands for all below it.
CARRIED: Mapping[str, frozenset[str]] = {
    "hf": frozenset({
        *_HF, *_SWAPS, *_RANKS, "strategy.kind", "program", "launcher.kind", "launcher.max_restarts", "output.root",
        "env", "devices.type", "devices.select", "devices.order",
    }),
    "deepspeed": frozenset({
        *_ZERO, *("batch.global", "batch.micro", "logging.every_steps"),
        *(f"optimizer.{name}" for name in ("name", "lr", "weight_decay", "beta1", "beta2", "eps")),
        *("schedule.name", "schedule.warmup_steps", "schedule.min_lr_ratio", "train.steps"),
    }),
    "accelerate": frozenset({
        *_ZERO, *(key for each in SETTINGS for key in each.keys), "batch.global", "batch.micro", "efficiency.compile",
    }),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Way:
    """A setting that does not always come back. back: whether an import gives it back; told: whether the tool knows."""

    back: Callable[[Context], bool] = lambda context: False
    told: Callable[[Context], bool] = lambda context: True


def _listed(context: Context) -> bool:
    return isinstance(context.recipe.devices.select, list)


def _on_cpu(context: Context) -> bool:
    return context.topology.device == "cpu"


def _alone_on_cpu(context: Context) -> bool:
    return _on_cpu(context) and context.topology.world_size == 1 and not context.zero


def _several(context: Context) -> bool:
    return context.topology.world_size > 1


def _in_file(context: Context) -> bool:
    return context.zero


# One process is what there is anyway, with replicas or without.
_ONE_RANK = {
    "nodes.processes_per_node": Way(_several),
    "strategy.kind": Way(lambda context: _several(context) or context.recipe.strategy.kind != "ddp"),
}
_FILELESS = ("builtin", "torch")  # programs that get no file of DeepSpeed's in a run: an export makes all of it
# A script on another library gets the file as its base, and there the size of the buckets stays.
_BUCKET = Way(lambda context: context.recipe.program.kind in (*_FILELESS, "deepspeed"))
_COMPILE = Way(lambda context: context.recipe.efficiency.compile.enabled)  # a backend of what is off is not said
OTHERWISE: Mapping[str, Mapping[str, Way]] = {
    "hf": {
        # It follows from the other two corners and the ranks, and Trainer has no flag for it.
        "batch.global": Way(),
        # The exported file takes its place as base.
        "strategy.config": Way(),
        # Under ZeRO it stays in that base.
        "strategy.bucket_mb": Way(lambda context: context.recipe.strategy.kind == "ddp"),
        # Trainer takes cards, or MPS, by itself; only the CPU and a TPU are asked for.
        "devices.type": Way(lambda context: _on_cpu(context) or on_xla(context)),
        # A count is the number of ranks; `all` and `free` are cards of one machine at one time.
        "devices.select": Way(
            lambda context: (
                _listed(context) or (context.recipe.devices.select == "none" and context.launcher != "deepspeed")
            )
        ),
        # Without a list there is nothing to count; DeepSpeed's launcher counts by itself.
        "devices.order": Way(lambda context: _listed(context) and context.launcher != "deepspeed"),
        # A line that begins with python names no launcher, and an import leaves the choice open.
        "launcher.kind": Way(lambda context: context.launcher != "python"),
        # A command names what `auto` found.
        "checkpoint.resume": Way(*(lambda context: context.recipe.checkpoint.resume != "auto",) * 2),
        "efficiency.compile": _COMPILE,
        **_ONE_RANK,
        # How the proof is done is trainkit's own affair.
        "program.verify": Way(),
    },
    "deepspeed": {
        # It follows from the other two corners and the ranks, which the file does not say.
        "batch.accumulation": Way(),
        "strategy.bucket_mb": _BUCKET,
        # The exported file takes its place as base.
        "strategy.config": Way(),
    },
    "accelerate": {
        # Under ZeRO it follows from the other two corners; else the script says it.
        "batch.accumulation": Way(told=_in_file),
        "strategy.bucket_mb": Way(_BUCKET.back, _in_file),
        "strategy.config": Way(),
        # Several processes on a CPU, and DeepSpeed, are told by a variable.
        "devices.type": Way(
            lambda context: _alone_on_cpu(context) or on_xla(context),
            lambda context: not _on_cpu(context) or _alone_on_cpu(context),
        ),
        # A count is the number of ranks.
        "devices.select": Way(_listed),
        # accelerate does not set CUDA_DEVICE_ORDER.
        "devices.order": Way(*(lambda context: not _listed(context) or context.recipe.devices.order == "fastest",) * 2),
        "efficiency.compile": _COMPILE,
        **_ONE_RANK,
        # accelerate recomputes what FSDP wraps.
        "efficiency.gradient_checkpointing.every": Way(*(lambda context: context.recipe.strategy.kind == "fsdp",) * 2),
    },
}
# Beside accelerate's file under ZeRO, in DeepSpeed's.
_IN_FILE = ("batch.global", "batch.micro", "batch.accumulation", "train.max_grad_norm", "strategy.bucket_mb")


def carried(context: Context, name: str) -> frozenset[str]:
    """The settings that the format carries for this plan; each stands for all below it."""
    otherwise = {key for key, way in OTHERWISE[name].items() if not way.back(context)}
    unsaid = _unsaid(context, name)
    return frozenset(key for key in CARRIED[name] if not below(key, otherwise) and key not in unsaid)


def _unsaid(context: Context, name: str) -> set[str]:
    """What this plan's files do not say."""
    unsaid: tuple[str, ...] = ()
    if name == "accelerate" and not context.zero:
        unsaid = _IN_FILE
    elif name == "deepspeed":
        kind = context.recipe.program.kind
        made = kind == "deepspeed" or (kind in _FILELESS and context.recipe.optimizer.name in OPTIMIZERS)
        if not made or not has_schedule(context):
            unsaid = ("schedule.", "train.steps", *(() if made else ("optimizer.", "logging.")))
    return {key for key in CARRIED[name] if key.startswith(unsaid)}


def below(key: str, keys: frozenset[str] | set[str]) -> bool:
    """Whether a key is one of the keys, or below one."""
    parts = key.split(".")
    return any(".".join(parts[:length]) in keys for length in range(1, len(parts) + 1))


def left(context: Context, name: str) -> tuple[str, ...]:
    """Settings that a layer gives and that the tool is not told, in the order in which they were given."""
    resolved = context.resolved
    told = carried(context, name) | {key for key, way in OTHERWISE[name].items() if way.told(context)}
    given = [key for key in resolved.history if resolved.given(key) and key not in ("version", "name")]
    return tuple(key for key in given if not below(key, told))
