"""`accelerate`: scripts on `Accelerator()`, which reads its settings from the environment, whoever launches it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.errors import Diagnostic
from trainkit.frameworks.accelerate import deepspeed, refusals, remarks
from trainkit.frameworks.accelerate.fields import settings
from trainkit.frameworks.accelerate.setting import Setting
from trainkit.frameworks.accelerate.support import REACH
from trainkit.frameworks.base import own_scripts, verbosity
from trainkit.frameworks.deepspeed import ops
from trainkit.plan.context import Context
from trainkit.plan.model import Notice, Preparation
from trainkit.plan.provenance import SourcedFile, SourcedVariable, Token, variable

if TYPE_CHECKING:
    from trainkit.recipe.resolved import Resolved

__all__ = [
    "REACH",
    "argv",
    "check",
    "environment",
    "files",
    "notices",
    "preparations",
    "problems",
    "reason",
    "wrapper",
]

READ = "Accelerator() reads it"
LOGS = (*verbosity.LIBRARIES, "ACCELERATE_LOG_LEVEL")


def check(resolved: Resolved) -> tuple[Diagnostic, ...]:
    """Exactly one of script and module must be given."""
    return own_scripts.check_target(resolved)


def problems(context: Context) -> tuple[Diagnostic, ...]:
    """Settings that Accelerator() cannot be told."""
    return tuple(refusals.problems(context))


def reason(context: Context) -> str:
    """For people."""
    return f"{own_scripts.described(context)}, on Accelerator()"


def argv(context: Context) -> tuple[Token, ...]:
    """Interpreter, script or module, and the arguments word for word."""
    return own_scripts.command(context, own_scripts.own_argv(context))


def wrapper(context: Context) -> tuple[Token, ...]:
    """The level of the libraries' log lines on the ranks that are not a main one."""
    return verbosity.wrapper(context, LOGS)


def files(context: Context) -> tuple[SourcedFile, ...]:
    """DeepSpeed's settings, for the zero strategies."""
    return (deepspeed.file(context),) if context.zero else ()


def environment(context: Context) -> tuple[SourcedVariable, ...]:
    """All that Accelerator() is told. accelerate launch writes the same from its file, which has the same values."""
    return (*verbosity.environment(context, LOGS), *(_variable(context, each) for each in settings(context)))


def preparations(context: Context) -> tuple[Preparation, ...]:
    """DeepSpeed's ops, for the zero strategies."""
    return ops.preparations(context) if context.zero else ()


def notices(context: Context) -> tuple[Notice, ...]:
    """What stays the script's own."""
    return tuple(remarks.notices(context))


def _variable(context: Context, setting: Setting) -> SourcedVariable:
    keys = tuple(key for key in setting.keys if context.resolved.given(key))
    rule = setting.rule or ("" if keys else READ)
    return variable(setting.variable, *setting.value, keys=keys, rule=rule)
