"""`trainkit explain`: where a value came from, and which recipe line made a token of the plan."""

from __future__ import annotations

import sys

import typer

from trainkit.cli.options import Presets
from trainkit.cli.words import Invocation, take_apart
from trainkit.errors import UsageError


def explain(context: typer.Context, presets: Presets = None) -> None:
    """Say where the value of KEY in RECIPE came from: the winner, every value it beat, each with its origin.

    KEY may also be a token of the plan (an argument, a variable, a file's key); without KEY all set values are listed.

    Examples: trainkit explain quickstart optimizer.lr · trainkit explain quickstart OMP_NUM_THREADS
    """
    from trainkit.cli.pipeline import plan_words, resolve_words
    from trainkit.planning.renderers import explain as renderer

    invocation: Invocation = context.obj
    words = take_apart(context.args, most=2, what="a recipe and a key")
    if not words.positional:
        raise UsageError("no recipe is named", hint="trainkit explain RECIPE [KEY]")
    recipe, *rest = words.positional
    resolved = resolve_words(recipe, words.overrides, presets or (), invocation.program)
    if not rest:
        sys.stdout.write(renderer.render_all(resolved))
        return
    sys.stdout.write(renderer.render(rest[0], resolved, plan_words(resolved)))
