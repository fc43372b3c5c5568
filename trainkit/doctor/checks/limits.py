"""Limits of the machine: space and speed of disks, processes, shared memory."""

from __future__ import annotations

import errno
import os
import shlex
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from trainkit.doctor.check import Finding, Host, Level, Target, ok, skipped
from trainkit.files import room_for_sockets
from trainkit.machine.host import CGROUPS, cgroups, number
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


# The default of a container (https://docs.docker.com/reference/cli/docker/container/run/):
# NCCL and torch's loader processes fail there with "Bus error" or "No space left on device".
CONTAINER_SHM = 64 * MIB
SHM_FULL = 8 * MIB  # not even one segment of NCCL's or of a loader process
SHM_LOW = GIB
SHM_FIX = (
    "docker run --ipc=host …      # or --shm-size=8g; Kubernetes: an emptyDir with medium: Memory",
    "sudo mount -o remount,size=8G /dev/shm      # outside a container",
)
# A rank with torch holds a few dozen files; each loader process hands over its batches in files of its own.
FEWEST_FILES, FEW_FILES = 64, 1024
# torch starts a thread per core and library in each rank; launcher, guardian and rank are processes themselves.
FEWEST_THREADS_PER_RANK, FEW_THREADS_PER_RANK = 8, 256
SUGGESTED_FILES = 65536


def processes(host: Host, target: Target) -> list[Finding]:
    """What is too low, else one finding that all is fine."""
    found = [*_files(host), *_processes(host, target), *_locked(host), *_sockets(host)]
    files, most = (_number(host.limits.get(name, (-1, -1))[0]) for name in ("open files", "processes"))
    return found or [ok(f"{files} open files, {most} processes")]


def _number(limit: int) -> str:
    return "unlimited" if limit < 0 else str(limit)


def _files(host: Host) -> Iterator[Finding]:
    soft, hard = host.limits.get("open files", (-1, -1))
    if 0 <= soft < FEW_FILES:
        raised = SUGGESTED_FILES if hard < 0 else min(SUGGESTED_FILES, hard)
        fix = [f"ulimit -n {raised}"] if raised > soft else []
        fix += ['echo "$USER - nofile 65536" | sudo tee -a /etc/security/limits.conf      # for every login']
        level: Level = "problem" if soft < FEWEST_FILES else "warning"
        evidence = (f"ulimit -n: {soft}, at most {_number(hard)}",)
        yield Finding(level, f"only {soft} files may be open at once", evidence, tuple(fix))


def _processes(host: Host, target: Target) -> Iterator[Finding]:
    """The user's own limit, and that of the control groups around this process."""
    soft, hard = host.limits.get("processes", (-1, -1))
    fix = f"ulimit -u {_number(hard)}" if hard < 0 or hard > soft else "ask whoever set the limit"
    bounds = [(soft, f"ulimit -u: {soft}, at most {_number(hard)}", fix)] if soft >= 0 else []
    for left, evidence, remedy in (*bounds, *_control_groups(host)):
        if left < FEW_THREADS_PER_RANK * target.ranks:
            level: Level = "problem" if left < FEWEST_THREADS_PER_RANK * target.ranks else "warning"
            yield Finding(level, f"only {left} processes and threads may be started", (evidence,), (remedy,))


def _control_groups(host: Host) -> Iterator[tuple[int, str, str]]:
    """How many processes each control group around this process still permits, with evidence and fix."""
    for folder in (*cgroups(host.root, ""), *cgroups(host.root, "pids", f"{CGROUPS}/pids")):
        most, current = number(folder / "pids.max"), number(folder / "pids.current")
        if most is not None and current is not None:  # else this group has no such limit
            evidence = f"{folder}/pids.max and pids.current: {most - current} left"
            yield most - current, evidence, "docker run --pids-limit=-1 …      # or your container's own setting"


def _locked(host: Host) -> Iterator[Finding]:
    """RDMA pins the buffers that GPUs of other machines write to."""
    soft, hard = host.limits.get("locked memory", (-1, -1))
    adapters = host.under("/sys/class/infiniband")
    names = sorted(path.name for path in adapters.iterdir()) if adapters.is_dir() else []
    if soft >= 0 and names:
        evidence = (f"ulimit -l: {soft // 1024} KiB", f"{adapters}: {', '.join(names)}")
        fix = "ulimit -l unlimited" if hard < 0 else "docker run --ulimit memlock=-1 …      # or limits.conf: memlock"
        yield Finding("warning", "memory cannot be locked without limit, which InfiniBand requires", evidence, (fix,))


def _sockets(host: Host) -> Iterator[Finding]:
    folder = host.environ.get("TMPDIR", "")
    room = room_for_sockets(folder)
    if room < 0:
        what = (
            "TMPDIR is too long for the sockets of loader processes: programs of your own that have some wait for ever"
        )
        fix = "export TMPDIR=/tmp      # or any other folder with a short path"
        yield Finding("warning", what, (f"TMPDIR={folder}: {-room} characters too long",), (fix,))


def shared_memory(host: Host, target: Target) -> Finding:
    """Too small, nearly full, or fine. Loader processes, NCCL and DeepSpeed share memory; gloo does not."""
    path = host.under("/dev/shm")  # noqa: S108 - only its size is read
    if recipe := target.recipe:
        loaders = recipe.data.workers if recipe.program.kind == "builtin" else 1  # of a script nothing is known
        if not loaders and (target.ranks == 1 or not (target.cuda or target.deepspeed)):
            return skipped("neither loader processes nor ranks of this plan share memory")
    if not path.is_dir():
        return skipped(f"there is no {path} on this system")
    space = host.space(path)
    evidence = (f"{path}: {format_size(space.total)}, {format_size(space.free)} free",)
    listing = f"ls -lS {path} | head      # what fills it; remove what no process uses any more"
    if space.free < SHM_FULL:
        return Finding("problem", "no room left", evidence, (listing, *SHM_FIX))
    if space.total <= CONTAINER_SHM:
        # whether it is enough depends on the batch and on the number of GPUs
        level: Level = "problem" if target.plan is None else "warning"
        return Finding(level, "too small for many GPUs or for loader processes", evidence, SHM_FIX)
    if space.free < SHM_LOW:
        return Finding("warning", "little room for loader processes with large batches", evidence, (listing, *SHM_FIX))
    return ok(f"{format_size(space.free)} free in {path}")
