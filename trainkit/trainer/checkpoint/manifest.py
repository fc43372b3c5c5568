"""The manifest of a checkpoint: whose it is, and size and checksum of every file.

A folder without one is no checkpoint. The files beside it are the strategy's own, and `generators-<rank>.pickle`, the
states of each rank's generators.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit.errors import TrainingError
from trainkit.runner.rundir.checkpoints import checksum
from trainkit.runner.rundir.layout import MANIFEST
from trainkit.trainer.distributed import gather_from_ranks
from trainkit.trainer.settings import World

CONTENT = ("step", "training_digest", "world_size", "strategy", "files")


@dataclass(frozen=True, slots=True)
class Identity:
    """The run that saved a checkpoint."""

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
    """The manifest of a complete checkpoint. TrainingError for any other folder."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise TrainingError(
            f"{folder} is not a complete checkpoint: its {MANIFEST} cannot be read ({error})"
        ) from error
    if not isinstance(manifest, dict):
        raise TrainingError(f"{folder} is no checkpoint of trainkit's: its {MANIFEST} is no JSON object")
    if manifest.get("checksum", checksum(manifest)) != checksum(manifest):
        what = f"the checkpoint {folder} is damaged: its {MANIFEST} is not as it was written"
        raise TrainingError(what, hint="take an older checkpoint")
    missing = [name for name in CONTENT if name not in manifest]
    if missing:
        raise TrainingError(f"{folder} is no checkpoint of trainkit's: its {MANIFEST} lacks {', '.join(missing)}")
    return manifest


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
            # It lets go of the interpreter's lock, so that the training goes on beside a thread that saves.
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
