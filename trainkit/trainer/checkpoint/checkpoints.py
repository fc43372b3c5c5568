"""Checkpoints: written aside, checksummed, published whole by one rename; verified before they are read."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from trainkit.errors import TrainingError
from trainkit.planner.resume import spread, unreadable
from trainkit.trainer.distributed import barrier, gather_from_ranks
from trainkit.trainer.metrics.evaluation import Best
from trainkit.trainer.parallel import Strategy
from trainkit.trainer.randomness import derived_seed, generator_states, restore_generator_states, seed_generators
from trainkit.trainer.settings import World

log = logging.getLogger("trainkit.trainer")
MANIFEST = "manifest.json"
CONTENT = ("step", "training_digest", "world_size", "strategy", "files")
_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class Identity:
    """What a checkpoint says of the run that saved it."""

    strategy: str
    world_size: int
    training_digest: str
    tokenizer: str = ""  # fingerprint of how text was cut; the digest knows only the folder's name


def step_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of a step stands."""
    return root / f"step-{step:08d}"


def newest(root: Path) -> Path | None:
    """The newest complete checkpoint under a folder: the manifest is what makes one complete."""
    complete = sorted(path.parent for path in root.glob(f"step-*/{MANIFEST}"))
    return complete[-1] if complete else None


def save(
    root: Path,
    step: int,
    identity: Identity,
    strategy: Strategy,
    world: World,
    *,
    keep: int,
    spared: int | None = None,
    best: Best | None = None,
) -> None:
    """Write and publish the checkpoint of a step, as :func:`write` does."""
    generators = pickle.dumps(generator_states())
    write(root, manifest(step, identity, best), strategy.save, generators, world, keep=keep, spared=spared)


def manifest(step: int, identity: Identity, best: Best | None) -> dict[str, Any]:
    """What a checkpoint says of itself, but for its files."""
    return {
        "step": step,
        "training_digest": identity.training_digest,
        "tokenizer": identity.tokenizer,
        "world_size": identity.world_size,
        "strategy": identity.strategy,
        "best": best.as_data() if best else {},
    }


def write(
    root: Path,
    content: Mapping[str, Any],
    put: Callable[[Path], None],
    generators: bytes,
    world: World,
    *,
    keep: int,
    spared: int | None,
) -> None:
    """Write and publish a checkpoint. Called on every rank; does nothing if it already stands.

    content: its manifest. put: writes this rank's state into a folder. generators: the pickled states of this rank's.
    keep: how many of the newest stay, 0 for all. spared: the step of one that stays besides.

    TrainingError when it cannot be written; what was saved before stays as it is.
    """
    step = content["step"]
    final, scratch = step_folder(root, step), root / f".tmp-step-{step:08d}"
    if any(gather_from_ranks((final / MANIFEST).exists(), world)):
        return
    try:
        if world.rank == 0:
            _make_room(root, scratch)
        barrier(world)
        put(scratch)
        _generators(scratch, world.rank).write_bytes(generators)
        barrier(world)
        files = _flushed(scratch, world)
        if world.rank == 0:
            _publish(scratch, final, {**content, "files": files})
            _prune(root, keep, spared)
        barrier(world)
    except (OSError, RuntimeError, CheckpointException) as error:  # torch's writers raise RuntimeError on a full disk
        free = shutil.disk_usage(root).free / 2**20 if root.exists() else 0
        shutil.rmtree(scratch, ignore_errors=True)
        raise TrainingError(
            f"the checkpoint of step {step} cannot be written to {root} ({free:.0f} MiB free): {_reason(error)}",
            hint="those saved before are whole; make room, or point output.root at another disk",
        ) from error


def _make_room(root: Path, scratch: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for leftover in root.glob(".tmp-*"):  # of an attempt that was killed while it wrote
        shutil.rmtree(leftover)
    scratch.mkdir()


def _reason(error: BaseException) -> str:
    """The cause in one line; torch wraps that of the first rank that failed."""
    failures = getattr(error, "failures", None)
    cause = next(iter(failures.values()))[0] if failures else error
    return " ".join(str(cause).split()) or type(cause).__name__


def _generators(folder: Path, rank: int) -> Path:
    return folder / f"generators-{rank}.pickle"


def _flushed(folder: Path, world: World) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of every file, once all of them are safe from a power cut."""
    if world.rank == 0:
        elsewhere = [rank for rank in range(world.size) if not _generators(folder, rank).exists()]
        if elsewhere:
            raise TrainingError(
                f"{folder} is not one folder for all ranks: what {', '.join(map(str, elsewhere))} wrote is not there",
                hint="set output.root to a folder that all nodes share",
            )
    files = _described_files(folder, world, flush=True)
    if world.rank == 0:
        for inner in [path for path in folder.rglob("*") if path.is_dir()]:
            _flush(inner)
    return files


def _described_files(folder: Path, world: World, *, flush: bool = False) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of every file; the ranks share the reading."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    mine = {}
    for path in paths[world.rank :: world.size]:
        if flush:
            _flush(path)
        mine[str(path.relative_to(folder))] = {"size": path.stat().st_size, "sha256": _sha256(path)}
    shares: list[dict[str, dict[str, Any]]] = gather_from_ranks(mine, world)
    return dict(sorted((name, facts) for share in shares for name, facts in share.items()))


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _flush(path: Path) -> None:
    """Wait until the disk has a file's content, or a folder's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _publish(scratch: Path, final: Path, manifest: Mapping[str, Any]) -> None:
    (scratch / MANIFEST).write_text(json.dumps(manifest, indent=1))
    _flush(scratch / MANIFEST)
    _flush(scratch)
    if final.exists():  # a folder without a manifest: not a checkpoint
        shutil.rmtree(final)
    scratch.rename(final)
    _flush(final.parent)  # only now may an older one go


def _prune(root: Path, keep: int, spared: int | None) -> None:
    complete = sorted(path.parent for path in root.glob(f"step-*/{MANIFEST}"))
    stays = step_folder(root, spared) if spared is not None else None
    for path in [path for path in complete[:-keep] if path != stays] if keep else []:
        doomed = path.rename(path.with_name(f".tmp-old-{path.name}"))  # never half a checkpoint under its own name
        shutil.rmtree(doomed)


def load(folder: Path, identity: Identity, strategy: Strategy, world: World, best: Best | None = None) -> int:
    """Restore a checkpoint and return its step. TrainingError names what does not fit or is damaged.

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
    except (RuntimeError, ValueError, KeyError, CheckpointException) as error:
        raise TrainingError(
            f"the checkpoint {folder} is of another model, optimizer or precision: {_reason(error)}",
            hint="resume with the settings that saved it",
        ) from error
    _restore_generators(folder, manifest, world)
    if manifest["training_digest"] != identity.training_digest and world.rank == 0:
        log.warning("%s was saved under other training settings; training goes on with this run's", folder)
    if manifest.get("tokenizer", identity.tokenizer) != identity.tokenizer and world.rank == 0:
        log.warning("%s was saved with another tokenizer: its weights know other token ids", folder)
    if best:
        best.restore(manifest.get("best", {}))
    return int(manifest["step"])


def refuse_damaged(folder: Path, manifest: Mapping[str, Any], world: World) -> None:
    """TrainingError that names every file whose size or checksum is not the manifest's."""
    actual = _described_files(folder, world)
    damaged = [name for name, facts in manifest["files"].items() if actual.get(name) != facts]
    if damaged:
        raise TrainingError(
            f"the checkpoint {folder} is damaged: {', '.join(damaged)} is not what its manifest says",
            hint="take an older checkpoint",
        )


def _restore_generators(folder: Path, manifest: Mapping[str, Any], world: World) -> None:
    if manifest["world_size"] == world.size:
        # Checksums were compared just now, and the file is trainkit's own.
        restore_generator_states(pickle.loads(_generators(folder, world.rank).read_bytes()))  # noqa: S301
    else:  # these ranks have no states to go on from; neither do they start over with those of step 0
        seed_generators(derived_seed(torch.initial_seed(), "resumed", manifest["step"], world.rank))


def saved_by(folder: Path) -> str:
    """`saved by ddp on 2 ranks`."""
    manifest = read_manifest(folder)
    return f"saved by {spread(manifest['strategy'], manifest['world_size'])}"


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
