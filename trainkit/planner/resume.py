"""Which checkpoint a run starts from: never, the newest that fits, or the one that the recipe names."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainkit.plan.model import Notice, Resume
from trainkit.text import counted

if TYPE_CHECKING:
    from trainkit.recipe.resolved import Resolved

FOLDER = re.compile(r"^step-(\d{8})$")
TRAINER_FOLDER = re.compile(r"^checkpoint-(\d+)$")
WHOLE = frozenset({"single", "ddp"})
# torch.distributed.checkpoint writes whole tensors and shards alike, and cuts them anew for whoever reads them.
RESHARDING = frozenset({"single", "ddp", "fsdp"})


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A complete checkpoint of an earlier run. strategy and world_size: who saved it; "" and 0 where it is not said.

    best_step: where the evaluation loss was the lowest by then; None where nothing was evaluated.
    """

    path: str
    step: int
    training_digest: str
    run: str
    strategy: str = ""
    world_size: int = 0
    best_step: int | None = None

    @property
    def saved_by(self) -> str:
        """`saved by ddp on 2 ranks`."""
        return f"saved by {spread(self.strategy, self.world_size)}"


@dataclass(frozen=True, slots=True)
class Reader:
    """The run that would resume: what it trains, by which strategy, on how many ranks."""

    training_digest: str
    strategy: str
    world_size: int
    program: str = "builtin"


def spread(strategy: str, world_size: int) -> str:
    """`ddp on 2 ranks`."""
    return f"{strategy} on {counted(world_size, 'rank')}"


def unreadable(saved_strategy: str, saved_ranks: int, strategy: str, ranks: int) -> str | None:
    """Why a strategy on so many ranks cannot read what another saved; None if it can."""
    if (saved_strategy, saved_ranks) == (strategy, ranks) or {saved_strategy, strategy} <= RESHARDING:
        return None
    writer, reader = spread(saved_strategy, saved_ranks), spread(strategy, ranks)
    if saved_strategy in RESHARDING:
        return f"{writer} saved it with torch.distributed.checkpoint, which DeepSpeed ({reader}) does not read"
    return f"{writer} saved it in DeepSpeed's own format, a file for each rank, which {reader} cannot read"


def choose_resume(
    resolved: Resolved, reader: Reader, saved: Sequence[SavedCheckpoint]
) -> tuple[Resume, tuple[Notice, ...]]:
    """The starting point and what is to be said about it. saved: newest first."""
    wanted = resolved.recipe.checkpoint.resume
    if wanted == "never":
        return Resume(None, 0, "checkpoint.resume is never"), ()
    if wanted in resolved.absent.get("checkpoint.resume", ()):
        what = f"Not on this machine: there is nothing at {wanted}, which checkpoint.resume names."
        notice = Notice("blocker", what, "`auto` takes the newest checkpoint that fits.")
        return Resume(wanted, 0, "named by checkpoint.resume"), (notice,)
    if wanted == "auto":
        resume, notices = _newest(reader, saved)
    else:
        resume, notices = _for_trainer(wanted) if reader.program == "hf" else _named(wanted, reader, saved)
    return resume, notices + _spent(resume, resolved.recipe.train.steps)


def _spent(resume: Resume, steps: int | None) -> tuple[Notice, ...]:
    """A run that is over before its first step."""
    if resume.path is None or not steps or resume.step < steps:
        return ()
    what = f"The checkpoint stands at step {resume.step}, and train.steps is {steps}: nothing is left to train."
    return (Notice("warning", what, "Set train.steps higher to go on."),)


def _for_trainer(path: str) -> tuple[Resume, tuple[Notice, ...]]:
    """A folder that only transformers' Trainer reads."""
    folder = TRAINER_FOLDER.match(posixpath.basename(posixpath.normpath(path)))
    return Resume(path, int(folder[1]) if folder else 0, "named by checkpoint.resume, for the program to read"), ()


def _newest(reader: Reader, saved: Sequence[SavedCheckpoint]) -> tuple[Resume, tuple[Notice, ...]]:
    same = [checkpoint for checkpoint in saved if checkpoint.training_digest == reader.training_digest]
    for checkpoint in same:
        if not _obstacle(checkpoint, reader):
            reason = f"the newest complete checkpoint with these training settings, of run {checkpoint.run}"
            return Resume(checkpoint.path, checkpoint.step, _with_writer(reason, checkpoint)), _changed(
                checkpoint, reader
            )
    if not saved:
        return Resume(None, 0, "no earlier run of this name left a complete checkpoint"), ()
    reason = f"none of the {len(saved)} complete checkpoints of this name has these training settings"
    if same:
        reason = f"{same[0].path} cannot be read: {_obstacle(same[0], reader)}"
    return Resume(None, 0, reason), (
        Notice("warning", f"checkpoint.resume is auto, but {reason}: the run starts at step 0."),
    )


def _obstacle(checkpoint: SavedCheckpoint, reader: Reader) -> str | None:
    """Why the run cannot read the checkpoint, if that is known and so."""
    if not checkpoint.strategy:
        return None
    if reader.program == "hf":
        return _not_for_trainer(checkpoint, reader)
    return unreadable(checkpoint.strategy, checkpoint.world_size, reader.strategy, reader.world_size)


def _not_for_trainer(checkpoint: SavedCheckpoint, reader: Reader) -> str | None:
    """Why Trainer cannot go on: whole models and optimizers it reads anywhere, sharded ones only as they were."""
    writer, now = (checkpoint.strategy, checkpoint.world_size), (reader.strategy, reader.world_size)
    if writer == now or {checkpoint.strategy, reader.strategy} <= WHOLE:
        return None
    return f"{spread(*writer)} saved it, and Trainer goes on from sharded state only with the same strategy and ranks"


def _with_writer(reason: str, checkpoint: SavedCheckpoint) -> str:
    return f"{reason}, {checkpoint.saved_by}" if checkpoint.strategy else reason


def _changed(checkpoint: SavedCheckpoint, reader: Reader) -> tuple[Notice, ...]:
    """What changes when another strategy or number of ranks goes on."""
    if not checkpoint.strategy or (checkpoint.strategy, checkpoint.world_size) == (reader.strategy, reader.world_size):
        return ()
    what = (
        f"The checkpoint was {checkpoint.saved_by}, and {spread(reader.strategy, reader.world_size)} goes on from it: "
        "the same training up to rounding, no longer bit for bit."
    )
    return (Notice("note", what),)


def _named(path: str, reader: Reader, saved: Sequence[SavedCheckpoint]) -> tuple[Resume, tuple[Notice, ...]]:
    cleaned = posixpath.normpath(path)
    for checkpoint in saved:
        if posixpath.normpath(checkpoint.path) != cleaned:
            continue
        resume = Resume(checkpoint.path, checkpoint.step, _with_writer("named by checkpoint.resume", checkpoint))
        if obstacle := _obstacle(checkpoint, reader):
            hint = "Resume with the strategy and the number of ranks that saved it."
            return resume, (Notice("blocker", f"{path} cannot be resumed from: {obstacle}.", hint),)
        differs = Notice("warning", f"{path} was saved under other training settings than the recipe's.")
        notices = () if checkpoint.training_digest == reader.training_digest else (differs,)
        return resume, notices + _changed(checkpoint, reader)
    folder = FOLDER.match(posixpath.basename(cleaned))
    if folder:
        return Resume(path, int(folder[1]), "named by checkpoint.resume"), ()
    hint = "A checkpoint is a folder `<run>/checkpoints/step-<8 digits>`; `auto` takes the newest that fits."
    return Resume(path, 0, "named by checkpoint.resume"), (
        Notice("blocker", f"{path} is not a checkpoint folder.", hint),
    )
