"""`trainkit export`: the weights of a checkpoint as safetensors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from trainkit.errors import UsageError

WORKER = ("-P", "-m", "trainkit.train.export")


def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN_OR_CHECKPOINT",
            help="A run directory, a run's id or name (its newest checkpoint), or a checkpoint folder.",
        ),
    ],
    destination: Annotated[
        str, typer.Argument(metavar="[DEST]", help="Folder to make; default: <run>/exports/step-<8 digits>.")
    ] = "",
    root: Annotated[str, typer.Option("--root", metavar="FOLDER", help="The recipes' output.root.")] = "runs",
) -> None:
    """Write a checkpoint's weights, of whatever strategy, as model.safetensors with a config.json beside it.

    Example: trainkit export quickstart weights/
    """
    checkpoint = find_checkpoint(source, root)
    target = Path(destination) if destination else checkpoint.parents[1] / "exports" / checkpoint.name
    if target.exists():
        raise UsageError(f"{target} exists", hint="give another destination, or remove it")
    # torch is imported over there: this process starts fast, and never needs it.
    words = ["--checkpoint", str(checkpoint), "--destination", str(target.absolute())]
    code = subprocess.run([sys.executable, *WORKER, *words], check=False).returncode
    if code:
        raise typer.Exit(code)
    sys.stdout.write(f"{target}\n")


def find_checkpoint(word: str, root: str) -> Path:
    """The checkpoint folder that a word means. Raises UsageError where there is no complete one."""
    from trainkit.cli.commands.runs import find_run
    from trainkit.launch.saved import checkpoints_of, named_checkpoint

    if named_checkpoint(word):
        return Path(word).absolute()
    run = find_run(word, root).layout
    saved = checkpoints_of(run)
    if not saved:
        hint = "checkpoint.every_steps saves some; SIGUSR1 to a running one saves now"
        raise UsageError(f"{run.root} has no complete checkpoint", hint=hint)
    return Path(saved[0].path)
