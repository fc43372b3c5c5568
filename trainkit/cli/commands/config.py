"""`trainkit config`: a recipe from a few questions."""

from __future__ import annotations

from typing import Annotated

import typer
from typer import Option

from trainkit.cli.options import On


def config(
    *,
    output: Annotated[str, Option("--output", "-o", metavar="FILE", help="The recipe to write.")] = "recipe.yaml",
    base: Annotated[
        str | None, Option("--from", metavar="RECIPE", help="Start from this recipe; the new one extends it.")
    ] = None,
    on: On = None,
    answers: Annotated[
        str | None, Option("--answers", metavar="FILE", help="Answers in YAML, by recipe key; not asked again.")
    ] = None,
    given: Annotated[
        list[str] | None,
        Option("--set", metavar="KEY=VALUE", help="One answer, or any setting; may be repeated."),
    ] = None,
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
    from trainkit.cli.asking.writing import ask_and_write, begin, take_defaults

    session, job = begin(output, base, on, answers, given or (), force=force)
    if defaults:
        take_defaults(session, job)
    else:
        raise typer.Exit(ask_and_write(session, job))
