"""`trainkit data`: what a recipe's rows are, how they become samples, and what of them is learned."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from trainkit.cli.diagnostics import coloured
from trainkit.cli.options import Json, Presets, Variant
from trainkit.cli.pipeline import plan_recipe, resolve_line
from trainkit.errors import ExitCode, UsageError
from trainkit.launch_plan.model import Plan, Variable, bind_words
from trainkit.tools.builtin.program import SETTINGS

Prepare = Annotated[bool, Option("--prepare", help="Only prepare the data ahead of a run, and show no rows.")]
Rows = Annotated[int, Option("--rows", metavar="N", min=0, help="How many rows to show as text.")]


def data(
    context: typer.Context,
    *,
    presets: Presets = None,
    variant: Variant = None,
    prepare: Prepare = False,
    rows: Rows = 3,
    as_json: Json = False,
) -> None:
    """Show what RECIPE's data are: format, rows, splits, lengths, what is cut and why, and what is learned.

    Rows become token ids by this, once: a run that follows finds them ready. Some rows are shown as the model reads
    them, with what it learns to write marked. Exit code 2: a row cannot be learned from.

    Example: trainkit data llama-8b-lora data.path=chats.jsonl model.path=my-model

    Example: trainkit data recipe.yaml --prepare
    """
    resolved = resolve_line(context, presets, variant)
    recipe = resolved.recipe
    if recipe.program.kind != "builtin" or recipe.data.kind != "dataset":
        kind = f"data.kind is {recipe.data.kind}" if recipe.program.kind == "builtin" else "a script reads its own data"
        raise UsageError(f"there are no rows to show: {kind}", hint="set data.kind: dataset and data.path to your rows")
    if getattr(recipe.data, "streaming", False):
        raise UsageError("streamed rows are not prepared", hint="add data.streaming=false to look at them")
    plan = plan_recipe(resolved).plan
    with tempfile.TemporaryDirectory(prefix="trainkit-data-") as folder:
        (Path(folder) / SETTINGS).write_text(next(file.content for file in plan.files if file.path == SETTINGS))
        words = ["--show", "0" if prepare else str(rows), *(["--json"] if as_json else [])]
        words += ["--colour"] if coloured(sys.stdout) and not as_json else []
        for argv in _steps(plan, folder):
            last = "trainkit.trainer.prepare" in argv
            done = subprocess.run([*argv, *words] if last else argv, check=False, env=_environment(plan))
            if done.returncode:
                raise typer.Exit(done.returncode if done.returncode > 0 else ExitCode.FAILED)


def _steps(plan: Plan, folder: str) -> list[tuple[str, ...]]:
    """What a run does before its ranks start to get its rows ready."""
    values = {each: folder if each is Variable.RUN_DIR else "" for each in Variable}
    every = [bind_words(item.argv, values) for item in plan.preparations]
    fetches = [argv for argv in every if "trainkit.hub.fetch" in argv]
    needed = [argv for argv in fetches if argv[argv.index("trainkit.hub.fetch") + 1].startswith("data.")]
    return [*needed, *(argv for argv in every if "trainkit.trainer.prepare" in argv)]


def _environment(plan: Plan) -> dict[str, str]:
    """The caller's, with the variables of the ranks that are literal: caches and tokens of the Hub are theirs."""
    literal = {
        name: str(value) for name, value in plan.environment.set if all(isinstance(part, str) for part in value.parts)
    }
    return {**os.environ, **literal}
