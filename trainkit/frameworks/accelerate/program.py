"""`accelerate`: scripts on `Accelerator()`, which reads its settings from the environment, whoever launches it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trainkit.frameworks.accelerate.fields import SETTINGS
from trainkit.frameworks.accelerate.setting import given
from trainkit.frameworks.accelerate.support import REACH, problems
from trainkit.frameworks.base import own_scripts
from trainkit.frameworks.base.fields import UNSET
from trainkit.frameworks.base.interface import Detection, all_own
from trainkit.frameworks.deepspeed.ops import preparations
from trainkit.plan.context import Context
from trainkit.plan.model import Notice
from trainkit.plan.provenance import SourcedFile, SourcedVariable, Token, variable
from trainkit.recipe.layers.merge import value_at
from trainkit.recipe.schema import Fsdp

__all__ = ["REACH", "preparations", "problems"]

REQUIRES: Mapping[str, str] = {"torch": "2.6", "accelerate": "1.9"}
DETECTION = Detection("Accelerator()", frozenset({"accelerate.Accelerator"}))
check, argv, read = own_scripts.check_target, own_scripts.argv, all_own

READ = "Accelerator() reads it"
LOGS = (*own_scripts.LIBRARIES, "ACCELERATE_LOG_LEVEL")


def reason(context: Context) -> str:
    """For people."""
    return f"{own_scripts.described(context)}, on Accelerator()"


def wrapper(context: Context) -> tuple[Token, ...]:
    """The level of the libraries' log lines on the ranks that are not a main one."""
    return own_scripts.wrapper(context, LOGS)


def files(context: Context) -> tuple[SourcedFile, ...]:
    """DeepSpeed's settings, for the zero strategies."""
    return (deepspeed_file(context),) if context.zero else ()


def deepspeed_file(context: Context) -> SourcedFile:
    """DeepSpeed's file, from the recipe or with the user's as base."""
    from trainkit.frameworks.deepspeed.config import config_file

    return config_file(context, "accelerate")


def environment(context: Context) -> tuple[SourcedVariable, ...]:
    """The settings of Accelerator(). accelerate launch writes the same from its file, which has the same values."""
    variables = list(own_scripts.verbosity(context, LOGS))
    for each in SETTINGS:
        value = each.encode(context) if each.variable else UNSET
        if value is UNSET:
            continue
        parts = value if isinstance(value, tuple) else (each.text(value),)
        source = each.made_by(context)
        keys = tuple(key for key in source.keys if given(context, key))
        variables.append(variable(each.variable, *parts, keys=keys, rule=source.rule or ("" if keys else READ)))
    return tuple(variables)


def notices(context: Context) -> Iterator[Notice]:
    """What stays the script's own, and what accelerate does by itself."""
    what = (
        "model, data, optimizer and the loop are the script's own; its DataLoader decides the micro batch, and the "
        f"sizes in this plan only count with {context.batch.micro}"
    )
    yield Notice("note", what, "pass the script's own settings in program.args")
    strategy = context.recipe.strategy
    if isinstance(strategy, Fsdp) and strategy.auto_wrap == "transformer" and not strategy.wrap_classes:
        what = "strategy.wrap_classes is empty: a model that does not name its blocks (_no_split_modules) is one unit"
        yield Notice("note", what, "name the class of its blocks")
    if context.zero:
        yield from _zero_notices(context)
    chosen = context.recipe.efficiency.compile
    if chosen.enabled and chosen.dynamic is None:
        what = "accelerate compiles for the sizes that it sees (dynamic=False): other sizes are compiled again"
        yield Notice("note", what, "set efficiency.compile.dynamic to true where sizes change")


def _zero_notices(context: Context) -> Iterator[Notice]:
    if not given(context, "train.max_grad_norm"):
        base = context.resolved.attachments.get("strategy.config")
        found = value_at(base.tree, "gradient_clipping") if base else None
        norm = "1, which accelerate fills in" if found in (None, "auto") else f"{found}, as its file says"
        what = f"DeepSpeed scales gradients down to a norm of {norm}: clip_grad_norm_ does nothing then"
        yield Notice("note", what, "set train.max_grad_norm to the script's own")
    if context.topology.device == "cpu" and context.topology.world_size > 1:
        what = (
            "on a CPU, Accelerator() counts one process under DeepSpeed unless it is given the backend: the run would "
            "end with `Check batch related parameters`"
        )
        hint = 'write Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")]) in the script'
        yield Notice("warning", what, hint)
