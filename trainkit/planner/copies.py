"""The plan's part of `checkpoint.copy_to`: what runs before the ranks, and what is said of it."""

from __future__ import annotations

from collections.abc import Iterator

from trainkit.errors import Diagnostic, note, warning
from trainkit.launch_plan.context import Context
from trainkit.launch_plan.model import Preparation, Variable, text
from trainkit.launch_plan.provenance import chosen_at_start, module, texts
from trainkit.recipe.address import CREDENTIALS, PACKAGES, scheme
from trainkit.recipe.schema import NoContainer
from trainkit.schedulers.registry import SCHEDULERS

KEY = "checkpoint.copy_to"


def address_of(context: Context) -> str | None:
    """Where the built-in trainer copies its checkpoints; None for other programs, which have their own."""
    return context.recipe.checkpoint.copy_to if context.recipe.program.kind == "builtin" else None


def preparations(context: Context) -> Iterator[Preparation]:
    """Before the ranks start: a first file is written there, and the checkpoint to resume from is fetched."""
    if (address := address_of(context)) is None:
        return
    words = [text("ready"), text(address), text("--run"), text(Variable.RUN_DIR)]
    if context.topology.nodes > 1:
        words += [text("--node"), text(Variable.NODE_RANK)]
    if chosen_at_start(context):
        words += [text("--checkpoint=", Variable.RESUME)]
    argv = (*texts(module(context, "trainkit.runner.rundir.elsewhere", keys=(KEY,))), *words)
    yield Preparation(f"make {address} ready for checkpoints", argv)


def notices(context: Context) -> Iterator[Diagnostic]:
    """What is copied and when; credentials that do not reach the run."""
    if (address := address_of(context)) is None:
        return
    checkpoint = context.recipe.checkpoint
    kept = f"the newest {checkpoint.keep} of a run stay there" if checkpoint.keep else "all stay there"
    yield note(
        f"{KEY}: each checkpoint is copied whole to {address}, in the background of the training; {kept}, and the end "
        "of the run waits for the last copy"
    )
    scheduler = SCHEDULERS.get(context.recipe.cluster.kind)
    pods = scheduler is not None and not scheduler.shares_folder
    variables = CREDENTIALS.get(PACKAGES.get(scheme(address), ""), ())
    if (pods or not isinstance(context.recipe.container, NoContainer)) and variables:
        lacking = [name for name in variables if name not in context.recipe.env_from and name not in context.recipe.env]
        if lacking:
            hint = f"list {' and '.join(lacking)} under env_from, unless the machine itself may write there"
            yield warning(f"{KEY}: your credentials do not get into the {'pod' if pods else 'container'}", hint)
