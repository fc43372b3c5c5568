"""The manifest of a checkpoint: the run it belongs to, and the size and checksum of every file.

A folder without one is not a checkpoint. The other files are the strategy's own, and `generators-<rank>.json`, the
states of each rank's generators.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainkit.errors import TrainingError
from trainkit.files import parse_json, read_whole
from trainkit.recipe.schema import HfModel, Recipe
from trainkit.runner.rundir.layout import MANIFEST
from trainkit.runner.rundir.listing import checksum
from trainkit.trainer.distributed import gather_from_ranks
from trainkit.trainer.settings import World

CONTENT = {"step": int, "training_digest": str, "world_size": int, "strategy": str, "files": dict}
MOST_STEPS = 10**12  # and ranks


@dataclass(frozen=True, slots=True)
class Identity:
    """The run that saved a checkpoint."""

    strategy: str
    world_size: int
    training_digest: str
    tokenizer: str = ""  # fingerprint of the tokenizer; the digest covers only its folder's name
    base: str = ""  # fingerprint of the base model, if only adapters are saved; empty without adapters
    # What the data decided: `content` of the prepared rows, `sequence_length`, `target_length`, names of `labels`.
    data: Mapping[str, Any] = field(default_factory=dict)


def as_decided(recipe: Recipe, manifest: Mapping[str, Any]) -> Recipe:
    """The recipe of a checkpoint with what it had left to the data: lengths, and the labels of a classifier's head."""
    known, data, model = manifest.get("data") or {}, recipe.data, recipe.model
    lengths = {
        name: known[name]
        for name in ("sequence_length", "target_length")
        if getattr(data, name, None) == "auto" and isinstance(known.get(name), int)
    }
    if isinstance(model, HfModel) and isinstance(known.get("num_labels"), int) and "num_labels" not in model.config:
        model = model.model_copy(update={"config": {**model.config, "num_labels": known["num_labels"]}})
    return recipe.model_copy(update={"data": data.model_copy(update=lengths), "model": model})


def complete(root: Path) -> list[Path]:
    """The complete checkpoints under a folder, oldest first: a checkpoint is complete if it has a manifest."""
    return sorted(path.parent for path in root.glob(f"step-*/{MANIFEST}"))


def newest(root: Path) -> Path | None:
    return next(reversed(complete(root)), None)


def generators_file(folder: Path, rank: int) -> Path:
    """The file with the states of a rank's generators; older releases pickled them."""
    old = folder / f"generators-{rank}.pickle"
    return old if old.exists() else old.with_suffix(".json")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a complete checkpoint. TrainingError for any other folder."""
    try:
        manifest: dict[str, Any] = parse_json(read_whole(folder / MANIFEST))
    except (OSError, ValueError) as error:
        raise TrainingError(
            f"{folder} is not a complete checkpoint: its {MANIFEST} cannot be read ({error})"
        ) from error
    if not isinstance(manifest, dict):
        raise TrainingError(f"{folder} is not a checkpoint of trainkit: its {MANIFEST} is not a JSON object")
    if manifest.get("checksum", checksum(manifest)) != checksum(manifest):
        what = f"the checkpoint {folder} is damaged: its {MANIFEST} was changed after it was written"
        raise TrainingError(what, hint="use an older checkpoint")
    wrong = [name for name, kind in CONTENT.items() if type(manifest.get(name)) is not kind]
    wrong += [name for name in ("step", "world_size") if name not in wrong and not 0 <= manifest[name] < MOST_STEPS]
    if not isinstance(manifest.get("best", {}), dict):
        wrong.append("best")
    if not isinstance(manifest.get("stream", ""), str):
        wrong.append("stream")
    reporters = manifest.get("reporters", {})
    if not isinstance(reporters, dict) or not {str}.issuperset(map(type, reporters.values())):
        wrong.append("reporters")
    if wrong:
        what = f"{folder} is not a checkpoint of trainkit: its {MANIFEST} lacks {', '.join(wrong)}"
        raise TrainingError(what, hint="name a checkpoint of a run: `<run>/checkpoints/step-<8 digits>`")
    return manifest


def refuse_other_base(folder: Path, manifest: Mapping[str, Any], base: str) -> None:
    """TrainingError if a checkpoint holds only adapters, and their base model has another fingerprint."""
    saved = manifest.get("base", "")
    if saved and saved != base:
        model = "this run's base model is another one" if base else "this run has none (peft.kind: none)"
        raise TrainingError(
            f"the checkpoint {folder} holds adapters without their base model: {model}",
            hint="name the same base model, unchanged, with the same peft settings",
        )


def refuse_damaged(folder: Path, manifest: Mapping[str, Any], world: World) -> None:
    """TrainingError that names every file with a size or checksum other than the manifest's, and every non-file."""
    # Only files and folders: a pipe may never end, and a link may lead elsewhere.
    if odd := [each for each in folder.rglob("*") if each.is_symlink() or not (each.is_file() or each.is_dir())]:
        names = ", ".join(str(each.relative_to(folder)) for each in odd)
        raise TrainingError(
            f"the checkpoint {folder} is not read: {names} is a link, or neither a file nor a folder",
            hint="use one that trainkit has written; copy one that consists of links (in the Hub's cache) with cp -rL",
        )
    named = manifest["files"]
    present = [folder / name for name, facts in named.items() if _has_size(folder, name, facts)]
    actual = described_files(folder, world, present)
    damaged = [name for name, facts in named.items() if actual.get(name) != facts]
    if damaged:
        raise TrainingError(
            f"the checkpoint {folder} is damaged: {', '.join(damaged)} does not match its manifest",
            hint="use an older checkpoint",
        )


def _has_size(folder: Path, name: str, facts: object) -> bool:
    """Whether a file exists inside the folder with the manifest's size: only then is its checksum worth the time."""
    inside = ".." not in Path(name).parts and not Path(name).is_absolute() and "\0" not in name
    if not (inside and isinstance(facts, dict) and (folder / name).is_file()):
        return False
    return (folder / name).stat().st_size == facts.get("size")


def described_files(
    folder: Path, world: World, chosen: Iterable[Path] | None = None, *, flushed: bool = False
) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of every file; the ranks share the reading. chosen: only of these.

    flushed: first wait until the disk has their contents.
    """
    every = (path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    paths = sorted(every if chosen is None else chosen)
    mine = {}
    for path in paths[world.rank :: world.size]:
        if flushed:
            flush(path)
        with path.open("rb") as file:
            # Hashing releases the interpreter's lock, so that training continues beside a saving thread.
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        mine[str(path.relative_to(folder))] = {"size": path.stat().st_size, "sha256": digest}
    shares: list[dict[str, dict[str, Any]]] = gather_from_ranks(mine, world)
    return dict(sorted((name, facts) for share in shares for name, facts in share.items()))


def flush(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def underlying(error: BaseException) -> BaseException:
    """The cause; torch wraps the error of the first rank that failed."""
    failures = getattr(error, "failures", None)
    cause: BaseException = next(iter(failures.values()))[0] if failures else error
    return cause


def reason(error: BaseException) -> str:
    """The cause in one line."""
    cause = underlying(error)
    return " ".join(str(cause).split()) or type(cause).__name__
