"""Resume: find a checkpoint, verify it against its manifest, and load it into the run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from trainkit.errors import TrainingError
from trainkit.files import read_whole
from trainkit.planner.resume import spread, unreadable, written_by_rank
from trainkit.runner.rundir.layout import MANIFEST
from trainkit.seeds import derived_seed
from trainkit.text import join_names
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
from trainkit.trainer.randomness import restore_generator_states, seed_generators
from trainkit.trainer.settings import World
from trainkit.trainer.setup import Parts

log = logging.getLogger("trainkit.trainer")


def resume(parts: Parts, *, restarted: bool) -> int:
    """Load the checkpoint that this run starts from, if any, and return the number of finished steps."""
    # After an elastic restart it is this run's own newest checkpoint, if it has one; else the plan's.
    folder, root = parts.settings.resume, parts.checkpoints.root
    if restarted and root is not None:
        # One rank looks for all: nodes may see different states of a shared folder.
        folder = gather_from_ranks(newest(root), parts.world)[0] or folder
    if folder is None:
        return 0
    manifest = load(folder, parts.checkpoints.identity, parts.strategy, parts.world)
    parts.best.restore(manifest.get("best", {}))
    step, steps = int(manifest["step"]), parts.steps
    if parts.world.rank == 0:
        parts.checkpoints.reporters = going_on(folder, manifest, parts.checkpoints.identity)
    _resume_stream(parts, manifest.get("stream", ""), step, (folder / MANIFEST).stat().st_mtime)
    saved_by = spread(manifest["strategy"], manifest["world_size"])
    log.info("resumed from %s after step %d, saved by %s", folder, step, saved_by)
    if step >= steps > 0:
        log.warning("nothing is left to train: the run has %d steps, and the checkpoint is of step %d", steps, step)
    return step


def going_on(folder: Path, manifest: Mapping[str, Any], identity: Identity) -> dict[str, str]:
    """The runs of trackers in which this one goes on: those of its checkpoint, unless it is a branch of it.

    It is one if it trains otherwise, or if a run that wrote there has saved a later step: of that folder's runs, and of
    those beside it that have the same ids.
    """
    known: dict[str, str] = manifest.get("reporters", {})
    if not known or manifest["training_digest"] != identity.training_digest:
        return {}
    later = set[str]()
    beside = folder.absolute().parent
    in_runs = beside.name == "checkpoints"
    where, which = (beside.parent.parent, "*/checkpoints/") if in_runs else (beside, "")
    for path in where.glob(f"{which}step-*/{MANIFEST}"):
        try:
            other = read_manifest(path.parent) if path.parent.name > folder.name else {}
        except TrainingError:  # being removed, or damaged
            continue
        later |= {name for name, each in other.get("reporters", {}).items() if each == known.get(name)}
    for name in sorted(later & {*known}):
        log.info("metrics: %s: a run of its own, for run %s has gone on from %s", name, known[name], folder.name)
    return {name: each for name, each in known.items() if name not in later}


def _resume_stream(parts: Parts, loader_state: str, step: int, saved: float) -> None:
    """Start a stream near the first sample after a step. TrainingError if its loader_state is damaged.

    saved: when the checkpoint was written, in seconds since the epoch.
    """
    stream = parts.source.stream
    if stream is None:
        return
    if loader_state and stream.go_on(loader_state, step * parts.settings.batch.global_):
        newer = stream.written_after(saved) if parts.world.rank == 0 else ()
        if newer:
            which, were = join_names([str(path) for path in newer]), "were" if len(newer) > 1 else "was"
            why = "head, middle and end are unchanged, and nothing else was compared: other rows are other samples"
            log.warning("%s %s written after the checkpoint: %s", which, were, why)
        return
    if parts.world.rank == 0:
        why = "belongs to other data, or to another batch" if loader_state else "has no position in streamed data"
        log.warning("the checkpoint %s: the samples of the first %d steps are read again first", why, step)


def load(folder: Path, identity: Identity, strategy: Strategy, world: World) -> dict[str, Any]:
    """Restore a checkpoint and return its manifest. TrainingError names what does not match or is damaged."""
    manifest = read_manifest(folder)
    writer, by_rank = (manifest["strategy"], manifest["world_size"]), written_by_rank(manifest["files"])
    obstacle = unreadable(*writer, identity.strategy, identity.world_size, by_rank=by_rank)
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
    # torch and DeepSpeed raise any exception for files that they did not write
    except (Exception, CheckpointException) as error:
        if isinstance(underlying(error), UnpicklingError):
            raise TrainingError(
                f"the checkpoint {folder} is refused, because it holds more than plain data: {reason(error)}",
                hint="use one that trainkit has written, with an optimizer whose state is tensors and numbers",
            ) from error
        raise TrainingError(
            f"the checkpoint {folder} belongs to another model, optimizer or precision: {reason(error)}",
            hint="resume with the settings that saved it",
        ) from error
    if manifest["world_size"] != world.size:
        # These ranks have no saved states; they must not reuse those of step 0 either.
        seed_generators(derived_seed(torch.initial_seed(), "resumed", manifest["step"], world.rank))
    # Only a checkpoint given by its path can have other settings: `auto` looks for the same ones.
    if world.rank == 0 and manifest["training_digest"] != identity.training_digest:
        log.warning("%s was saved with other training settings; training continues with this run's", folder)
    rows, own = (manifest.get("data") or {}).get("content"), identity.data.get("content")
    if world.rank == 0 and rows and own and rows != own:
        log.warning("%s was saved with other rows or another way to cut them: its steps saw other samples", folder)
    if world.rank == 0 and manifest.get("tokenizer", identity.tokenizer) != identity.tokenizer:
        log.warning("%s was saved with another tokenizer, so its weights expect other token ids", folder)
    return manifest
