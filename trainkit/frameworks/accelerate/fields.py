"""Every setting of `Accelerator()` that the recipe decides, as one table for its environment and its config file."""

from __future__ import annotations

from collections.abc import Iterator

from trainkit.frameworks.accelerate import deepspeed, fsdp
from trainkit.frameworks.accelerate.setting import Setting, given
from trainkit.plan.context import Context

SHARDING = (
    "fsdp",
    "zero1",
    "zero2",
    "zero3",
)  # strategies that accelerate launch has a launcher for, which is torchrun
MIXED = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}
COMPILE = "efficiency.compile"


def settings(context: Context) -> tuple[Setting, ...]:
    """The whole table for one plan."""
    return (
        *_device(context),
        *_precision(context),
        *_accumulation(context),
        *_compilation(context),
        *fsdp.settings(context),
        *deepspeed.settings(context),
    )


def distributed_type(context: Context) -> str:
    """What accelerate's file calls the strategy. DDP of one process needs only the rank environment."""
    if context.topology.device == "xla":
        return "XLA"
    if context.recipe.strategy.kind == "fsdp":
        return "FSDP"
    if context.zero:
        return "DEEPSPEED"
    return "MULTI_GPU" if context.topology.world_size > 1 else "NO"


def _device(context: Context) -> Iterator[Setting]:
    """Accelerator() leaves DeepSpeed out where it is told to use the CPU; DeepSpeed is told by DS_ACCELERATOR."""
    if context.topology.device == "cpu" and not context.zero:
        rule = "accelerate's own --cpu would start one process only"
        yield Setting("ACCELERATE_USE_CPU", ("True",), "use_cpu", True, ("devices.type",), rule)


def _precision(context: Context) -> Iterator[Setting]:
    """Under DeepSpeed its file says it, and accelerate ends with an error where its own does too."""
    if context.zero:
        yield Setting("ACCELERATE_MIXED_PRECISION", ("no",), rule="DeepSpeed's file has the number format")
    else:
        value = MIXED[context.dtype]
        yield Setting("ACCELERATE_MIXED_PRECISION", (value,), "mixed_precision", value, ("precision.dtype",))


def _accumulation(context: Context) -> Iterator[Setting]:
    """Accelerator() lets this variable win over the argument that the script gives it."""
    key = "batch.accumulation"
    if given(context, key):
        yield Setting("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", (str(context.batch.accumulation),), keys=(key,))


def _compilation(context: Context) -> Iterator[Setting]:
    chosen = context.recipe.efficiency.compile
    if not chosen.enabled:
        return
    blocks = chosen.scope == "blocks" or (chosen.scope == "auto" and context.recipe.strategy.kind in ("fsdp", "zero3"))
    backend = chosen.backend.upper()
    rows = (
        ("backend", "BACKEND", backend, backend, "backend"),
        ("mode", "MODE", chosen.mode, chosen.mode, "mode"),
        ("use_dynamic", "USE_DYNAMIC", str(bool(chosen.dynamic)), bool(chosen.dynamic), "dynamic"),
        ("use_regional_compilation", "USE_REGIONAL_COMPILATION", str(blocks), blocks, "scope"),
    )
    for name, variable, value, written, key in rows:
        keys = (f"{COMPILE}.{key}",)
        yield Setting(f"ACCELERATE_DYNAMO_{variable}", (value,), f"dynamo_config.dynamo_{name}", written, keys)
