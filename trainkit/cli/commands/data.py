"""`trainkit data`: what a recipe's rows are, how they become samples, and what of them is learned."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from trainkit.cli.commands.submit import SHOWN, at_its_line, refuse_or_say
from trainkit.cli.diagnostics import write_text
from trainkit.cli.options import Json, Presets, Variant
from trainkit.cli.pipeline import cluster_facts, plan_recipe, resolve_line
from trainkit.colour import Colour
from trainkit.errors import ExitCode, UsageError
from trainkit.launch_plan.model import Plan, Variable, bind_words, text
from trainkit.schedulers.registry import SCHEDULERS
from trainkit.text import pluralize
from trainkit.tools.builtin.program import SETTINGS

if TYPE_CHECKING:
    from trainkit.recipe.resolved import Resolved

Prepare = Annotated[bool, Option("--prepare", help="Only prepare the data ahead of a run, and show no rows.")]
Tasks = Annotated[
    int | None,
    Option("--tasks", min=1, help="With --prepare on a cluster: of the array job. Default: a file each, up to 64."),
]
MOST_TASKS = 64
Rows = Annotated[int, Option("--rows", metavar="N", min=0, help="How many rows to show as text.")]


def data(
    context: typer.Context,
    *,
    presets: Presets = None,
    variant: Variant = None,
    prepare: Prepare = False,
    tasks: Tasks = None,
    rows: Rows = 3,
    as_json: Json = False,
) -> None:
    """Show what RECIPE's data are: format, rows, splits, lengths, what is cut and why, and what is learned.

    Rows become token ids by this, once: a run that follows finds them ready. Some rows are shown as the model reads
    them, with what it learns to write marked. Exit code 2: a row cannot be learned from.

    Example: trainkit data llama-8b-lora data.path=chats.jsonl model.path=my-model

    Example: trainkit data recipe.yaml --prepare

    With a `cluster` of Slurm or PBS, --prepare submits an array job over the files, whose last task puts them together.
    """
    resolved = resolve_line(context, presets, variant)
    recipe = resolved.recipe
    if recipe.program.kind != "builtin" or recipe.data.kind != "dataset":
        kind = f"data.kind is {recipe.data.kind}" if recipe.program.kind == "builtin" else "a script reads its own data"
        raise UsageError(f"there are no rows to show: {kind}", hint="set data.kind: dataset and data.path to your rows")
    if getattr(recipe.data, "streaming", False):
        raise UsageError("streamed rows are not prepared", hint="add data.streaming=false to look at them")
    scheduler = SCHEDULERS.get(recipe.cluster.kind)
    in_array = prepare and scheduler is not None and scheduler.least_tasks > 0
    if tasks is not None and not in_array:
        raise UsageError(
            "--tasks are of an array job, and this is none", hint="it takes --prepare, and cluster.kind slurm or pbs"
        )
    plan = (
        plan_recipe(resolved, cluster_facts(resolved), preparing=True).plan if in_array else plan_recipe(resolved).plan
    )
    with tempfile.TemporaryDirectory(prefix="trainkit-data-") as folder:
        (Path(folder) / SETTINGS).write_text(next(file.content for file in plan.files if file.path == SETTINGS))
        words = ["--show", "0" if prepare else str(rows), *(["--json"] if as_json else [])]
        words += ["--colour"] if Colour(sys.stdout, os.environ).is_on and not as_json else []
        for argv in _steps(plan, folder):
            last = "trainkit.trainer.prepare" in argv
            if last and in_array:
                listed = json.loads(_run([*argv, "--list"], plan, stdout=subprocess.PIPE))
                _submit(plan, resolved, listed["files"], listed["cache"], tasks, as_json=as_json)
                return
            _run([*argv, *words] if last else argv, plan)


def _run(argv: Sequence[str], plan: Plan, stdout: int | None = None) -> str:
    """What a command prints, where that is a pipe. Exit where it fails."""
    done = subprocess.run(argv, check=False, env=_environment(plan), stdout=stdout, text=True)
    if done.returncode:
        raise typer.Exit(done.returncode if done.returncode > 0 else ExitCode.FAILED)
    return done.stdout


def _submit(
    plan: Plan, resolved: Resolved, files: list[str], cache: str | None, tasks: int | None, *, as_json: bool
) -> None:
    """Submit an array job over the files."""
    from trainkit.schedulers.jobs.submitting import preparing_script, signals_blocked, submit_preparation
    from trainkit.trainer.prepare import SHARE

    if cache is None:
        raise UsageError("no folder is known that all nodes share: HOME is not set", hint="set data.cache to one")
    count = min(len(files), tasks or MOST_TASKS)
    argv = next(item.argv for item in plan.preparations if any("trainer.prepare" in str(each) for each in item.argv))
    script = partial(preparing_script, plan, (*argv, text("--share")), _literal(plan), count=count)
    refuse_or_say(plan, resolved, show=False, script=script(stem=SHOWN))
    mark = Path(cache, f".shared-{secrets.token_hex(6)}")
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError as error:
        raise UsageError(f"{cache}: {error.strerror}", hint="set data.cache to a writable folder") from error
    settings = next(file.content for file in plan.files if file.path == SETTINGS)
    shares = [{"files": files[number::count], "tasks": count, "mark": str(mark)} for number in range(count)]
    contents = [{SETTINGS: settings, SHARE: json.dumps(each)} for each in shares]
    with signals_blocked(), at_its_line(resolved):
        folder, job = submit_preparation(plan, lambda stem: script(stem=stem), contents, os.environ)
        if as_json:
            said = {"job": job.id, "tasks": count, "files": len(files), "folder": str(folder.parent), "cache": cache}
            write_text(json.dumps(said, indent=2) + "\n")
        else:
            shown = f"{pluralize(count, 'task')} for {pluralize(len(files), 'file')}"
            write_text(f"job {job.id}: {shown}, output in {folder.parent}/task-*/job.out\n")
            write_text(f"the last task puts them together in {cache}, where runs find them\n")
        sys.stdout.flush()


def _steps(plan: Plan, folder: str) -> list[tuple[str, ...]]:
    """What a run does before its ranks start to get its rows ready."""
    values = {each: folder if each is Variable.RUN_DIR else "" for each in Variable}
    every = [bind_words(item.argv, values) for item in plan.preparations]
    fetches = [argv for argv in every if "trainkit.hub.fetch" in argv]
    needed = [argv for argv in fetches if argv[argv.index("trainkit.hub.fetch") + 1].startswith("data.")]
    return [*needed, *(argv for argv in every if "trainkit.trainer.prepare" in argv)]


def _environment(plan: Plan) -> dict[str, str]:
    return {**os.environ, **_literal(plan)}


def _literal(plan: Plan) -> dict[str, str]:
    """The variables of the ranks that are literal: caches and tokens of the Hub are theirs."""
    every = plan.environment.set
    return {name: str(value) for name, value in every if all(isinstance(part, str) for part in value.parts)}
