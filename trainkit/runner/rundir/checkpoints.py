"""Complete checkpoints that earlier runs left: those of a name, or the one at a path."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainkit.planner.resume import SavedCheckpoint
from trainkit.runner.rundir.layout import CHECKPOINT_PREFIX, MANIFEST, RunLayout


def saved_checkpoints(output_root: str, name: str) -> list[SavedCheckpoint]:
    """Every complete checkpoint under <output_root>/<name>: newest run first, within a run latest step first."""
    parent = Path(output_root).absolute() / name
    found: list[SavedCheckpoint] = []
    for run in sorted(_folders(parent), reverse=True):
        found += checkpoints_of(RunLayout(run))
    return found


def checkpoints_of(layout: RunLayout) -> list[SavedCheckpoint]:
    """The complete checkpoints of one run, latest step first."""
    inside = [saved for folder in _folders(layout.checkpoints) if (saved := _read(folder, layout.id)) is not None]
    return sorted(inside, key=lambda saved: saved.step, reverse=True)


def named_checkpoint(path: str) -> list[SavedCheckpoint]:
    """The complete checkpoint at a path, or none."""
    folder = Path(path).absolute()
    saved = _read(folder, folder.parent.parent.name)
    return [] if saved is None else [replace(saved, path=path)]


def _folders(parent: Path) -> list[Path]:
    try:
        return [path for path in parent.iterdir() if path.is_dir() and not path.name.startswith(".")]
    except OSError:
        return []


def _read(folder: Path, run: str) -> SavedCheckpoint | None:
    """None for what is no complete checkpoint: the manifest is written last, and says which files there must be."""
    if not folder.name.startswith(CHECKPOINT_PREFIX):
        return None
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if not _is_whole(folder, manifest["files"]):
            return None
        return SavedCheckpoint(
            path=str(folder),
            step=int(manifest["step"]),
            training_digest=str(manifest["training_digest"]),
            run=run,
            strategy=str(manifest["strategy"]),
            world_size=int(manifest["world_size"]),
            best_step=_best_step(manifest.get("best", {})),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _best_step(best: Mapping[str, Any]) -> int | None:
    return int(best["step"]) if best.get("loss") is not None else None


def _is_whole(folder: Path, files: Mapping[str, Any]) -> bool:
    """Whether every listed file has its size. Who loads the checkpoint compares the checksums: that takes a while."""
    return all((folder / name).stat().st_size == facts["size"] for name, facts in files.items())
