"""What a plan for Trainer has to say: versions it does not know, names that are gone, models that cannot be resumed."""

from __future__ import annotations

from collections.abc import Iterator

from trainkit.frameworks.hf_trainer.argv_reader import FALSE, spoken_fields
from trainkit.frameworks.hf_trainer.fields import ROWS, spoken
from trainkit.frameworks.hf_trainer.row import version
from trainkit.frameworks.hf_trainer.versions import BEYOND, GONE
from trainkit.machine.versions import at_least
from trainkit.plan.context import Context
from trainkit.plan.model import Notice

RESUMABLE = ("checkpoint", "all_checkpoints")


def notices(context: Context) -> tuple[Notice, ...]:
    """Every remark."""
    return (*_version(context), *_gone(context), *_hub(context), *_output(context), *_resume(context), *_short(context))


def _version(context: Context) -> Iterator[Notice]:
    """A version that is missing or too old is a missing package."""
    if at_least(version(context), BEYOND):
        what = f"transformers {version(context)} is newer than trainkit knows: its settings may have other names."
        yield Notice("blocker", what, f"Run: pip install 'transformers<{BEYOND}'")


def _gone(context: Context) -> Iterator[Notice]:
    args = context.recipe.program.args
    names = args if isinstance(args, dict) else [word.partition("=")[0] for word in args if word.startswith("--")]
    for name in names:
        gone, instead = GONE.get(name.removeprefix("--").replace("-", "_"), ("", ""))
        if gone and at_least(version(context), gone):
            what = f"TrainingArguments of transformers {version(context)} have no {name.removeprefix('--')} any more."
            yield Notice("warning", what, f"Unless the script declares it itself, write {instead}.")


def _hub(context: Context) -> Iterator[Notice]:
    own = spoken_fields(context.recipe.program.args)
    push, strategy = own.get("push_to_hub"), own.get("hub_strategy")
    if push is None or (push.words and push.words[0].lower() in FALSE):
        return
    chosen = strategy.words[0] if strategy and strategy.words else "every_save"
    if chosen not in RESUMABLE:
        what = f"hub_strategy {chosen} pushes no optimizer state: training cannot be resumed from the hub."
        yield Notice("warning", what, "Set hub_strategy: checkpoint in program.args to push a last-checkpoint too.")


def _output(context: Context) -> Iterator[Notice]:
    if "output_dir" in spoken_fields(context.recipe.program.args):
        what = "program.args name an output_dir: the program's files lie there and not in the run directory."
        yield Notice("note", what, "checkpoint.resume: auto does not look there.")


def _resume(context: Context) -> Iterator[Notice]:
    """TrainingArguments only hold the path; the documentation says that it is meant for scripts."""
    if context.resume.path is not None:
        what = "Trainer leaves --resume_from_checkpoint to the script, which has to hand it to train()."
        yield Notice("note", what)


def _short(context: Context) -> Iterator[Notice]:
    """argparse takes a beginning of a flag for the flag, and the plan's own flags come last."""
    ours = {row.field for row in ROWS if spoken(context, row)}
    for name, said in spoken_fields(context.recipe.program.args).items():
        meant = sorted(field for field in ours if field.startswith(name) and field != name)
        if meant and name not in ours:
            what = f"{said.written} may be read as short for --{meant[0]}, which the plan gives too: the plan's counts."
            yield Notice("warning", what, "Write the flag in full, unless the script has one of this very name.")
