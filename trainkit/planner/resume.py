"""Which checkpoint a run starts from: never, the newest that fits, or the one that the recipe names."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainkit.errors import Diagnostic, blocker, note, warning
from trainkit.launch_plan.model import Resume
from trainkit.text import pluralize

if TYPE_CHECKING:
    from trainkit.recipe.resolved import Resolved

# As the built-in trainer names them, and transformers (trainer_utils.py: PREFIX_CHECKPOINT_DIR).
FOLDER = re.compile(r"^step-(\d{8})$")
TRAINER_FOLDER = re.compile(r"^checkpoint-(\d+)$")
# Folders in a checkpoint with a file for each rank, of DeepSpeed's engine and of a run that swaps to NVMe.
ENGINE_STATE, SWAPPED_STATE = "zero", "swapped"
NAMED = "named by checkpoint.resume"
TAKE_ANOTHER = "name an older checkpoint; `auto` takes the newest that is whole and fits"
# Each rank has all of the model and the optimizer, and a checkpoint of one rank is that of any number.
WHOLE = frozenset({"single", "ddp"})


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint of an earlier run. strategy and world_size: who saved it; "" and 0 where unknown.

    best_step: of the best evaluation by then; None where nothing was evaluated.
    damage: what is wrong with its files, "" for a complete one. by_rank: whether DeepSpeed has written a file for each
    rank, which only as many ranks of that strategy read; all else is read by any strategy on any ranks. source: the
    address that it is fetched from, to `path`; "" for one on this machine.
    """

    path: str
    step: int
    training_digest: str
    run: str
    strategy: str = ""
    world_size: int = 0
    best_step: int | None = None
    damage: str = ""
    by_rank: bool = False
    source: str = ""

    @property
    def place(self) -> str:
        """Where its files are now."""
        return self.source or self.path

    @property
    def saved_by(self) -> str:
        """`saved by ddp on 2 ranks`."""
        return f"saved by {spread(self.strategy, self.world_size)}"


@dataclass(frozen=True, slots=True)
class ResumeTarget:
    """The run that would resume: what it trains, by which strategy, on how many ranks."""

    training_digest: str
    strategy: str
    world_size: int
    program: str = "builtin"


def spread(strategy: str, world_size: int) -> str:
    """`ddp on 2 ranks`."""
    return f"{strategy} on {pluralize(world_size, 'rank')}"


def written_by_rank(files: Iterable[str]) -> bool:
    """Whether a checkpoint has a file for each rank, by its files' names in it."""
    return any(name.partition("/")[0] in (ENGINE_STATE, SWAPPED_STATE) for name in files)


def unreadable(saved_strategy: str, saved_ranks: int, strategy: str, ranks: int, *, by_rank: bool) -> str | None:
    """Why a strategy on so many ranks cannot read what another saved; None if it can."""
    if not by_rank or (saved_strategy, saved_ranks) == (strategy, ranks):
        return None
    writer, reader = spread(saved_strategy, saved_ranks), spread(strategy, ranks)
    return f"{writer} saved it as a file for each rank, which {reader} cannot read"


def choose_resume(
    resolved: Resolved, reader: ResumeTarget, saved: Sequence[SavedCheckpoint], own: Sequence[SavedCheckpoint] = ()
) -> tuple[Resume, tuple[Diagnostic, ...]]:
    """The starting point and the notices about it. saved, own: newest first, damaged ones among them."""
    asked = resolved.recipe.checkpoint.resume
    if own:
        resume, notices = _newest(reader, own)
        if resume.path is not None:
            return replace(
                resume, reason=f"this run's own newest checkpoint, {resume.reason.rpartition(', ')[2]}"
            ), notices
    if asked == "never":
        return Resume(None, 0, "checkpoint.resume is never"), ()
    if asked in resolved.absent.get("checkpoint.resume", ()):
        return Resume(asked, 0, NAMED), ()
    if asked == "auto":
        resume, notices = _newest(reader, saved)
    elif reader.program == "hf":  # a folder that only transformers' Trainer reads
        folder = TRAINER_FOLDER.match(posixpath.basename(posixpath.normpath(asked)))
        resume, notices = Resume(asked, int(folder[1]) if folder else 0, f"{NAMED}, for the program to read"), ()
    else:
        resume, notices = _named(asked, reader, saved)
    steps = resolved.recipe.train.steps
    if resume.path is not None and steps and resume.step >= steps:
        what = f"the checkpoint is of step {resume.step}, and train.steps is {steps}: nothing is left to train"
        notices += (warning(what, "set train.steps higher to go on"),)
    return resume, notices


def _newest(reader: ResumeTarget, found: Sequence[SavedCheckpoint]) -> tuple[Resume, tuple[Diagnostic, ...]]:
    saved = [checkpoint for checkpoint in found if not checkpoint.damage]
    resume, notices = _newest_whole(reader, saved)
    newer = found[: next((place for place, each in enumerate(found) if each.path == resume.path), len(found))]
    skipped = (warning(f"{each.place} is damaged and skipped: {each.damage}") for each in newer if each.damage)
    return resume, (*skipped, *notices)


def _newest_whole(reader: ResumeTarget, saved: Sequence[SavedCheckpoint]) -> tuple[Resume, tuple[Diagnostic, ...]]:
    if not saved:
        return Resume(None, 0, "no earlier run of this name left a complete checkpoint"), ()
    same = [checkpoint for checkpoint in saved if checkpoint.training_digest == reader.training_digest]
    # `saved` is newest first, so the first that can be read is the newest.
    readable = next((checkpoint for checkpoint in same if not _obstacle(checkpoint, reader)), None)
    if readable:
        reason = f"the newest complete checkpoint with these training settings, of run {readable.run}"
        return _start(readable, reason), _changed(readable, reader)
    reason = f"none of the {len(saved)} complete checkpoints of this name has these training settings"
    if same:
        reason = f"{same[0].place} cannot be read: {_obstacle(same[0], reader)}"
    what = f"checkpoint.resume is auto, but {reason}: the run starts at step 0"
    return Resume(None, 0, reason), (warning(what),)


def _named(path: str, reader: ResumeTarget, saved: Sequence[SavedCheckpoint]) -> tuple[Resume, tuple[Diagnostic, ...]]:
    cleaned = posixpath.normpath(path)
    known = next((checkpoint for checkpoint in saved if posixpath.normpath(checkpoint.path) == cleaned), None)
    if known is None:
        if folder := FOLDER.match(posixpath.basename(cleaned)):
            return Resume(path, int(folder[1]), NAMED), ()
        # Neither known nor named like a checkpoint: the trainer would notice only after it has loaded everything.
        hint = "name a folder `<run>/checkpoints/step-<8 digits>`; `auto` takes the newest that fits"
        return Resume(path, 0, NAMED), (blocker(f"{path} is not a checkpoint folder", hint),)
    if known.damage:
        return Resume(path, known.step, NAMED), (blocker(f"{path} is damaged: {known.damage}", TAKE_ANOTHER),)
    if obstacle := _obstacle(known, reader):
        hint = "resume with the strategy and the number of ranks that saved it"
        return _start(known, NAMED), (blocker(f"{path} cannot be resumed from: {obstacle}", hint),)
    notices = _changed(known, reader)
    if known.training_digest != reader.training_digest:
        what = f"{path} was saved under other training settings than the recipe's"
        notices = (warning(what), *notices)
    return _start(known, NAMED), notices


def _start(checkpoint: SavedCheckpoint, reason: str) -> Resume:
    by = f", {checkpoint.saved_by}" if checkpoint.strategy else ""
    fetched = f", fetched from {checkpoint.source}" if checkpoint.source else ""
    return Resume(checkpoint.path, checkpoint.step, f"{reason}{fetched}{by}")


def _obstacle(checkpoint: SavedCheckpoint, reader: ResumeTarget) -> str | None:
    """Why the run cannot read the checkpoint, if that is known and so."""
    writer, now = (checkpoint.strategy, checkpoint.world_size), (reader.strategy, reader.world_size)
    if not checkpoint.strategy:
        return None
    if reader.program != "hf":
        return unreadable(*writer, *now, by_rank=checkpoint.by_rank)
    # Trainer reads whole models and optimizers anywhere, sharded ones only as they were.
    if writer == now or {checkpoint.strategy, reader.strategy} <= WHOLE:
        return None
    return f"{spread(*writer)} saved it, and Trainer goes on from sharded state only with the same strategy and ranks"


def _changed(checkpoint: SavedCheckpoint, reader: ResumeTarget) -> tuple[Diagnostic, ...]:
    """What changes when another strategy or number of ranks goes on."""
    if not checkpoint.strategy or (checkpoint.strategy, checkpoint.world_size) == (reader.strategy, reader.world_size):
        return ()
    what = (
        f"the checkpoint was {checkpoint.saved_by}, and {spread(reader.strategy, reader.world_size)} goes on from it: "
        "the same training up to rounding, no longer bit for bit"
    )
    return (note(what),)
