"""Resume: a checkpoint found, verified against its manifest, and read into a run."""

from __future__ import annotations

import logging
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from trainkit.errors import TrainingError
from trainkit.files import read_whole
from trainkit.planner.resume import spread, unreadable
from trainkit.runner.rundir.layout import MANIFEST
from trainkit.text import listed
from trainkit.trainer.checkpoint.manifest import (
    Identity,
    generators_file,
    newest,
    read_manifest,
    reason,
    refuse_damaged,
    refuse_other_base,
    underlying,
)
from trainkit.trainer.distributed import gather_from_ranks
from trainkit.trainer.parallel import Strategy
from trainkit.trainer.randomness import derived_seed, restore_generator_states, seed_generators
from trainkit.trainer.settings import World
from trainkit.trainer.setup import Parts

log = logging.getLogger("trainkit.trainer")


def resume(parts: Parts, *, restarted: bool) -> int:
    """Load the checkpoint that this run starts from, if any, and return the steps that are already done."""
    # After an elastic restart it is this run's own newest one; before it has one, the plan's.
    folder, root = parts.settings.resume, parts.checkpoints.root
    if restarted and root is not None:
        # One rank looks for all: a shared folder may not look the same to every node at once.
        folder = gather_from_ranks(newest(root), parts.world)[0] or folder
    if folder is None:
        return 0
    manifest = load(folder, parts.checkpoints.identity, parts.strategy, parts.world)
    parts.best.restore(manifest.get("best", {}))
    step, steps = int(manifest["step"]), parts.steps
    _resume_stream(parts, manifest.get("stream", ""), step, (folder / MANIFEST).stat().st_mtime)
    saved_by = spread(manifest["strategy"], manifest["world_size"])
    log.info("resumed from %s after step %d, saved by %s", folder, step, saved_by)
    if step >= steps > 0:
        log.warning("nothing is left to train: the run has %d steps, and the checkpoint is of step %d", steps, step)
    return step


def _resume_stream(parts: Parts, bookmark: str, step: int, saved: float) -> None:
    """Have a stream begin near the first sample after a step. TrainingError where its bookmark is damaged.

    saved: when the checkpoint was written, in seconds since the epoch.
    """
    stream = parts.source.stream
    if stream is None:
        return
    if bookmark and stream.go_on(bookmark, step * parts.settings.batch.global_):
        newer = stream.written_after(saved) if parts.world.rank == 0 else ()
        if newer:
            which, were = listed([str(path) for path in newer]), "were" if len(newer) > 1 else "was"
            why = "head, middle and end are as before, and no more is looked at: other rows are other samples"
            log.warning("%s %s written after the checkpoint: %s", which, were, why)
        return
    if parts.world.rank == 0:
        why = "is of other data, or of another batch" if bookmark else "has no place in streamed data"
        log.warning("the checkpoint %s: all that %d steps take is read first, from the beginning", why, step)


def load(folder: Path, identity: Identity, strategy: Strategy, world: World) -> dict[str, Any]:
    """Restore a checkpoint and return its manifest. TrainingError names what does not fit or is damaged."""
    manifest = read_manifest(folder)
    obstacle = unreadable(manifest["strategy"], manifest["world_size"], identity.strategy, identity.world_size)
    if obstacle:
        raise TrainingError(
            f"the checkpoint {folder} cannot be resumed from: {obstacle}",
            hint="resume with the strategy and the number of ranks that saved it",
        )
    refuse_other_base(folder, manifest, identity.base)
    refuse_damaged(folder, manifest, world)
    try:
        strategy.load(folder)
        if manifest["world_size"] == world.size:
            restore_generator_states(read_whole(generators_file(folder, world.rank)))
    except TrainingError:
        raise
    except (Exception, CheckpointException) as error:  # torch and DeepSpeed raise anything over what they did not write
        if isinstance(underlying(error), UnpicklingError):
            raise TrainingError(
                f"the checkpoint {folder} holds more than data, and is not read: {reason(error)}",
                hint="take one that trainkit has written, with an optimizer whose state is tensors and numbers",
            ) from error
        raise TrainingError(
            f"the checkpoint {folder} is of another model, optimizer or precision: {reason(error)}",
            hint="resume with the settings that saved it",
        ) from error
    if manifest["world_size"] != world.size:
        # These ranks have no states to go on from; neither do they start over with those of step 0.
        seed_generators(derived_seed(torch.initial_seed(), "resumed", manifest["step"], world.rank))
    # Only a checkpoint that is named by its path can be of other settings: `auto` looks for the same ones.
    if world.rank == 0 and manifest["training_digest"] != identity.training_digest:
        log.warning("%s was saved under other training settings; training goes on with this run's", folder)
    if world.rank == 0 and manifest.get("tokenizer", identity.tokenizer) != identity.tokenizer:
        log.warning("%s was saved with another tokenizer: its weights know other token ids", folder)
    return manifest
