"""Checkpoints found, verified against their manifest, and read."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from trainkit.errors import TrainingError
from trainkit.planner.resume import spread, unreadable
from trainkit.trainer.distributed import gather_from_ranks
from trainkit.trainer.parallel import Strategy
from trainkit.trainer.randomness import derived_seed, restore_generator_states, seed_generators
from trainkit.trainer.settings import World

log = logging.getLogger("trainkit.trainer")
MANIFEST = "manifest.json"
CONTENT = ("step", "training_digest", "world_size", "strategy", "files")


@dataclass(frozen=True, slots=True)
class Identity:
    """What a checkpoint says of the run that saved it."""

    strategy: str
    world_size: int
    training_digest: str
    tokenizer: str = ""  # fingerprint of how text was cut; the digest knows only the folder's name


def complete(root: Path) -> list[Path]:
    """The complete checkpoints under a folder, oldest first: the manifest is what makes one complete."""
    return sorted(path.parent for path in root.glob(f"step-*/{MANIFEST}"))


def newest(root: Path) -> Path | None:
    """The newest complete checkpoint under a folder."""
    return next(reversed(complete(root)), None)


def generators_file(folder: Path, rank: int) -> Path:
    """Where a checkpoint has the states of a rank's generators."""
    return folder / f"generators-{rank}.pickle"


def read_manifest(folder: Path) -> dict[str, Any]:
    """What a complete checkpoint says of itself."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise TrainingError(
            f"{folder} is not a complete checkpoint: its {MANIFEST} cannot be read ({error})"
        ) from error
    missing = [name for name in CONTENT if name not in manifest]
    if missing:
        raise TrainingError(f"{folder} is no checkpoint of trainkit's: its {MANIFEST} lacks {', '.join(missing)}")
    return manifest


def saved_by(manifest: Mapping[str, Any]) -> str:
    """`saved by ddp on 2 ranks`."""
    return f"saved by {spread(manifest['strategy'], manifest['world_size'])}"


def load(folder: Path, identity: Identity, strategy: Strategy, world: World) -> dict[str, Any]:
    """Restore a checkpoint and return its manifest. TrainingError names what does not fit or is damaged.

    Other training settings are taken with a warning: only who names a checkpoint by its path meets them.
    """
    manifest = read_manifest(folder)
    obstacle = unreadable(manifest["strategy"], manifest["world_size"], identity.strategy, identity.world_size)
    if obstacle:
        raise TrainingError(
            f"the checkpoint {folder} cannot be resumed from: {obstacle}",
            hint="resume with the strategy and the number of ranks that saved it",
        )
    refuse_damaged(folder, manifest, world)
    try:
        strategy.load(folder)
        if manifest["world_size"] == world.size:
            restore_generator_states(generators_file(folder, world.rank).read_bytes())
    except (RuntimeError, ValueError, KeyError, CheckpointException) as error:
        raise TrainingError(
            f"the checkpoint {folder} is of another model, optimizer or precision: {reason(error)}",
            hint="resume with the settings that saved it",
        ) from error
    except UnpicklingError as error:
        raise TrainingError(
            f"the checkpoint {folder} holds more than data, and is not read: {reason(error)}",
            hint="take a checkpoint that trainkit has written, with an optimizer whose state is tensors and numbers",
        ) from error
    if manifest["world_size"] != world.size:
        # These ranks have no states to go on from; neither do they start over with those of step 0.
        seed_generators(derived_seed(torch.initial_seed(), "resumed", manifest["step"], world.rank))
    if world.rank == 0:
        _warn(folder, manifest, identity)
    return manifest


def _warn(folder: Path, manifest: Mapping[str, Any], identity: Identity) -> None:
    if manifest["training_digest"] != identity.training_digest:
        log.warning("%s was saved under other training settings; training goes on with this run's", folder)
    if manifest.get("tokenizer", identity.tokenizer) != identity.tokenizer:
        log.warning("%s was saved with another tokenizer: its weights know other token ids", folder)


def refuse_damaged(folder: Path, manifest: Mapping[str, Any], world: World) -> None:
    """TrainingError that names every file whose size or checksum is not the manifest's."""
    actual = described_files(folder, world)
    damaged = [name for name, facts in manifest["files"].items() if actual.get(name) != facts]
    if damaged:
        raise TrainingError(
            f"the checkpoint {folder} is damaged: {', '.join(damaged)} is not what its manifest says",
            hint="take an older checkpoint",
        )


def described_files(folder: Path, world: World, *, flushed: bool = False) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of every file; the ranks share the reading. flushed: once the disk has their contents."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    mine = {}
    for path in paths[world.rank :: world.size]:
        if flushed:
            flush(path)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        mine[str(path.relative_to(folder))] = {"size": path.stat().st_size, "sha256": digest}
    shares: list[dict[str, dict[str, Any]]] = gather_from_ranks(mine, world)
    return dict(sorted((name, facts) for share in shares for name, facts in share.items()))


def flush(path: Path) -> None:
    """Wait until the disk has a file's content, or a folder's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reason(error: BaseException) -> str:
    """The cause in one line; torch wraps that of the first rank that failed."""
    failures = getattr(error, "failures", None)
    cause = next(iter(failures.values()))[0] if failures else error
    return " ".join(str(cause).split()) or type(cause).__name__
