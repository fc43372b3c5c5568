"""What system and container allow: open files, processes, locked memory, /dev/shm."""

from __future__ import annotations

from collections.abc import Iterator

from trainkit.doctor.check import Check, Finding, Host, Level, Target, content, ok, skipped
from trainkit.files import room_for_sockets
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
    for line in content(host.under("/proc/self/cgroup")).splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers not in ("", "pids"):  # the one hierarchy of version 2 has no name
            continue
        mount = host.under("/sys/fs/cgroup" if not controllers else "/sys/fs/cgroup/pids")
        folder = mount / group.strip("/")
        for each in (folder, *folder.parents):
            if each != mount and mount not in each.parents:
                continue
            most, current = (content(each / name).strip() for name in ("pids.max", "pids.current"))
            if most.isdigit() and current.isdigit():  # else this group has no such limit
                left = int(most) - int(current)
                evidence = f"{each}/pids.max and pids.current: {left} left"
                yield left, evidence, "docker run --pids-limit=-1 …      # or your container's own setting"


def _locked(host: Host) -> Iterator[Finding]:
    """RDMA pins the buffers that cards of other machines write to."""
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
        # whether it is enough depends on the batch and on the number of cards
        level: Level = "problem" if target.anything else "warning"
        return Finding(level, "too small for many cards or for loader processes", evidence, SHM_FIX)
    if space.free < SHM_LOW:
        return Finding("warning", "little room for loader processes with large batches", evidence, (listing, *SHM_FIX))
    return ok(f"{format_size(space.free)} free in {path}")


SHARED_MEMORY = Check("shared-memory", "shared memory", 2.0, shared_memory, fast=True)
PROCESS_LIMITS = Check("limits", "file and process limits", 2.0, processes, fast=True)
