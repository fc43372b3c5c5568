"""The sections `optimizer` and `scheduler` of DeepSpeed's file: what DeepSpeed can make, and how a recipe says it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trainkit.frameworks.base.fields import UNSET, Settings, Unsupported, said, same
from trainkit.frameworks.deepspeed import readers
from trainkit.frameworks.deepspeed.readers import Row, Rules, same_row
from trainkit.optimizers import OPTIMIZERS, optimizer
from trainkit.plan.context import Context

TYPES: Mapping[str, str] = {
    **{known.deepspeed: name for name, known in OPTIMIZERS.items() if known.deepspeed},
    "Adam": "adamw_torch",  # which decouples weight decay too, unless adam_w_mode is false
}
SCHEDULERS: Mapping[str, str] = {
    "cosine": "WarmupCosineLR",
    "linear": "WarmupDecayLR",
    "constant": "WarmupLR",
    "constant_with_warmup": "WarmupLR",
}


def has_schedule(context: Context) -> bool:
    """Whether DeepSpeed has this schedule: of a known length, and a line only down to 0."""
    schedule = context.recipe.schedule
    endless = schedule.name in ("linear", "cosine") and context.recipe.train.steps is None
    return not endless and not (schedule.name == "linear" and schedule.min_lr_ratio)


def _type(context: Context) -> str:
    name = context.recipe.optimizer.name
    return optimizer(name).deepspeed or ("AdamW" if "betas" in optimizer(name).arguments else name)


def _class(names: Mapping[str, str], key: str) -> Callable[[Any], Settings | Unsupported]:
    """A decoder of names of classes."""

    def decode(value: Any) -> Settings | Unsupported:
        known = isinstance(value, str) and value in names
        return {key: names[value]} if known else Unsupported("", f"use {', '.join(names)}")

    return decode


def _argument(name: str, key: str, rules: Rules, kind: str = "", **default: float) -> Row:
    """A number that the optimizer's class takes. kind: the only type that does; default: by type."""
    encode, decode = same(f"optimizer.{key}")
    return Row(
        f"optimizer.params.{name}",
        (f"optimizer.{key}",),
        lambda context: encode(context) if kind in ("", _type(context)) else UNSET,
        decode,
        default,
        rules=rules,
    )


def _betas(context: Context) -> Any:
    chosen = context.recipe.optimizer
    return [chosen.beta1, chosen.beta2] if _type(context) == "AdamW" else UNSET


def _two_moments(value: Any) -> Settings | Unsupported:
    if not isinstance(value, list) or len(value) != 2:
        return Unsupported("two numbers are expected", "write [0.9, 0.999]")
    return dict(zip(("optimizer.beta1", "optimizer.beta2"), value, strict=True))


def _adam_switch(name: str, rules: Rules, default: bool) -> Row:
    def of_adam(context: Context) -> Any:
        return True if _type(context) == "AdamW" else UNSET

    return Row(f"optimizer.params.{name}", ("optimizer.name",), of_adam, lambda value: {}, default, rules=rules)


def _constant(name: str, value: Any, default: Any, rules: Rules, *schedules: str) -> Row:
    """What all schedules of the recipe, or these, have in common."""
    return Row(
        f"scheduler.params.{name}",
        ("schedule.name",),
        lambda context: value if context.recipe.schedule.name in (schedules or SCHEDULERS) else UNSET,
        lambda found: {} if found == value else Unsupported(f"the recipe's warm-up has {name} {value}"),
        default,
        rules=rules,
    )


OPTIMIZER = (
    Row("optimizer.type", ("optimizer.name",), _type, _class(TYPES, "optimizer.name"), rules=readers.TYPE),
    # FusedAdam and DeepSpeedCPUAdam decay nothing by default; torch_adam makes it torch.optim.AdamW
    _argument("lr", "lr", readers.ARGUMENT, AdamW=1e-3, SGD=1e-3, torch=1e-3),
    _argument("weight_decay", "weight_decay", readers.ARGUMENT, AdamW=0.0, SGD=0.0, torch=0.01),
    Row(
        "optimizer.params.betas",
        ("optimizer.beta1", "optimizer.beta2"),
        _betas,
        _two_moments,
        {"AdamW": [0.9, 0.999], "torch": [0.9, 0.999]},
        rules=readers.MOMENTS,
    ),
    _argument("eps", "eps", readers.MOMENTS, "AdamW", AdamW=1e-8, torch=1e-8),
    _adam_switch("torch_adam", readers.SWITCH, default=False),
    _adam_switch("adam_w_mode", readers.UNUSED, default=True),
    _argument("momentum", "beta1", readers.MOMENTUM, "SGD", SGD=0.0),
)
SCHEDULER = (
    Row(
        "scheduler.type",
        ("schedule.name",),
        lambda context: SCHEDULERS[context.recipe.schedule.name],
        _class({kind: name for name, kind in SCHEDULERS.items()}, "schedule.name"),
        rules=readers.TYPE,
    ),
    # DeepSpeed warms up along a logarithm, the recipe along a line
    _constant("warmup_type", "linear", "log", readers.SHAPE),
    same_row("scheduler.params.warmup_num_steps", "schedule.warmup_steps", readers.LENGTH, default=1000),
    same_row(
        "scheduler.params.total_num_steps",
        "train.steps",
        readers.LENGTH,
        written=lambda context: context.recipe.schedule.name in ("linear", "cosine"),
    ),
    _constant("warmup_min_ratio", 0.0, 0.0, readers.SHAPE, "cosine"),
    Row(
        "scheduler.params.cos_min_ratio",
        ("schedule.min_lr_ratio",),
        lambda context: context.recipe.schedule.min_lr_ratio if context.recipe.schedule.name == "cosine" else UNSET,
        same("schedule.min_lr_ratio")[1],
        1e-4,
        rules=readers.SHAPE,
    ),
    _constant("warmup_min_lr", 0.0, 0.0, readers.START, "linear", "constant", "constant_with_warmup"),
    same_row(
        "scheduler.params.warmup_max_lr",
        "optimizer.lr",
        readers.LENGTH,
        # else DeepSpeed takes the optimizer's
        written=lambda context: context.recipe.schedule.name != "cosine" and said(context, "optimizer.lr"),
    ),
)
