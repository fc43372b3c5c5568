"""`trainkit explain`: where a value came from, and which recipe line made a token of the plan."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from trainkit.cli.options import On, Presets, Variant
from trainkit.cli.pipeline import no_recipe, plan_recipe, replaces_recipe, resolve_request, show_warnings, split_line


def explain(
    context: typer.Context,
    presets: Presets = None,
    variant: Variant = None,
    machine: On = None,
    token: Annotated[
        str | None,
        typer.Option("--token", metavar="WORD", help="A word of the plan's command, also one that looks like a flag."),
    ] = None,
) -> None:
    """Say where the value of KEY in RECIPE came from: the winner, every value it beat, each with its origin.

    KEY may also name a part of the plan: a variable, a file's key, a word of the
    command. Without KEY all set values are listed.

    Example: trainkit explain quickstart optimizer.lr

    Example: trainkit explain ddp --token=--nproc-per-node=2
    """
    from trainkit.cli.machines import machine_facts
    from trainkit.plan.render import explain as renderer
    from trainkit.recipe.schema.fields import schema

    given, overrides = split_line(context.args, most=2, what="a recipe and a key")
    recipe, *queries = given or [""]
    # Where presets or a program are in place of a recipe, one word alone may be the key.
    if replaces_recipe(overrides, presets) and not queries and (not recipe or recipe in schema().settings):
        recipe, queries = "", [recipe] if recipe else []
    elif not recipe:
        raise no_recipe("explain RECIPE [KEY]")
    if token is not None:
        queries.append(token)
    resolved = show_warnings(resolve_request(recipe or None, overrides, presets, context.obj, variant))
    if not queries:
        sys.stdout.write(renderer.render_all(resolved))
        return
    planned = plan_recipe(resolved, machine_facts(machine))
    sys.stdout.write("\n".join(renderer.render(query, resolved, planned) for query in queries))
