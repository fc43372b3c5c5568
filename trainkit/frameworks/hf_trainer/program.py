"""`hf`: scripts on transformers' Trainer; what the recipe sets reaches them as flags and files of TrainingArguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from trainkit.errors import Diagnostic
from trainkit.frameworks.base import own_scripts, verbosity
from trainkit.frameworks.base.fields import UNSET, Unsupported, said_below
from trainkit.frameworks.base.program import Detection
from trainkit.frameworks.deepspeed.fields import FILE as DEEPSPEED
from trainkit.frameworks.deepspeed.ops import preparations as deepspeed_preparations
from trainkit.frameworks.hf_trainer import deepspeed, fsdp_config, refusals, remarks, support, xla
from trainkit.frameworks.hf_trainer.argv_reader import MARKS, SHARED_MARKS, own_flags, rendered
from trainkit.frameworks.hf_trainer.fields import FIELDS, OUTPUT, Argument
from trainkit.frameworks.hf_trainer.versions import OLDEST, version
from trainkit.plan.context import Context
from trainkit.plan.model import Notice, Preparation, Variable
from trainkit.plan.provenance import Source, SourcedFile, SourcedVariable, Token, token

if TYPE_CHECKING:
    from trainkit.frameworks.base.draft import Draft, ImportContext
    from trainkit.recipe.resolved import Resolved

REACH = support.REACH
REQUIRES: Mapping[str, str] = {"transformers": OLDEST, "torch": "2.6", "accelerate": "1.9"}
DETECTION = Detection(
    "transformers' Trainer",
    frozenset(
        f"transformers.{name}"
        for name in ("Trainer", "Seq2SeqTrainer", "TrainingArguments", "Seq2SeqTrainingArguments")
    ),
    frozenset({"HfArgumentParser", "TrlParser"}),  # which make TrainingArguments of a command line
    MARKS,
    SHARED_MARKS,
)
IMPLIED = "the plan decides it, so the program is given it"


def check(resolved: Resolved) -> tuple[Diagnostic, ...]:
    """Exactly one of script and module must be given."""
    return own_scripts.check_target(resolved)


def problems(context: Context) -> tuple[Diagnostic, ...]:
    """Settings that Trainer has no counterpart for, and arguments of the program's own that contradict the plan."""
    return (*refusals.problems(context), *xla.problems(context))


def reason(context: Context) -> str:
    """For people."""
    return f"{own_scripts.described(context)}, on the Trainer of transformers {version(context)}"


def argv(context: Context) -> tuple[Token, ...]:
    """Interpreter, script, the user's arguments and then the plan's: argparse lets the last of two count.

    What follows a bare `--` is no flag, so the plan's stand before it.
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
        return (deepspeed.file(context),)
    return (fsdp_config.file(context),) if fsdp_config.is_chosen(context) else ()


def environment(context: Context) -> tuple[SourcedVariable, ...]:
    """What the libraries read from the environment alone."""
    return (*verbosity.environment(context), *fsdp_config.environment(context))


def preparations(context: Context) -> tuple[Preparation, ...]:
    """DeepSpeed's ops, for the zero strategies."""
    return deepspeed_preparations(context) if context.zero else ()


def notices(context: Context) -> tuple[Notice, ...]:
    """What transformers lacks, and arguments of the program's own that do less than they seem to."""
    return (*remarks.notices(context), *xla.notices(context))


def numbers(context: Context) -> Iterator[tuple[str, int | float, Source]]:
    """What TrainingArguments must be seen to hold: field, value and what made it.

    Words and switches are left out: TrainingArguments rewrite some of them.
    """
    for field, value in _given(context):
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield field.name_in(version(context)), value, Source(_keys(context, field) or field.keys[:1])


def _given(context: Context) -> Iterator[tuple[Argument, object]]:
    """The fields that the program is given, with their values; those that its own arguments set are theirs."""
    own = own_flags(context)
    for field in FIELDS:
        value = field.encode(context) if field.name not in own and field.is_given(context) else UNSET
        if value is not UNSET and not isinstance(value, Unsupported):  # which `problems` has reported
            yield field, value


def _keys(context: Context, field: Argument) -> tuple[str, ...]:
    return tuple(each for key in field.keys for each in said_below(context, key))


def _flags(context: Context) -> Iterator[Token]:
    own = own_flags(context)
    for field, value in _given(context):
        keys = _keys(context, field)
        for word in (f"--{field.name_in(version(context))}", *rendered(value)):
            yield token(word, keys=keys, rule="" if keys else IMPLIED)
    ours = {field.name for field in FIELDS if field.is_given(context)} | own.keys()
    for name, number in deepspeed.implied(context).items():
        if name not in ours:
            yield from (token(word, keys=("strategy.config",)) for word in (f"--{name}", *rendered(number)))
    for name, path in _paths(context):
        if name not in own:
            yield token(f"--{name}", rule=IMPLIED)
            yield token(Variable.RUN_DIR, f"/{path}", rule=IMPLIED)


def _paths(context: Context) -> Iterator[tuple[str, str]]:
    """Fields that name places in the run directory."""
    yield "output_dir", OUTPUT
    if fsdp_config.is_chosen(context):
        yield "fsdp_config", fsdp_config.CONFIG
    if context.zero:
        yield "deepspeed", DEEPSPEED


def read(draft: Draft, context: ImportContext, argv: Sequence[str]) -> list[str]:
    """Import Trainer's flags; the others stay the script's own."""
    from trainkit.frameworks.hf_trainer.importer import read_program

    return read_program(draft, context, argv)
