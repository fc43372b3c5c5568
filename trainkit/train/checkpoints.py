"""Checkpoints: written aside, checksummed, published whole by one rename; verified before they are read."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit.errors import TrainingError
from trainkit.train.distributed import barrier, gather_from_ranks
from trainkit.train.randomness import generator_states, restore_generator_states
from trainkit.train.settings import World
from trainkit.train.strategies import Strategy

MANIFEST = "manifest.json"
_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class Identity:
    """What a checkpoint must share with the run that reads it."""

    strategy: str
    world_size: int
    training_digest: str


def step_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of a step stands."""
    return root / f"step-{step:08d}"


def newest(root: Path) -> Path | None:
    """The newest complete checkpoint under a folder: the manifest is what makes one complete."""
    complete = sorted(path.parent for path in root.glob(f"step-*/{MANIFEST}"))
    return complete[-1] if complete else None


def save(root: Path, step: int, identity: Identity, strategy: Strategy, world: World, *, keep: int) -> None:
    """Write and publish the checkpoint of a step. Called on every rank; does nothing if it already stands."""
    final, scratch = step_folder(root, step), root / f".tmp-step-{step:08d}"
    if any(gather_from_ranks((final / MANIFEST).exists(), world)):
        return
    if world.rank == 0:
        root.mkdir(parents=True, exist_ok=True)
        for leftover in root.glob(".tmp-*"):  # of an attempt that was killed while it wrote
            shutil.rmtree(leftover)
        scratch.mkdir()
    barrier(world)
    strategy.save(scratch)
    (scratch / f"generators-{world.rank}.pickle").write_bytes(pickle.dumps(generator_states()))
    barrier(world)
    files = _describe_files(scratch, world)
    if world.rank == 0:
        _publish(scratch, final, {"step": step, **_described(identity), "files": files})
        _prune(root, keep)
    barrier(world)


def _described(identity: Identity) -> dict[str, Any]:
    return {
        "training_digest": identity.training_digest,
        "world_size": identity.world_size,
        "strategy": identity.strategy,
    }


def _describe_files(folder: Path, world: World) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of every file; the ranks share the reading."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    mine = {
        str(path.relative_to(folder)): {"size": path.stat().st_size, "sha256": _sha256(path)}
        for path in paths[world.rank :: world.size]
    }
    shares: list[dict[str, dict[str, Any]]] = gather_from_ranks(mine, world)
    return dict(sorted((name, facts) for share in shares for name, facts in share.items()))


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
        os.fsync(file.fileno())  # what is published must survive a power cut
    return digest.hexdigest()


def _publish(scratch: Path, final: Path, manifest: Mapping[str, Any]) -> None:
    with (scratch / MANIFEST).open("w") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    if final.exists():  # a folder without a manifest: not a checkpoint
        shutil.rmtree(final)
    scratch.rename(final)


def _prune(root: Path, keep: int) -> None:
    complete = sorted(path.parent for path in root.glob(f"step-*/{MANIFEST}"))
    for path in complete[:-keep] if keep else []:
        doomed = path.rename(path.with_name(f".tmp-old-{path.name}"))  # never half a checkpoint under its own name
        shutil.rmtree(doomed)


def load(folder: Path, identity: Identity, strategy: Strategy, world: World) -> int:
    """Restore a checkpoint and return its step. TrainingError names what does not fit or is damaged."""
    manifest = read_manifest(folder)
    _check_identity(folder, manifest, identity)
    actual = _describe_files(folder, world)
    damaged = [name for name, facts in manifest["files"].items() if actual.get(name) != facts]
    if damaged:
        raise TrainingError(
            f"the checkpoint {folder} is damaged: {', '.join(damaged)} is not what its manifest says",
            hint="resume from an older checkpoint",
        )
    strategy.load(folder)
    # Checksums were compared just now, and the file is trainkit's own.
    restore_generator_states(pickle.loads((folder / f"generators-{world.rank}.pickle").read_bytes()))  # noqa: S301
    return int(manifest["step"])


def read_manifest(folder: Path) -> dict[str, Any]:
    """What a complete checkpoint says of itself."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise TrainingError(
            f"{folder} is not a complete checkpoint: its {MANIFEST} cannot be read ({error})"
        ) from error
    return manifest


def _check_identity(folder: Path, manifest: Mapping[str, Any], identity: Identity) -> None:
    found = Identity(manifest["strategy"], manifest["world_size"], manifest["training_digest"])
    if (found.strategy, found.world_size) != (identity.strategy, identity.world_size):
        raise TrainingError(
            f"the checkpoint {folder} was saved by {found.strategy} on {found.world_size} ranks, "
            f"and this run is {identity.strategy} on {identity.world_size}",
            hint="resume with the strategy and the number of ranks that saved it",
        )
