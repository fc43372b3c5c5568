"""Optimizer and schedule as DeepSpeed makes them itself, from what the recipe says of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from trainkit.errors import Origin
from trainkit.frameworks.deepspeed.fields import OPTIMIZER_TYPES, SCHEDULER_TYPES, Row
from trainkit.recipe.schema import Recipe

OriginOf = Callable[[str], Origin | None]
SECTIONS = ("optimizer.", "scheduler.", "steps_per_print")
# Recipe key -> DeepSpeed's arguments, per type (torch.optim.AdamW and SGD; deepspeed/runtime/engine.py).
ARGUMENTS: dict[str, dict[str, tuple[str, ...]]] = {
    "AdamW": {
        "lr": ("lr",),
        "weight_decay": ("weight_decay",),
        "betas": ("beta1", "beta2"),
        "eps": ("eps",),
    },
    "SGD": {"lr": ("lr",), "weight_decay": ("weight_decay",), "momentum": ("beta1",)},
}
SCHEDULE_KEYS = ("schedule.name", "schedule.warmup_steps", "schedule.min_lr_ratio")


def made_by_deepspeed(row: Row) -> bool:
    """Whether the row describes what DeepSpeed makes by itself."""
    return row.key.startswith(SECTIONS)


def made_rows(recipe: Recipe, origin_of: OriginOf) -> Iterator[Row]:
    """What the recipe gives; what it leaves out stays as the base file, or DeepSpeed, has it."""
    yield from _optimizer(recipe, origin_of)
    yield Row("steps_per_print", recipe.logging.every_steps, ("logging.every_steps",))
    if any(map(origin_of, SCHEDULE_KEYS)) and recipe.schedule.name != "constant":
        yield from _schedule(recipe, origin_of)


def _optimizer(recipe: Recipe, origin_of: OriginOf) -> Iterator[Row]:
    optimizer = recipe.optimizer
    kind = OPTIMIZER_TYPES.get(optimizer.name, "AdamW")
    given = {
        argument: names
        for argument, names in ARGUMENTS[kind].items()
        if any(origin_of(f"optimizer.{name}") for name in names)
    }
    if not given and not origin_of("optimizer.name"):
        return
    yield Row("optimizer.type", kind, ("optimizer.name",), firm=bool(origin_of("optimizer.name")))
    for argument, names in given.items():
        values: list[Any] = [getattr(optimizer, name) for name in names]
        value = values if argument == "betas" else values[0]
        yield Row(f"optimizer.params.{argument}", value, tuple(f"optimizer.{name}" for name in names))
    if kind == "AdamW" and origin_of("optimizer.name"):
        yield Row("optimizer.params.torch_adam", True, ("optimizer.name",))  # not the fused one, nor that of the CPU


def _schedule(recipe: Recipe, origin_of: OriginOf) -> Iterator[Row]:
    """Linear from 0 to the peak, then as the schedule says (deepspeed/runtime/lr_schedules.py)."""
    schedule, steps = recipe.schedule, ("train.steps",)
    name, warmup, params = ("schedule.name",), ("schedule.warmup_steps",), "scheduler.params"
    yield Row("scheduler.type", SCHEDULER_TYPES[schedule.name], name)
    yield Row(f"{params}.warmup_type", "linear", name)
    yield Row(f"{params}.warmup_num_steps", schedule.warmup_steps, warmup)
    if schedule.name in ("linear", "cosine"):
        yield Row(f"{params}.total_num_steps", recipe.train.steps, steps)
    if schedule.name == "cosine":
        yield Row(f"{params}.warmup_min_ratio", 0.0, name)
        yield Row(f"{params}.cos_min_ratio", schedule.min_lr_ratio, ("schedule.min_lr_ratio",))
    else:
        yield Row(f"{params}.warmup_min_lr", 0.0, name)
        if origin_of("optimizer.lr"):  # else DeepSpeed takes the optimizer's
            yield Row(f"{params}.warmup_max_lr", recipe.optimizer.lr, ("optimizer.lr",))
