"""Notices of a plan for Trainer: versions it does not know, names that are gone, checkpoints that cannot be resumed."""

from __future__ import annotations

from collections.abc import Iterator

from trainkit.frameworks.base.argv_reader import script_flags
from trainkit.frameworks.hf_trainer.argv_reader import own_flags, written
from trainkit.frameworks.hf_trainer.fields import BY_GONE_NAME, FIELDS
from trainkit.frameworks.hf_trainer.versions import BEYOND, version
from trainkit.machine.versions import at_least
from trainkit.plan.context import Context
from trainkit.plan.model import Notice
from trainkit.recipe.schema.launching import program_argv

RESUMABLE = ("checkpoint", "all_checkpoints")


def notices(context: Context) -> Iterator[Notice]:
    """Every notice."""
    installed, own = version(context), own_flags(context)
    if at_least(installed, BEYOND):  # one that is missing or too old is a missing package
        what = f"transformers {installed} is newer than trainkit knows: its settings may have other names"
        yield Notice("blocker", what, f"pip install 'transformers<{BEYOND}'")
    yield from _gone(context)
    push, strategy = own.get("push_to_hub"), own.get("hub_strategy")
    chosen = strategy.values[0] if strategy and strategy.values else "every_save"
    if push and push.switch is not False and chosen not in RESUMABLE:
        what = f"hub_strategy {chosen} pushes no optimizer state: training cannot be resumed from the hub"
        yield Notice("warning", what, "set hub_strategy to checkpoint in program.args to push a last-checkpoint too")
    if "output_dir" in own:
        what = "program.args name an output_dir: the program's files lie there and not in the run directory"
        yield Notice("note", what, "checkpoint.resume auto does not look there")
    if context.resume.path is not None:  # TrainingArguments only hold the path, as their documentation says
        what = "Trainer leaves --resume_from_checkpoint to the script, which has to hand it to train()"
        yield Notice("note", what)
    yield from _abbreviated(context)


def _gone(context: Context) -> Iterator[Notice]:
    for flag in script_flags(program_argv(context.recipe.program.args)):
        old = BY_GONE_NAME.get(flag.name)
        if old and not old.known_to(version(context)):
            name = written(flag).removeprefix("--")
            what = f"TrainingArguments of transformers {version(context)} no longer have {name}"
            yield Notice("warning", what, f"unless the script declares it itself, write {old.help}")


def _abbreviated(context: Context) -> Iterator[Notice]:
    """argparse takes a beginning of a flag for the flag, and the plan's own flags come last."""
    ours = {field.name for field in FIELDS if field.is_given(context)}
    for name, flag in own_flags(context).items():
        meant = sorted(field for field in ours if field.startswith(name) and field != name)
        if meant and name not in ours:
            what = (
                f"{written(flag)} may be read as short for --{meant[0]}; the plan gives that too, and its value counts"
            )
            yield Notice("warning", what, "write the flag in full, unless the script has one of this very name")
