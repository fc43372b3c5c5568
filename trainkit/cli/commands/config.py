"""`trainkit config`: a recipe from a few questions."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from trainkit.cli.disk import Disk, working_folder
from trainkit.cli.options import On
from trainkit.cli.pipeline import find_recipe
from trainkit.errors import UsageError

if TYPE_CHECKING:
    from trainkit.recipe.layers.merge import Merge
    from trainkit.wizard.session import Session


Output = Annotated[str, Option("--output", "-o", metavar="FILE", help="The recipe to write.")]
From = Annotated[str | None, Option("--from", metavar="RECIPE", help="Start from this recipe; the new one extends it.")]
Answers = Annotated[
    str | None, Option("--answers", metavar="FILE", help="Answers in YAML, by recipe key; not asked again.")
]
Given = Annotated[
    list[str] | None, Option("--set", metavar="KEY=VALUE", help="One answer, or any setting; may be repeated.")
]


def config(
    *,
    output: Output = "recipe.yaml",
    base: From = None,
    on: On = None,
    answers: Answers = None,
    given: Given = None,
    defaults: Annotated[bool, Option("--defaults", help="Ask nothing: take what is proposed.")] = False,
    force: Annotated[bool, Option("--force", help="Replace an existing file without asking.")] = False,
) -> None:
    """Write a recipe from a few questions, of which this machine and your answers leave as few as possible.

    On a terminal with arrow keys and typing, in a pipe line by line. Leaving with
    Ctrl-C or Ctrl-D (exit code 130) keeps the answers in a file for --answers.

    Example: trainkit config

    Example: trainkit config --on 8xh100

    Example: trainkit config --defaults --set strategy.kind=fsdp --output fsdp.yaml
    """
    from trainkit.cli.asking.writing import Job, ask_and_write, take_defaults

    session, places = first_question(output, base, on, answers, given or ())
    job = Job(Path(output), places, force, again(output, base, on))
    if defaults:
        take_defaults(session, job)
    else:
        raise typer.Exit(ask_and_write(session, job))


def first_question(
    output: str, base: str | None, on: str | None, answers: str | None, given: Sequence[str]
) -> tuple[Session, Merge]:
    """The conversation before its first question, with what is answered already, and where those answers are from.

    Raises RecipeError or UsageError for what was given.
    """
    from trainkit.cli.machines import machine_facts
    from trainkit.recipe.layers.paths import absolute
    from trainkit.wizard.question import Base, View
    from trainkit.wizard.session import Session, check_given, read_base, read_given

    disk, cwd = Disk(), working_folder()
    # What this shell adds to every recipe must not become part of one.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TRAINKIT__")}
    recipe = find_recipe(base, disk) if base is not None else None
    if Path(output).is_dir():
        raise UsageError(f"{output or '.'} is a folder", hint=f"name a file: --output {Path(output, 'recipe.yaml')}")
    if recipe is not None and absolute(recipe, cwd) == absolute(output, cwd):
        raise UsageError(f"{output} is what the new recipe is to extend", hint="name another file: --output FILE")
    settings, places = read_given(answers, given, disk, cwd)
    start = read_base(recipe, base or "", disk, cwd, environ) if recipe is not None else Base()
    machine = cache(partial(machine_facts, on))
    if on is not None:
        machine()  # so that an error is shown before the first question
    session = Session(View(machine, disk, cwd, start, settings, (), environ))
    check_given(session.seen(), places)
    return session, places


def again(output: str, base: str | None, on: str | None) -> str:
    """The same call for a later time; the file of answers is to follow."""
    words = ["trainkit", "config", *(["--output", output] if output != "recipe.yaml" else [])]
    words += [*(["--from", base] if base else []), *(["--on", on] if on else []), "--answers"]
    return shlex.join(words)
