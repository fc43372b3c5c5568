"""Room and speed of the disks; a checkpoint stops training while it is written, so the run root is tried."""

from __future__ import annotations

import errno
import os
import shlex
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from trainkit.doctor.check import Check, Finding, Host, Target, ok, skipped
from trainkit.text import GIB, MIB, format_size

BLOCK, MOST, SECONDS = 4 * MIB, 64 * MIB, 2.0
SLOW = 30 * MIB  # bytes a second: 10 GB of checkpoint would take more than 5 minutes
SPARE = 1024 * MIB  # a disk with less room than this is not filled further
# A run directory with logs and plan takes about a megabyte; what a checkpoint takes is not known before the model is.
LEAST, LITTLE = 4 * MIB, 10 * GIB
FEWEST_INODES = 100


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there already and can be looked at."""
    return next(path for path in (folder, *folder.parents) if os.path.exists(path))  # noqa: PTH110 - False, no error


def obstacle(folder: Path) -> str:
    """Why no files can be made in the folder, in the system's words; empty where they can."""
    if not folder.is_dir():
        return os.strerror(errno.ENOTDIR)
    if os.access(folder, os.W_OK | os.X_OK):
        return ""
    return os.strerror(errno.EROFS if os.statvfs(folder).f_flag & os.ST_RDONLY else errno.EACCES)


def _closed(folder: Path, why: str, evidence: tuple[str, ...], override: str) -> Finding:
    whose = f"ls -ld {shlex.quote(str(folder))}      # whose it is"
    fix = (f"trainkit run RECIPE {override}", *(() if why == os.strerror(errno.EROFS) else (whose,)))
    return Finding("problem", f"{folder} cannot be written to: {why}", evidence, fix)


def disk_space(host: Host, target: Target) -> Iterator[Finding]:
    """The plan's folder for what is offloaded, where that cannot be used; the run root."""
    path = getattr(target.recipe.strategy, "nvme_path", None) if target.recipe else None
    if path and (why := obstacle(fast := existing(host.folder / path))):
        yield _closed(fast, why, (f"strategy.nvme_path {path}",), "strategy.nvme_path=/a/fast/folder")
    root = host.folder / target.output_root
    folder, elsewhere = existing(root), "output.root=/a/folder/with/room"
    space = host.space(folder)
    evidence = (f"run root {root}", f"{format_size(space.free)} of {format_size(space.total)} free")
    fix = ("trainkit runs prune --keep 3      # removes older runs of each name", f"trainkit run RECIPE {elsewhere}")
    if why := obstacle(folder):
        yield _closed(folder, why, evidence, elsewhere)
    elif space.free < LEAST:
        yield Finding("problem", "almost no room for runs", evidence, fix)
    elif space.files is not None and space.files < FEWEST_INODES:  # inodes
        full = (*evidence, f"{space.files} more files can be made there")
        yield Finding("problem", "the file system has no room for more files", full, fix)
    elif space.free < LITTLE:
        yield Finding("warning", "little room for checkpoints", evidence, fix)
    else:
        yield ok(f"{format_size(space.free)} free at the run root", str(root))


def write_speed(host: Host, target: Target) -> Finding:
    """Write, force to the disk and remove at most 64 MiB, in about 2 seconds at most."""
    folder = existing(host.folder / target.output_root)
    if obstacle(folder) or host.space(folder).free < SPARE:
        return skipped(f"{folder} has no room for a trial")
    block = os.urandom(BLOCK)  # zeros would be compressed away by some file systems
    size, begin = 0, time.monotonic()
    with tempfile.TemporaryFile(dir=folder) as file:  # which has no name, so nothing can stay behind
        while size < MOST and time.monotonic() - begin < SECONDS:
            file.write(block)
            file.flush()
            os.fsync(file.fileno())
            size += BLOCK
    seconds = max(time.monotonic() - begin, 1e-6)
    speed = f"{format_size(int(size / seconds))}/s"
    evidence = f"{format_size(size)} written and synced in {seconds:.2f} s in {folder}"
    if size / seconds < SLOW:
        fix = "trainkit run RECIPE output.root=/a/local/disk      # or checkpoint.asynchronous=true"
        return Finding("warning", f"slow: {speed}", (evidence,), (fix,))
    return ok(f"{speed} at the run root", evidence)


DISK_SPACE = Check("disk-space", "disk space", 3.0, disk_space, fast=True)
WRITE_SPEED = Check("write-speed", "write speed", 8.0, write_speed)
