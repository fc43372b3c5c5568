"""`trainkit export`: the weights of a checkpoint as safetensors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainkit.cli.options import Root
from trainkit.errors import UsageError

if TYPE_CHECKING:
    from trainkit.planner.resume import SavedCheckpoint

WORKER = ("-P", "-m", "trainkit.trainer.checkpoint.export")


def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN_OR_CHECKPOINT",
            help="A run directory, a run's id or name (its newest checkpoint), or a checkpoint folder.",
        ),
    ],
    destination: Annotated[
        str, typer.Argument(metavar="[DEST]", help="Folder to make; default: <run>/exports/step-<8 digits>[-adapter].")
    ] = "",
    best: Annotated[
        bool, typer.Option("--best", help="The run's checkpoint of the lowest evaluation loss, not the newest.")
    ] = False,
    adapter: Annotated[
        bool,
        typer.Option("--adapter", help="The LoRA adapters alone, as peft reads them, not merged into the weights."),
    ] = False,
    root: Root = "runs",
) -> None:
    """Write a checkpoint's weights, of whatever strategy, as model.safetensors with a config.json beside it.

    Adapters (LoRA) are merged into the weights, unless --adapter asks for them alone.

    Example: trainkit export quickstart weights/
    """
    checkpoint = find_checkpoint(source, root, best=best)
    beside = checkpoint.parents[1] / "exports" / (checkpoint.name + ("-adapter" if adapter else ""))
    target = Path(destination) if destination else beside
    if target.exists():
        raise UsageError(f"{target} exists", hint="give another destination, or remove it")
    # torch is imported by a process of its own: this one starts fast, and never needs it.
    argv = [*WORKER, "--checkpoint", str(checkpoint), "--destination", str(target.absolute())]
    argv += ["--adapter"] if adapter else []
    if code := subprocess.run([sys.executable, *argv], check=False).returncode:
        raise typer.Exit(code)
    sys.stdout.write(f"{target}\n")


def find_checkpoint(word: str, root: str, *, best: bool) -> Path:
    """The checkpoint folder that a word means; of a run, the newest or the best one. UsageError where there is none."""
    from trainkit.runner.rundir.checkpoints import named_checkpoint

    if named_checkpoint(word):
        if best:
            raise UsageError(f"--best chooses among the checkpoints of a run, and {word} is one", hint="name the run")
        return Path(word).absolute()
    run, saved = saved_by(word, root)
    step = saved[0].best_step if best else saved[0].step  # the newest checkpoint knows the best one
    found = [Path(each.path) for each in saved if each.step == step]
    if not found:
        lost = "nothing was evaluated" if step is None else f"that of step {step} is no longer there"
        hint = "checkpoint.keep_best keeps the one of the lowest evaluation loss"
        raise UsageError(f"{run} has no best checkpoint: {lost}", hint=hint)
    return found[0]


def saved_by(word: str, root: str) -> tuple[Path, list[SavedCheckpoint]]:
    """The run directory that a word means, and its checkpoints. UsageError where there are none.

    A name means its newest run that has some: one that only evaluates another's weights saves none.
    """
    from trainkit.cli.commands.runs import find_run
    from trainkit.runner.rundir.checkpoints import checkpoints_of, saved_checkpoints

    run = find_run(word, root).layout
    saved = checkpoints_of(run)
    if saved:
        return run.root, saved
    earlier = saved_checkpoints(root, word) if word == run.name else []
    if not earlier:
        hint = "checkpoint.every_steps saves some; SIGUSR1 to a running one saves now"
        raise UsageError(f"{run.root} has no complete checkpoint", hint=hint)
    newest = Path(earlier[0].path).parents[1]
    sys.stderr.write(f"{run.root} has no complete checkpoint: exporting from {newest}\n")
    return newest, [each for each in earlier if each.run == earlier[0].run]
