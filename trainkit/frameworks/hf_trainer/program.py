"""`hf`: scripts on transformers' Trainer; what the recipe sets reaches them as flags and files of TrainingArguments."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from trainkit.errors import Diagnostic
from trainkit.frameworks.base import own_scripts, verbosity
from trainkit.frameworks.deepspeed.ops import preparations as deepspeed_preparations
from trainkit.frameworks.hf_trainer import deepspeed, fsdp, refusals, remarks, xla
from trainkit.frameworks.hf_trainer.argv_reader import spoken_fields
from trainkit.frameworks.hf_trainer.fields import DEEPSPEED, OUTPUT, ROWS, spoken
from trainkit.frameworks.hf_trainer.row import Row, Unfit, set_below, version, words
from trainkit.frameworks.hf_trainer.support import REACH
from trainkit.frameworks.hf_trainer.versions import name_of
from trainkit.plan.context import Context
from trainkit.plan.model import Notice, Preparation, Variable
from trainkit.plan.provenance import Source, SourcedFile, SourcedVariable, Token, token

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

IMPLIED = "the plan decides it, so the program is told"


def check(resolved: Resolved) -> tuple[Diagnostic, ...]:
    """Exactly one of script and module must be given."""
    return own_scripts.check_target(resolved)


def problems(context: Context) -> tuple[Diagnostic, ...]:
    """Settings that Trainer has no counterpart for, and words of the program's own that contradict the plan."""
    own = (*refusals.contradictions(context), *refusals.own_argv(context))
    return (*refusals.unfit(context), *own, *xla.problems(context))


def reason(context: Context) -> str:
    """For people."""
    return f"{own_scripts.described(context)}, on the Trainer of transformers {version(context)}"


def argv(context: Context) -> tuple[Token, ...]:
    """Interpreter, script, the user's words and then the plan's: argparse lets the last of two count.

    Words after a bare `--` are no flags, so the plan's stand before it.
    """
    own = own_scripts.own_argv(context)
    end = next((place for place, word in enumerate(own) if str(word.text) == "--"), len(own))
    return own_scripts.command(context, (*own[:end], *_flags(context), *own[end:]))


def wrapper(context: Context) -> tuple[Token, ...]:
    """The level of the libraries' log lines on the ranks that are not a main one."""
    return verbosity.wrapper(context)


def files(context: Context) -> tuple[SourcedFile, ...]:
    """FSDP's settings, or DeepSpeed's."""
    if context.zero:
        return (deepspeed.file(context, DEEPSPEED),)
    if not fsdp.chosen(context):
        return ()
    entries = fsdp.config(context)
    content = json.dumps({key: value for key, value, _ in entries}, indent=2, ensure_ascii=False) + "\n"
    return (SourcedFile(fsdp.CONFIG, content, {key: Source((made_by,)) for key, _, made_by in entries}),)


def environment(context: Context) -> tuple[SourcedVariable, ...]:
    """What the libraries read from the environment alone."""
    return (*verbosity.environment(context), *fsdp.environment(context))


def preparations(context: Context) -> tuple[Preparation, ...]:
    """DeepSpeed's ops, for the zero strategies."""
    return deepspeed_preparations(context) if context.zero else ()


def notices(context: Context) -> tuple[Notice, ...]:
    """What transformers lacks, and words of the program's own that do less than they seem to."""
    return (*remarks.notices(context), *xla.notices(context))


def _flags(context: Context) -> tuple[Token, ...]:
    own = spoken_fields(context.recipe.program.args)
    found = [word for row in ROWS if row.field not in own for word in _flag(context, row)]
    said = {row.field for row in ROWS if spoken(context, row)} | own.keys()
    for field, value in deepspeed.implied(context).items():
        if field not in said:
            found += [token(word, keys=("strategy.config",)) for word in (f"--{field}", *words(value))]
    for field, path in _paths(context):
        if field not in own:
            found += [token(f"--{field}", rule=IMPLIED), token(Variable.RUN_DIR, f"/{path}", rule=IMPLIED)]
    return tuple(found)


def _flag(context: Context, row: Row) -> tuple[Token, ...]:
    value = row.value(context) if spoken(context, row) else None
    if value is None or isinstance(value, Unfit):  # which `problems` has reported
        return ()
    keys = tuple(each for key in row.keys for each in set_below(context, key))
    rule = "" if keys else IMPLIED
    flag = f"--{name_of(row.field, version(context))}"
    return tuple(token(word, keys=keys, rule=rule) for word in (flag, *words(value)))


def _paths(context: Context) -> tuple[tuple[str, str], ...]:
    """Fields that name places in the run directory."""
    config = (("fsdp_config", fsdp.CONFIG),) if fsdp.chosen(context) else ()
    zero = (("deepspeed", DEEPSPEED),) if context.zero else ()
    return (("output_dir", OUTPUT), *config, *zero)
