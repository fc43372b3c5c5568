"""`trainkit export`: the model of a checkpoint as others read it, and on the Hub."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from trainkit.cli.commands.runs import find_run
from trainkit.cli.diagnostics import one_line, write_text
from trainkit.cli.options import Root
from trainkit.errors import UsageError
from trainkit.files import is_there
from trainkit.recipe.address import scheme
from trainkit.recipe.hub_name import has_owner
from trainkit.text import join_names

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
EXPORTER = ("-P", "-m", "trainkit.trainer.checkpoint")
PUSHER = ("-P", "-m", "trainkit.hub.push")
TrustCode = Annotated[
    bool, Option("--trust-code", help="Import and run the code that the run names as its model (model.target).")
]
Adapter = Annotated[
    bool, Option("--adapter", help="Only the LoRA adapters, in peft's format, not merged into the weights.")
]
Dtype = Annotated[
    Literal["fp32", "bf16", "fp16"] | None,
    Option("--dtype", help="Number format of the weights; default: that of the base model (bf16 if it was quantised)."),
]
ShardSize = Annotated[
    str | None,
    Option("--shard-size", metavar="SIZE", help="Most of the weights in a file, as 200MB or 5GB; default: 5GB."),
]
Push = Annotated[
    str | None, Option("--push", metavar="OWNER/NAME", help="Also upload it to this model repository of the Hub.")
]
Private = Annotated[
    bool, Option("--private", help="With --push: the repository must be private; a new one is created private.")
]


def export(  # noqa: PLR0917 - a command's options
    source: Annotated[
        str,
        Argument(
            metavar="RUN_OR_CHECKPOINT",
            help="A run directory, a run's id or name (its newest checkpoint), or a checkpoint folder or its address.",
        ),
    ],
    destination: Annotated[
        str,
        Argument(
            metavar="[DEST]",
            help="Folder to create, also by an address (s3://…); default: <run>/exports/step-<8 digits>[-adapter].",
        ),
    ] = "",
    best: Annotated[
        bool, Option("--best", help="The run's checkpoint with the best evaluation instead of the newest.")
    ] = False,
    adapter: Adapter = False,
    dtype: Dtype = None,
    shard_size: ShardSize = None,
    push: Push = None,
    private: Private = False,
    trust_code: TrustCode = False,
    root: Root = "runs",
) -> None:
    """Export a checkpoint's model, whichever strategy saved it, as `from_pretrained` and serving engines expect it.

    The folder has weights, settings, tokenizer and a model card. Adapters (LoRA) are merged into the weights, unless
    --adapter exports only them. Weights pass through memory one tensor, or one layer with adapters, at a time. With
    --push it is uploaded, with the token of HF_TOKEN or of `hf auth login`. For an address (s3://bucket/path) the
    credentials are those in the environment.

    Example: trainkit export quickstart weights/
    """
    if private and push is None:
        raise UsageError("--private requires --push", hint="add --push OWNER/NAME")
    if shard_size is not None and adapter:
        raise UsageError("--shard-size is of whole weights, and --adapter exports none", hint="leave one of them out")
    shard_bytes = _bytes_in(shard_size) if shard_size is not None else None
    elsewhere = destination if scheme(destination) else ""
    if push is not None and elsewhere:
        raise UsageError(
            f"--push uploads a folder of this machine, and {elsewhere} is none", hint="export to each alone"
        )
    if elsewhere:
        require_free(elsewhere)
    with ExitStack() as scratch:
        checkpoint = (
            fetched(source, destination, scratch) if scheme(source) else find_checkpoint(source, root, best=best)
        )
        # On the disk of the checkpoint: a model fits there.
        beside = str(temporary(checkpoint.parents[1], scratch) / "model") if elsewhere else destination
        target = new_folder(beside, checkpoint, "-adapter" if adapter else "", push)
        if push is not None:
            make_ready(push, private, "adapters" if adapter else "weights")
        # torch is imported by a process of its own: this one starts fast, and never needs it.
        argv = [*EXPORTER, "--checkpoint", str(checkpoint), "--destination", str(target.absolute())]
        argv += ["--dtype", dtype] if dtype else []
        argv += ["--shard-bytes", str(shard_bytes)] if shard_bytes else []
        options = (("--adapter", adapter), ("--trust-code", trust_code), ("--for-hub", push is not None))
        end_with(run_module([*argv, *(option for option, given in options if given)]))
        if elsewhere:
            copy(target, elsewhere, scratch)
        write_text(f"{elsewhere or target}\n")
        if push is not None:
            upload(target, push, f"{checkpoint.name} of {checkpoint.parents[2].name}")


def temporary(parent: Path | None, scratch: ExitStack) -> Path:
    """A temporary folder, by default in that of the system; it is removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix=".export-", dir=parent))
    scratch.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder


def require_free(address: str) -> None:
    """UsageError where something is at an address. MachineError if that cannot be read."""
    from trainkit.runner.rundir.elsewhere import explained, open_folder

    with explained(f"{address} cannot be read", address):
        if open_folder(address).sizes():
            raise UsageError(f"{address} exists", hint="give another destination, or remove it")


def fetched(address: str, destination: str, scratch: ExitStack) -> Path:
    """The checkpoint at an address, in a temporary folder."""
    from trainkit.runner.rundir.elsewhere import fetch_named

    if not destination:
        raise UsageError(f"where {address} is exported to is not named", hint=f"trainkit export {address} FOLDER")
    return fetch_named(address, temporary(None, scratch))


def copy(export: Path, address: str, scratch: ExitStack) -> None:
    """Copy an export to an address; where that fails, or is interrupted, it stays on this machine."""
    from trainkit.runner.rundir.elsewhere import copy_export

    try:
        copy_export(export, address)
    except BaseException:
        scratch.pop_all()
        sys.stderr.write(f"The weights are in {export}.\n")
        raise


def _bytes_in(size: str) -> int:
    """The bytes of a size as transformers writes it (`max_shard_size`): units are powers of 1000."""
    number, unit = size.strip()[:-2].strip(), size.strip()[-2:].upper()
    if (
        unit not in _UNITS
        or not re.fullmatch(r"\d+(\.\d+)?", number)
        or (found := int(float(number) * _UNITS[unit])) < 1
    ):
        raise UsageError(f"--shard-size {size} is no size", hint="write a number and KB, MB, GB or TB: 200MB, 5GB")
    return found


def new_folder(destination: str, checkpoint: Path, kind: str, repo: str | None) -> Path:
    """Where to write; by default beside the run's checkpoints. UsageError where something is. repo: to upload it to."""
    beside = checkpoint.parents[1] / "exports" / f"{checkpoint.name}{kind}"
    target = Path(destination) if destination else beside
    if is_there(target):
        as_it_is = f"; `{by_hand(target, repo)}` uploads it as it is" if repo else ""
        raise UsageError(f"{target} exists", hint=f"give another destination, or remove it{as_it_is}")
    return target


def make_ready(repo: str, private: bool, holds: str) -> None:
    """Have a repository that weights, or adapters, can be uploaded to. UsageError for what is no name of one."""
    if not has_owner(repo):
        raise UsageError(f"{repo} cannot be the name of a repository of the Hub", hint="write it as owner/name")
    end_with(run_module([*PUSHER, repo, "--holds", holds, *(["--private", "yes"] if private else [])]))


def upload(folder: Path, repo: str, message: str) -> None:
    """Commit a folder to a repository; where that fails, or is interrupted, say what tries again."""
    code = -1
    try:
        code = run_module([*PUSHER, repo, "--folder", str(folder), "--message", message])
    finally:
        if code != 0:
            sys.stderr.write(f"The weights are in {folder}: `{by_hand(folder, repo)}` uploads them later.\n")
    end_with(code)


def by_hand(folder: Path, repo: str) -> str:
    """The command of huggingface_hub that uploads a folder."""
    return shlex.join(("hf", "upload", repo, str(folder), "."))


def run_module(argv: Sequence[str]) -> int:
    """Run one of trainkit's modules in a process of its own; its exit code."""
    code = subprocess.run([sys.executable, *argv], check=False).returncode
    return code if code >= 0 else 128 - code


def end_with(code: int) -> None:
    """End the command, unless all went well."""
    if code:
        raise typer.Exit(code)


def find_checkpoint(word: str, root: str, *, best: bool, step: int | None = None) -> Path:
    """The checkpoint folder that a word means; of a run, the newest, the best, or that of a step. UsageError if none.

    A name means its newest run that has some: one that only evaluates another's weights saves none.
    """
    from trainkit.runner.rundir.listing import checkpoints_of, named_checkpoint, saved_checkpoints

    if named_checkpoint(word):
        if best or step is not None:
            option = "--best" if best else "--checkpoint"
            raise UsageError(
                f"{option} selects one of a run's checkpoints, and {word} is a checkpoint", hint="name the run"
            )
        return Path(word).absolute()
    layout = find_run(word, root).layout
    run, saved = layout.root, checkpoints_of(layout)
    if not saved and word == layout.name and (earlier := saved_checkpoints(root, word)):
        run, saved = Path(earlier[0].path).parents[1], [each for each in earlier if each.run == earlier[0].run]
        sys.stderr.write(one_line(f"{layout.root} has no complete checkpoint: this is of {run}") + "\n")
    if not saved:
        hint = "checkpoint.every_steps saves some; SIGUSR1 to a running one saves now"
        raise UsageError(f"{run} has no complete checkpoint", hint=hint)
    if step is not None and step not in (steps := [each.step for each in saved]):
        have = join_names([str(each) for each in sorted(steps)])
        raise UsageError(f"{run} has no complete checkpoint of step {step}", hint=f"it has those of {have}")
    if step is None:
        step = saved[0].best_step if best else saved[0].step  # the newest checkpoint knows the best one
    found = next((Path(each.path) for each in saved if each.step == step), None)
    if found is None:
        lost = "nothing was evaluated" if step is None else f"that of step {step} is no longer there"
        hint = "checkpoint.keep_best keeps the one of the best evaluation"
        raise UsageError(f"{run} has no best checkpoint: {lost}", hint=hint)
    return found
