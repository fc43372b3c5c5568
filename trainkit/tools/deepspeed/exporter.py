"""`deepspeed`: the JSON file that a script on DeepSpeed's engine, or on Trainer, is given."""

from __future__ import annotations

from dataclasses import replace

from trainkit.errors import Origin
from trainkit.launch_plan.context import Context
from trainkit.optimizers import optimizer
from trainkit.recipe.resolved import Entry
from trainkit.tools.base.interface import nothing
from trainkit.tools.deepspeed.config import config_file
from trainkit.tools.deepspeed.fields import FILE, OPTIMIZER_KEYS, has_schedule
from trainkit.tools.registry import PROGRAMS

notes = started = nothing
_DEFAULTS = Origin("defaults", 0, "the recipe's defaults")


def unfit(context: Context) -> str:
    kind = context.recipe.strategy.kind
    return "" if context.zero else f"it is for the strategies zero0 to zero3, and strategy.kind is {kind}"


def files(context: Context, folder: str) -> dict[str, str]:
    """The file that the program gets in a run; for one that gets none, all that the recipe says to DeepSpeed.

    The built-in trainer makes optimizer and schedule itself, and a plain torch program makes everything.
    """
    kind = context.recipe.program.kind
    if kind != "builtin":
        made = {file.path: file.content for file in PROGRAMS[kind].files(context)}
        if FILE in made:
            return {FILE: made[FILE]}
    return {FILE: config_file(_with_defaults(context), "deepspeed", whole=True).content}


def _with_defaults(context: Context) -> Context:
    """The same plan, as if a layer gave what DeepSpeed makes: its own optimizers and schedules have other defaults."""
    known = optimizer(context.recipe.optimizer.name).deepspeed
    keys = (*(OPTIMIZER_KEYS if known else ()), *(("schedule.name",) if known and has_schedule(context) else ()))
    others = (each for each in context.resolved.history.items() if not each[0].startswith(("optimizer.", "schedule.")))
    history = {**dict(others), **dict.fromkeys(keys, (Entry(None, _DEFAULTS),))}
    return replace(context, resolved=replace(context.resolved, history=history))
