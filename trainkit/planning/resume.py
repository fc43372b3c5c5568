"""Which checkpoint a run starts from: never, the newest that fits, or the one that the recipe names."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainkit.planning.plan import Notice, Resume

if TYPE_CHECKING:
    from trainkit.recipe.resolved import Resolved

FOLDER = re.compile(r"^step-(\d{8})$")


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A complete checkpoint of an earlier run of the same name."""

    path: str
    step: int
    training_digest: str
    run: str


def choose_resume(
    resolved: Resolved, digest: str, saved: Sequence[SavedCheckpoint]
) -> tuple[Resume, tuple[Notice, ...]]:
    """The starting point and what is to be said about it. saved: newest first."""
    wanted = resolved.recipe.checkpoint.resume
    if wanted == "never":
        return Resume(None, 0, "checkpoint.resume is never"), ()
    if wanted in resolved.absent.get("checkpoint.resume", ()):
        what = f"Not on this machine: there is nothing at {wanted}, which checkpoint.resume names."
        notice = Notice("blocker", what, "`auto` takes the newest checkpoint that fits.")
        return Resume(wanted, 0, "named by checkpoint.resume"), (notice,)
    return _newest(digest, saved) if wanted == "auto" else _named(wanted, digest, saved)


def _newest(digest: str, saved: Sequence[SavedCheckpoint]) -> tuple[Resume, tuple[Notice, ...]]:
    for checkpoint in saved:
        if checkpoint.training_digest == digest:
            return Resume(
                checkpoint.path,
                checkpoint.step,
                f"the newest complete checkpoint with these training settings, of run {checkpoint.run}",
            ), ()
    if not saved:
        return Resume(None, 0, "no earlier run of this name left a complete checkpoint"), ()
    reason = f"none of the {len(saved)} complete checkpoints of this name has these training settings"
    return Resume(None, 0, reason), (
        Notice("warning", f"checkpoint.resume is auto, but {reason}: the run starts at step 0."),
    )


def _named(path: str, digest: str, saved: Sequence[SavedCheckpoint]) -> tuple[Resume, tuple[Notice, ...]]:
    cleaned = posixpath.normpath(path)
    for checkpoint in saved:
        if posixpath.normpath(checkpoint.path) == cleaned:
            differs = Notice("warning", f"{path} was saved under other training settings than the recipe's.")
            notices = () if checkpoint.training_digest == digest else (differs,)
            return Resume(checkpoint.path, checkpoint.step, "named by checkpoint.resume"), notices
    folder = FOLDER.match(posixpath.basename(cleaned))
    if folder:
        return Resume(path, int(folder[1]), "named by checkpoint.resume"), ()
    hint = "A checkpoint is a folder `<run>/checkpoints/step-<8 digits>`; `auto` takes the newest that fits."
    return Resume(path, 0, "named by checkpoint.resume"), (
        Notice("blocker", f"{path} is not a checkpoint folder.", hint),
    )
