"""One setting of accelerate: in its config file, in the environment of `Accelerator()`, as a flag of the launcher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainkit.frameworks.base.fields import UNSET, Settings, Unsupported
from trainkit.frameworks.base.launcher_flags import LauncherFlag
from trainkit.plan.context import Context
from trainkit.recipe.schema import Fsdp

Encoder = Callable[[Context], Any]


@dataclass(frozen=True, slots=True)
class Setting(LauncherFlag):
    """A field of the config file: its name is the dotted key, and the last part of that is a flag of the launcher.

    variable: what the workers read, and text: the value as it is there. in_file: whether the plan's file has the key.
    flag: whether the launcher has such a flag. idle: for a key that is never applied from the file, the values that say
    nothing anyway.
    """

    variable: str = ""
    text: Callable[[Any], str] = str
    in_file: Callable[[Context], bool] = lambda context: True
    flag: bool = True
    idle: tuple[Any, ...] | None = None


def word(value: Any) -> str:
    """A value as accelerate launch writes most of them into the environment."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def on_accelerator(context: Context) -> bool:
    """Whether the program takes its settings from accelerate; otherwise accelerate only starts processes."""
    return context.recipe.program.kind == "accelerate"


def distributed_type(context: Context) -> str:
    """What accelerate's file calls the strategy. DDP of one process needs only the rank environment."""
    if on_accelerator(context):
        if context.topology.device == "xla":
            return "XLA"
        if context.recipe.strategy.kind == "fsdp":
            return "FSDP"
        if context.zero:
            return "DEEPSPEED"
    return "MULTI_GPU" if context.topology.world_size > 1 else "NO"


def through_torchrun(context: Context) -> bool:
    """Whether accelerate starts the ranks with torchrun: several, and one that it has to shard for."""
    return context.topology.world_size > 1 or distributed_type(context) != "NO"


def chooses_cpu(context: Context) -> bool:
    """Whether accelerate is to use no card. Trainer has a flag of its own for that, and would leave DeepSpeed out."""
    kind = context.recipe.program.kind
    return context.topology.device == "cpu" and kind != "hf" and not (kind == "accelerate" and context.zero)


def shards(context: Context) -> bool:
    """Whether Accelerator() shards with FSDP."""
    return on_accelerator(context) and isinstance(context.recipe.strategy, Fsdp)


def is_zero(context: Context) -> bool:
    """Whether Accelerator() hands the model to DeepSpeed."""
    return on_accelerator(context) and context.zero


def when(condition: Callable[[Context], bool], encode: Encoder) -> Encoder:
    """An encoder that says nothing unless the condition holds."""
    return lambda context: encode(context) if condition(context) else UNSET


def plain(key: str, *nothing: Any) -> Callable[[Any], Settings]:
    """The decoder of a value that one key has as it is. nothing: values that set nothing."""
    return lambda value: {} if value in nothing else {key: value}


def switched(key: str, means: Any) -> Callable[[Any], Settings]:
    """The decoder of a switch that sets a key to one value."""
    return lambda value: {key: means} if value is True else {}


def nothing_but(*accepted: Any) -> Callable[[Any], Settings | Unsupported]:
    """The decoder of a value that a recipe has no key for, though these values are as in any run."""
    return lambda value: {} if value in accepted else Unsupported("a recipe has no such key")
