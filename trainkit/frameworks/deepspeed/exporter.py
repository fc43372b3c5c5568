"""`deepspeed`: the JSON file that a script on DeepSpeed's engine, or on Trainer, is given."""

from __future__ import annotations

import json
from dataclasses import replace

from trainkit.errors import Origin
from trainkit.frameworks.deepspeed.config import deepspeed_config
from trainkit.frameworks.deepspeed.program import OPTIMIZERS, has_schedule
from trainkit.frameworks.deepspeed.readers import OWN_PROGRAM
from trainkit.frameworks.registry import PROGRAMS
from trainkit.plan.context import Context

FILE = "deepspeed.json"
_DEFAULTS = Origin("defaults", 0, "the recipe's defaults")
# What the built-in trainer's defaults mean has to be said: DeepSpeed's own are others.
_WHOLE = replace(OWN_PROGRAM, keeps=frozenset({"steps_per_print"}))


def unfit(context: Context) -> str:
    """Why there is no such file."""
    kind = context.recipe.strategy.kind
    return "" if context.zero else f"it is for the strategies zero1, zero2 and zero3, and strategy.kind is {kind}"


def notes(context: Context) -> tuple[str, ...]:
    """None."""
    return ()


def combination(context: Context) -> None:
    """What the plan starts."""


def files(context: Context, folder: str) -> dict[str, str]:
    """The file that the program gets in a run; for one that gets none, all that the recipe says to DeepSpeed.

    The built-in trainer makes optimizer and schedule itself, and a plain torch program makes everything.
    """
    kind = context.recipe.program.kind
    if kind != "builtin":
        made = {file.path: file.content for file in PROGRAMS[kind].files(context)}
        if FILE in made:
            return {FILE: made[FILE]}
    base = context.resolved.attachments.get("strategy.config")
    given = dict.fromkeys(_said(context), _DEFAULTS)
    content, _ = deepspeed_config(context.recipe, context.batch, context.dtype, base, given.get, reader=_WHOLE)
    return {FILE: json.dumps(content, indent=2, ensure_ascii=False) + "\n"}


def _said(context: Context) -> tuple[str, ...]:
    """Recipe keys that the file says, where DeepSpeed has the like."""
    recipe = context.recipe
    adam = ("optimizer.beta1", "optimizer.beta2", "optimizer.eps")
    known = recipe.optimizer.name in OPTIMIZERS
    steps = ("logging.every_steps",) if context.resolved.given("logging.every_steps") else ()
    optimizer = ("optimizer.name", "optimizer.lr", "optimizer.weight_decay", *adam) if known else ()
    return (*steps, *optimizer, *(("schedule.name", "optimizer.lr") if known and has_schedule(context) else ()))
