"""Whether the run root can be written to, and has room; and whether what is offloaded to NVMe has a folder."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from trainkit.doctor.surroundings import Aim, Surroundings
from trainkit.doctor.units import GIB, MIB, in_words
from trainkit.doctor.verdict import Verdict, ok

TITLE = "disk space"
LIMIT = 3.0
FAST = True

# A run directory with logs and plan takes about a megabyte; what a checkpoint takes is not known before the model is.
LEAST, LITTLE = 4 * MIB, 10 * GIB
FEWEST_FILES = 100


def needs(aim: Aim) -> str:
    """Every run writes."""
    return ""


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there already and can be looked at."""
    return next(path for path in (folder, *folder.parents) if os.path.exists(path))  # noqa: PTH110 - False, no error


def usable(folder: Path) -> bool:
    """Whether files can be made in the folder."""
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def run(surroundings: Surroundings, aim: Aim) -> list[Verdict]:
    """The run root, and the plan's folder for what is offloaded where that cannot be used."""
    return [*_swap_folder(surroundings, aim), *_run_root(surroundings, aim)]


def _swap_folder(surroundings: Surroundings, aim: Aim) -> list[Verdict]:
    path = getattr(aim.recipe.strategy, "nvme_path", None) if aim.recipe else None
    folder = existing(surroundings.folder / path) if path else None
    if folder is None or usable(folder):
        return []
    fix = ("trainkit run RECIPE strategy.nvme_path=/a/fast/folder", _whose(folder))
    return [Verdict("problem", f"{folder} cannot be written to", (f"strategy.nvme_path {path}",), fix)]


def _whose(folder: Path) -> str:
    return f"ls -ld {shlex.quote(str(folder))}      # whose it is"


def _run_root(surroundings: Surroundings, aim: Aim) -> list[Verdict]:
    """Not to be written to, full, nearly full, or fine."""
    root = surroundings.folder / aim.output_root
    folder = existing(root)
    space = surroundings.space(folder)
    evidence = (f"run root {root}", f"{in_words(space.free)} of {in_words(space.total)} free")
    elsewhere = "trainkit run RECIPE output.root=/a/folder/with/room"
    if not usable(folder):
        return [Verdict("problem", f"{folder} cannot be written to", evidence, (elsewhere, _whose(folder)))]
    tidy = "trainkit runs prune --keep 3      # removes older runs of each name"
    if space.free < LEAST:
        return [Verdict("problem", "almost no room for runs", evidence, (tidy, elsewhere))]
    if space.files is not None and space.files < FEWEST_FILES:
        full = (f"{space.files} more files can be made there",)
        return [Verdict("problem", "the file system has no room for more files", evidence + full, (tidy, elsewhere))]
    if space.free < LITTLE:
        return [Verdict("warning", "little room for checkpoints", evidence, (tidy, elsewhere))]
    return [ok(f"{in_words(space.free)} free at the run root", str(root))]
