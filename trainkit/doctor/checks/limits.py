"""What system and container allow: open files, processes, locked memory, and the size of /dev/shm."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from trainkit.doctor.check import Check, Finding, Level, ok, skipped
from trainkit.doctor.host import Host, Target
from trainkit.text import GIB, MIB, format_size

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
WANTED_FILES = 65536


def processes(host: Host, target: Target) -> list[Finding]:
    """What is too low, else one finding that all is fine."""
    found = [*_files(host), *_processes(host, target), *_locked(host)]
    files, most = (_number(host.limits.get(name, (-1, -1))[0]) for name in ("open files", "processes"))
    return found or [ok(f"{files} open files, {most} processes")]


def _number(limit: int) -> str:
    return "unlimited" if limit < 0 else str(limit)


def _files(host: Host) -> Iterator[Finding]:
    soft, hard = host.limits.get("open files", (-1, -1))
    if not 0 <= soft < FEW_FILES:
        return
    wanted = WANTED_FILES if hard < 0 else min(WANTED_FILES, hard)
    fix = [f"ulimit -n {wanted}"] if wanted > soft else []
    fix += ['echo "$USER - nofile 65536" | sudo tee -a /etc/security/limits.conf      # for every login']
    level: Level = "problem" if soft < FEWEST_FILES else "warning"
    evidence = (f"ulimit -n: {soft}, at most {_number(hard)}",)
    yield Finding(level, f"only {soft} files may be open at once", evidence, tuple(fix))


def _processes(host: Host, target: Target) -> Iterator[Finding]:
    """The user's own limit, and that of the control groups around this process."""
    soft, hard = host.limits.get("processes", (-1, -1))
    if 0 <= soft < FEW_THREADS_PER_RANK * target.ranks:
        evidence = (f"ulimit -u: {soft}, at most {_number(hard)}",)
        raised = f"ulimit -u {_number(hard)}"
        yield _few(soft, target.ranks, evidence, raised if hard < 0 or hard > soft else "ask whoever set the limit")
    for folder, left in _groups(host):
        if left < FEW_THREADS_PER_RANK * target.ranks:
            evidence = (f"{folder}/pids.max and pids.current: {left} left",)
            fix = "docker run --pids-limit=-1 …      # or your container's own setting"
            yield _few(left, target.ranks, evidence, fix)


def _few(left: int, ranks: int, evidence: tuple[str, ...], fix: str) -> Finding:
    level: Level = "problem" if left < FEWEST_THREADS_PER_RANK * ranks else "warning"
    return Finding(level, f"only {left} processes and threads may be started", evidence, (fix,))


def _groups(host: Host) -> Iterator[tuple[Path, int]]:
    """Folders of the control groups that limit processes, and how many each still permits."""
    try:
        lines = host.under("/proc/self/cgroup").read_text().splitlines()
    except OSError:  # no such system
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers not in ("", "pids"):
            continue
        mount = host.under("/sys/fs/cgroup" if not controllers else "/sys/fs/cgroup/pids")
        folder = mount / group.strip("/")
        for each in (folder, *folder.parents):
            if each != mount and mount not in each.parents:
                continue
            with contextlib.suppress(OSError):  # this group has no such limit
                most, current = ((each / name).read_text().strip() for name in ("pids.max", "pids.current"))
                if most.isdigit() and current.isdigit():
                    yield each, int(most) - int(current)


def _locked(host: Host) -> Iterator[Finding]:
    """RDMA pins the buffers that cards of other machines write to."""
    soft, hard = host.limits.get("locked memory", (-1, -1))
    adapters = host.under("/sys/class/infiniband")
    names = sorted(path.name for path in adapters.iterdir()) if adapters.is_dir() else []
    if soft >= 0 and names:
        evidence = (f"ulimit -l: {soft // 1024} KiB", f"{adapters}: {', '.join(names)}")
        fix = "ulimit -l unlimited" if hard < 0 else "docker run --ulimit memlock=-1 …      # or limits.conf: memlock"
        yield Finding("warning", "memory cannot be locked without limit, which InfiniBand requires", evidence, (fix,))


def shared_memory(host: Host, target: Target) -> list[Finding]:
    """Too small, nearly full, or fine."""
    path = host.under("/dev/shm")  # noqa: S108 - only its size is read
    if not path.is_dir():
        return [skipped(f"there is no {path} on this system")]
    space = host.space(path)
    evidence = (f"{path}: {format_size(space.total)}, {format_size(space.free)} free",)
    listing = f"ls -lS {path} | head      # what fills it; remove what no process uses any more"
    if space.free < SHM_FULL:
        return [Finding("problem", "no room left", evidence, (listing, *SHM_FIX))]
    if space.total <= CONTAINER_SHM:
        # whether it is enough depends on the batch and on the number of cards
        what = "too small for many cards or for loader processes"
        return [Finding("problem" if target.anything else "warning", what, evidence, SHM_FIX)]
    if space.free < SHM_LOW:
        what = "little room for loader processes with large batches"
        return [Finding("warning", what, evidence, (listing, *SHM_FIX))]
    return [ok(f"{format_size(space.free)} free in {path}")]


def _shares_no_memory(target: Target) -> str:
    """Loader processes, NCCL and DeepSpeed share memory; gloo does not."""
    if target.recipe is None:
        return ""
    recipe = target.recipe
    loaders = recipe.data.workers if recipe.program.kind == "builtin" else 1  # of a script nothing is known
    shared = target.ranks > 1 and (target.cuda or target.deepspeed)
    return "" if loaders or shared else "neither loader processes nor ranks of this plan share memory"


SHARED_MEMORY = Check("shared-memory", "shared memory", 2.0, shared_memory, _shares_no_memory, fast=True)
PROCESS_LIMITS = Check("limits", "file and process limits", 2.0, processes, fast=True)
