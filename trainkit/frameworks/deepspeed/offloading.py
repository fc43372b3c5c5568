"""What DeepSpeed keeps outside of the cards, in main memory or on a disk: its rows of the table of fields."""

from __future__ import annotations

from typing import Any

from trainkit.frameworks.base.fields import UNSET, same, setting
from trainkit.frameworks.deepspeed import readers
from trainkit.frameworks.deepspeed.readers import Row
from trainkit.plan.context import Context

ZERO = "zero_optimization"
OFFLOADS = ("offload_optimizer", "offload_param")


def offload(name: str, stages: tuple[int, ...], *aliases: str) -> tuple[Row, ...]:
    """Where a part lives, and its folder on a disk."""

    def device(context: Context) -> Any:
        return getattr(context.recipe.strategy, name, "none")

    return (
        Row(
            f"{ZERO}.{name}.device",
            (f"strategy.{name}",),
            device,
            same(f"strategy.{name}")[1],
            default="none",
            aliases=tuple(f"{ZERO}.{each}" for each in aliases),
            rules=readers.OFFLOAD,
            stages=stages,
            written=lambda context: device(context) != "none",
        ),
        Row(
            f"{ZERO}.{name}.nvme_path",
            ("strategy.nvme_path",),
            lambda context: setting(context, "strategy.nvme_path") if _on_disk(context, name) else UNSET,
            same("strategy.nvme_path")[1],
            rules=readers.OFFLOAD,
            stages=stages,
        ),
    )


def pinned(name: str, stages: tuple[int, ...]) -> Row:
    """Whether what lives in main memory is page-locked there: without it each copy to or from a card is made twice."""

    def encode(context: Context) -> Any:
        offloaded = getattr(context.recipe.strategy, name, "none") == "cpu"
        return True if offloaded and context.topology.device == "cuda" else UNSET

    keys = (f"strategy.{name}", "devices.type")
    return Row(f"{ZERO}.{name}.pin_memory", keys, encode, default=False, rules=readers.BUILTIN, stages=stages)


def _on_disk(context: Context, *parts: str) -> bool:
    strategy = context.recipe.strategy
    swapped = any(getattr(strategy, part, "") == "nvme" for part in parts)
    return swapped and getattr(strategy, "nvme_path", None) is not None


def _of_swapping(name: str, value: Any, default: Any, *parts: str) -> Row:
    """How swapping to a disk is done: what would otherwise leave most models in memory, or the disk idle."""

    def encode(context: Context) -> Any:
        return value if _on_disk(context, *parts) else UNSET

    keys = tuple(f"strategy.{part}" for part in parts)
    return Row(name, keys, encode, default=default, rules=readers.BUILTIN)


def _buffers(context: Context) -> int:
    """For weights, gradients and two moments; a class of the user's own, or an argument, may ask for one more."""
    chosen = context.recipe.optimizer
    # zero/offload_config.py: as many as there are states for each parameter
    return 5 if chosen.args or ":" in chosen.name else 4


SWAPPING = (
    Row(
        f"{ZERO}.offload_optimizer.buffer_count",
        ("optimizer.name",),
        lambda context: _buffers(context) if _on_disk(context, "offload_optimizer") else UNSET,
        default=4,
        rules=readers.BUILTIN,
    ),
    # Otherwise the first 10^9 parameters of a rank would stay in memory, which is all of most models.
    _of_swapping(f"{ZERO}.offload_param.max_in_cpu", 0, 10**9, "offload_param"),
    # What is in memory at a time; DeepSpeed's 10^9 would be, again, all of most models.
    _of_swapping(f"{ZERO}.sub_group_size", 10**8, 10**9, *OFFLOADS),
    # A drive that is read in parallel is fast only with many requests at once; the others are written out to be seen.
    _of_swapping("aio.block_size", 2**20, 2**20, *OFFLOADS),
    _of_swapping("aio.queue_depth", 32, 8, *OFFLOADS),
    _of_swapping("aio.intra_op_parallelism", 1, 1, *OFFLOADS),
    _of_swapping("aio.single_submit", False, False, *OFFLOADS),
    _of_swapping("aio.overlap_events", True, True, *OFFLOADS),
)
