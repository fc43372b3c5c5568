"""The disk of the run root: room and speed, for a checkpoint stops training while it is written; the NVMe folder."""

from __future__ import annotations

import os
import shlex
import tempfile
import time
from pathlib import Path

from trainkit.doctor.check import Check, Finding, ok, skipped
from trainkit.doctor.host import Host, Target
from trainkit.text import GIB, MIB, format_size

BLOCK, MOST, SECONDS = 4 * MIB, 64 * MIB, 2.0
SLOW = 30 * MIB  # bytes a second: 10 GB of checkpoint would take more than 5 minutes
SPARE = 1024 * MIB  # a disk with less room than this is not filled further
# A run directory with logs and plan takes about a megabyte; what a checkpoint takes is not known before the model is.
LEAST, LITTLE = 4 * MIB, 10 * GIB
FEWEST_FILES = 100


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there already and can be looked at."""
    return next(path for path in (folder, *folder.parents) if os.path.exists(path))  # noqa: PTH110 - False, no error


def usable(folder: Path) -> bool:
    """Whether files can be made in the folder."""
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def disk_space(host: Host, target: Target) -> list[Finding]:
    """The run root, and the plan's folder for what is offloaded where that cannot be used."""
    found = _run_root(host, target)
    path = getattr(target.recipe.strategy, "nvme_path", None) if target.recipe else None
    folder = existing(host.folder / path) if path else None
    if folder is not None and not usable(folder):
        fix = ("trainkit run RECIPE strategy.nvme_path=/a/fast/folder", _whose(folder))
        found.insert(0, Finding("problem", f"{folder} cannot be written to", (f"strategy.nvme_path {path}",), fix))
    return found


def _whose(folder: Path) -> str:
    return f"ls -ld {shlex.quote(str(folder))}      # whose it is"


def _run_root(host: Host, target: Target) -> list[Finding]:
    """Not to be written to, full, nearly full, or fine."""
    root = host.folder / target.output_root
    folder = existing(root)
    space = host.space(folder)
    evidence = (f"run root {root}", f"{format_size(space.free)} of {format_size(space.total)} free")
    elsewhere = "trainkit run RECIPE output.root=/a/folder/with/room"
    if not usable(folder):
        return [Finding("problem", f"{folder} cannot be written to", evidence, (elsewhere, _whose(folder)))]
    tidy = "trainkit runs prune --keep 3      # removes older runs of each name"
    if space.free < LEAST:
        return [Finding("problem", "almost no room for runs", evidence, (tidy, elsewhere))]
    if space.files is not None and space.files < FEWEST_FILES:
        full = (f"{space.files} more files can be made there",)
        return [Finding("problem", "the file system has no room for more files", evidence + full, (tidy, elsewhere))]
    if space.free < LITTLE:
        return [Finding("warning", "little room for checkpoints", evidence, (tidy, elsewhere))]
    return [ok(f"{format_size(space.free)} free at the run root", str(root))]


def write_speed(host: Host, target: Target) -> list[Finding]:
    """Write, force to the disk and remove at most 64 MiB."""
    folder = existing(host.folder / target.output_root)
    if not usable(folder) or host.space(folder).free < SPARE:
        return [skipped(f"{folder} has no room for a trial")]
    size, seconds = measured(folder)
    evidence = f"{format_size(size)} written and synced in {seconds:.2f} s in {folder}"
    if size / seconds < SLOW:
        fix = "trainkit run RECIPE output.root=/a/local/disk      # or checkpoint.asynchronous=true"
        return [Finding("warning", f"slow: {format_size(int(size / seconds))}/s", (evidence,), (fix,))]
    return [ok(f"{format_size(int(size / seconds))}/s at the run root", evidence)]


def measured(folder: Path, seconds: float = SECONDS) -> tuple[int, float]:
    """Bytes written and seconds taken, about `seconds` at most. The file has no name, so nothing can stay behind."""
    block = os.urandom(BLOCK)  # zeros would be compressed away by some file systems
    size, begin = 0, time.monotonic()
    with tempfile.TemporaryFile(dir=folder) as file:
        while size < MOST and time.monotonic() - begin < seconds:
            file.write(block)
            file.flush()
            os.fsync(file.fileno())
            size += BLOCK
    return size, max(time.monotonic() - begin, 1e-6)


DISK_SPACE = Check("disk-space", "disk space", 3.0, disk_space, fast=True)
WRITE_SPEED = Check("write-speed", "write speed", 8.0, write_speed)
