"""Complete checkpoints that earlier runs left, of the built-in trainer and of scripts on transformers' Trainer."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainkit.files import LARGEST, parse_json, read_json, read_whole
from trainkit.planner.resume import FOLDER, SavedCheckpoint
from trainkit.runner.rundir.layout import MANIFEST, RunLayout, subfolders

TRAINER_FOLDER = re.compile(r"^checkpoint-(\d+)$")
TRAINER_STATE = "trainer_state.json"  # rank 0 writes it after weights and optimizer
# Optimizer state as Trainer, FSDP and DeepSpeed write it; without it (save_only_model) a run cannot be resumed.
TRAINER_OPTIMIZER = ("optimizer.pt", "optimizer.bin", "optimizer_0", "global_step{step}")


def saved_checkpoints(output_root: str, name: str, *, damaged: bool = False) -> list[SavedCheckpoint]:
    """The built-in trainer's under <output_root>/<name>: newest run first, within a run latest step first.

    damaged: those too whose files are not what the manifest says.
    """
    return [saved for run in _newest_first(output_root, name) for saved in checkpoints_of(run, damaged=damaged)]


def trainer_checkpoints(output_root: str, name: str, *, damaged: bool = False) -> list[SavedCheckpoint]:
    """Trainer's under <output_root>/<name>/<run>/output: newest run first, within a run latest step first.

    damaged: Trainer's folders do not say what belongs to them; one that lacks something is one that was not finished.
    """
    return [saved for run in _newest_first(output_root, name) for saved in _of_trainer(run)]


def _newest_first(output_root: str, name: str) -> list[RunLayout]:
    return [RunLayout(path) for path in sorted(subfolders(Path(output_root).absolute() / name), reverse=True)]


def checkpoints_of(layout: RunLayout, *, damaged: bool = False) -> list[SavedCheckpoint]:
    """The checkpoints of one run, latest step first."""
    inside = [saved for folder in subfolders(layout.checkpoints) for saved in _read(folder, layout.id)]
    kept = [saved for saved in inside if damaged or not saved.damage]
    return sorted(kept, key=lambda saved: saved.step, reverse=True)


def own_checkpoints(layout: RunLayout, program: str) -> list[SavedCheckpoint]:
    """Those that a run of a kind of program has left so far, latest step first; damaged ones among them."""
    return _of_trainer(layout) if program == "hf" else checkpoints_of(layout, damaged=True)


def named_checkpoint(path: str, *, damaged: bool = False) -> list[SavedCheckpoint]:
    """The checkpoint at a path, or none."""
    folder = Path(path).absolute()
    found = [replace(saved, path=path) for saved in _read(folder, folder.parent.parent.name)]
    return [saved for saved in found if damaged or not saved.damage]


def checksum(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of a manifest's own entries, which it holds as `checksum` (none of releases before it was introduced)."""
    content = {name: value for name, value in manifest.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _read(folder: Path, run: str) -> list[SavedCheckpoint]:
    """The checkpoint of a folder with the name of one: the folder gets it once all files are in it."""
    name = FOLDER.match(folder.name)
    if name is None or not folder.is_dir():
        return []
    damaged = SavedCheckpoint(str(folder), int(name[1]), "", run)
    try:
        manifest = parse_json(read_whole(folder / MANIFEST))
        if manifest.get("checksum", checksum(manifest)) != checksum(manifest):
            return [replace(damaged, damage=f"{MANIFEST} is not as it was written")]
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
        return [replace(saved, damage=_damage(folder, manifest["files"]))]
    except FileNotFoundError:
        return [replace(damaged, damage=f"it has no {MANIFEST}")]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):  # torn, or of another program
        return [replace(damaged, damage=f"{MANIFEST} cannot be read")]


def _damage(folder: Path, files: Mapping[str, Any]) -> str:
    """The first file that is missing or cut. Sizes only: whoever loads it compares checksums, which takes a while."""
    for name, facts in files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if size != facts["size"]:
            return f"{name} has {size} of {facts['size']} bytes"
    return ""


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
    return written and read_json(folder / TRAINER_STATE, LARGEST).get("global_step") == step
