"""Complete checkpoints that earlier runs left, of the built-in trainer and of scripts on transformers' Trainer."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

from trainkit.files import read_json
from trainkit.planner.resume import SavedCheckpoint
from trainkit.runner.rundir.layout import CHECKPOINT_PREFIX, MANIFEST, RunLayout, subfolders

TRAINER_FOLDER = re.compile(r"^checkpoint-(\d+)$")
TRAINER_STATE = "trainer_state.json"  # rank 0 writes it after weights and optimizer
# Optimizer state as Trainer, FSDP and DeepSpeed write it; without it (save_only_model) a run cannot be resumed.
TRAINER_OPTIMIZER = ("optimizer.pt", "optimizer.bin", "optimizer_0", "global_step{step}")


def saved_checkpoints(output_root: str, name: str) -> list[SavedCheckpoint]:
    """The built-in trainer's under <output_root>/<name>: newest run first, within a run latest step first."""
    return [saved for run in _newest_first(output_root, name) for saved in checkpoints_of(run)]


def trainer_checkpoints(output_root: str, name: str) -> list[SavedCheckpoint]:
    """Trainer's under <output_root>/<name>/<run>/output: newest run first, within a run latest step first."""
    return [saved for run in _newest_first(output_root, name) for saved in _of_trainer(run)]


def _newest_first(output_root: str, name: str) -> list[RunLayout]:
    return [RunLayout(path) for path in sorted(subfolders(Path(output_root).absolute() / name), reverse=True)]


def checkpoints_of(layout: RunLayout) -> list[SavedCheckpoint]:
    """The complete checkpoints of one run, latest step first."""
    inside = [saved for folder in subfolders(layout.checkpoints) for saved in _read(folder, layout.id)]
    return sorted(inside, key=lambda saved: saved.step, reverse=True)


def named_checkpoint(path: str) -> list[SavedCheckpoint]:
    """The complete checkpoint at a path, or none."""
    folder = Path(path).absolute()
    return [replace(saved, path=path) for saved in _read(folder, folder.parent.parent.name)]


def _read(folder: Path, run: str) -> list[SavedCheckpoint]:
    """None of it where it is incomplete: the manifest is written last, and lists all files with their sizes."""
    if not folder.name.startswith(CHECKPOINT_PREFIX):
        return []
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        # Sizes only: whoever loads the checkpoint compares the checksums, which takes a while.
        if any((folder / name).stat().st_size != facts["size"] for name, facts in manifest["files"].items()):
            return []
        best = manifest.get("best", {})
        saved = SavedCheckpoint(
            path=str(folder),
            step=int(manifest["step"]),
            training_digest=str(manifest["training_digest"]),
            run=run,
            strategy=str(manifest["strategy"]),
            world_size=int(manifest["world_size"]),
            best_step=int(best["step"]) if best.get("loss") is not None else None,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # torn, or of another program
        return []
    return [saved]


def _of_trainer(layout: RunLayout) -> list[SavedCheckpoint]:
    plan = read_json(layout.plan)
    try:
        ranks = sum(group["count"] * group["processes"] for group in plan["topology"]["groups"])
        digest, strategy = str(plan["training_digest"]), str(plan["strategy"]["kind"])
    except (KeyError, TypeError):
        return []  # not a run directory
    found = {
        int(match[1]): path
        for path in (layout.root / "output").glob("checkpoint-*")
        if (match := TRAINER_FOLDER.match(path.name)) and _is_whole(path, int(match[1]), ranks)
    }
    return [
        SavedCheckpoint(str(path), step, digest, layout.id, strategy, ranks)
        for step, path in sorted(found.items(), reverse=True)
    ]


def _is_whole(folder: Path, step: int, ranks: int) -> bool:
    """Whether every rank has written its part; the state of the generators is the last that a rank writes."""
    generators = ["rng_state.pth"] if ranks == 1 else [f"rng_state_{rank}.pth" for rank in range(ranks)]
    has_optimizer = any((folder / name.format(step=step)).exists() for name in TRAINER_OPTIMIZER)
    written = has_optimizer and all((folder / name).exists() for name in generators)
    return written and read_json(folder / TRAINER_STATE).get("global_step") == step
