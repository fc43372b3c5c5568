"""From a command line to a resolved recipe and a plan: the part that `run`, `plan` and `explain` share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from trainkit.cli.diagnostics import show_diagnostics
from trainkit.cli.disk import Disk
from trainkit.cli.grammar import take_apart
from trainkit.errors import MachineError, UsageError
from trainkit.flags.resolve import resolve
from trainkit.machine.facts import Facts
from trainkit.plan.model import Planned
from trainkit.planner.build import build_plan
from trainkit.recipe.resolved import Request, Resolved

PROGRAM = ("program.script=", "program.module=")  # which make a run of their own


def resolve_line(
    command: str, words: Sequence[str], presets: Sequence[str], program: Sequence[str], variant: str | None = None
) -> Resolved:
    """Resolve the words of a `run` or `plan` line: one recipe (presets or a program may stand for it) and overrides."""
    line = take_apart(words, most=1, what="one recipe")
    if not line.positional and not stands_for_recipe(line.overrides, presets):
        hint = f"trainkit {command} RECIPE; `trainkit ls` shows the shipped ones"
        raise UsageError("no recipe is named", hint=hint)
    return resolve_words(line.positional[0] if line.positional else None, line.overrides, presets, program, variant)


def stands_for_recipe(overrides: Sequence[str], presets: Sequence[str]) -> bool:
    """Whether a line without a recipe says what to run."""
    return bool(presets) or any(each.startswith(PROGRAM) for each in overrides)


def resolve_words(
    recipe: str | None,
    overrides: Sequence[str],
    presets: Sequence[str],
    program: Sequence[str] = (),
    variant: str | None = None,
) -> Resolved:
    """Resolve what a command line asks for and show the warnings. Raises RecipeError with everything that is wrong."""
    resolved = resolve_request(recipe, overrides, presets, program, variant)
    show_diagnostics(resolved.warnings)
    return resolved


def resolve_request(
    recipe: str | None,
    overrides: Sequence[str],
    presets: Sequence[str],
    program: Sequence[str] = (),
    variant: str | None = None,
) -> Resolved:
    """Resolve what a command line asks for; program: the words after `--`, appended to program.args."""
    disk = Disk()
    request = Request(
        recipe=find_recipe(recipe, disk) if recipe is not None else None,
        cwd=working_folder(),
        presets=tuple(presets),
        overrides=tuple(overrides),
        arguments=tuple(program),
        environ=dict(os.environ),
        variant=variant,
    )
    return resolve(request, disk)


def working_folder() -> str:
    """The folder that relative paths start from. Raises MachineError where it has been removed meanwhile."""
    try:
        return os.getcwd()  # noqa: PTH109 - as text, as the pure core takes it
    except FileNotFoundError as error:
        raise MachineError("the working folder is no longer there", hint="cd to a folder that exists") from error


def find_recipe(word: str, disk: Disk) -> str:
    """The path that a recipe word means: a file, a run directory (its recipe.yaml), or the name of a shipped recipe."""
    if not word:
        raise UsageError("the name of the recipe is empty", hint="name a recipe file, or a shipped one (`trainkit ls`)")
    if disk.is_folder(word):
        inside = str(Path(word, "recipe.yaml"))
        if not disk.exists(inside):
            raise UsageError(
                f"{word} is a folder without a recipe.yaml",
                hint="name a recipe file, or a run directory (`trainkit runs list` shows them)",
            )
        return inside
    if not disk.exists(word) and (shipped := disk.shipped().get(f"recipes/{word}")):
        return shipped
    return word


def plan_words(resolved: Resolved, facts: Facts | None = None) -> Planned:
    """Plan a resolved recipe for this machine, with the checkpoints that earlier runs of its name left.

    facts: of this machine, where they are known already.
    """
    from trainkit.machine.probe import probe
    from trainkit.runner.rundir.checkpoints import named_checkpoint, saved_checkpoints
    from trainkit.runner.rundir.trainer_checkpoints import trainer_checkpoints

    recipe = resolved.recipe
    wanted = recipe.checkpoint.resume
    if recipe.program.kind == "hf":
        saved = trainer_checkpoints(recipe.output.root, recipe.name) if wanted == "auto" else []
    else:
        saved = saved_checkpoints(recipe.output.root, recipe.name) if wanted == "auto" else named_checkpoint(wanted)
    return build_plan(resolved, facts or probe(), saved)
