"""Places in which a run meets a fault, each real: full, failing and read-only file systems, cgroups, limits, clocks.

A place is made before the run, struck at its moment, and mended before the run that resumes. All mounts are in the
campaign's own mount namespace: whatever happens, they are gone when it ends.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tiny_runs import Run

OWN_NAMESPACE = "TRAINKIT_CAMPAIGN_NAMESPACE"
LIBRARY = "TRAINKIT_CAMPAIGN_LIBRARY"
ANOTHER_USER = ("setpriv", "--reuid=61234", "--regid=61234", "--clear-groups")
HERE = Path(__file__).parent
PACE = "who=trainer calls=write path=metrics.jsonl delay=60"  # so that a step can be seen before the next


def nothing() -> None:
    """For places that need no mending."""


@dataclass
class Place:
    """Where one run meets its fault."""

    root: Path  # output.root
    strike: Callable[[Run], None] = lambda run: None
    mend: Callable[[], None] = nothing
    environ: Mapping[str, str | None] = field(default_factory=dict)
    before: Sequence[str] = ()
    words: Sequence[str] = ()


def shell(*argv: str) -> str:
    """Run a command of the system; CalledProcessError where it fails."""
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


@cache
def abilities() -> dict[str, str]:
    """What cases may need -> why this machine lacks it; empty for what it has."""
    found = {
        "mounts": ""
        if os.environ.get(OWN_NAMESPACE)
        else "no mount namespace of its own (needs root, or user namespaces)",
        "loop": "" if os.geteuid() == 0 and Path("/dev/loop-control").exists() else "no loop devices (needs root)",
        "gcc": "" if os.environ.get(LIBRARY) else "no gcc, which compiles the calls that fail",
        "user": ""
        if starts_as_another_user()
        else "no other user who may start this interpreter (needs root, setpriv)",
    }
    for name in ("memory", "pids"):
        folder = cgroup_of(name)
        found[name] = "" if folder and os.access(folder, os.W_OK) else f"no {name} cgroup to write to (needs root)"
    if os.environ.get(OWN_NAMESPACE) == "user":  # root there is not root here
        found |= {name: f"{name} needs root" for name in ("loop", "user", "memory", "pids")}
    return found


def starts_as_another_user() -> bool:
    """Whether this interpreter can be started as a user without rights."""
    argv = [*ANOTHER_USER, "env", sys.executable, "-c", "import trainkit"]
    return not os.geteuid() and subprocess.run(argv, check=False, capture_output=True).returncode == 0


def cgroup_of(controller: str) -> Path | None:
    """This process's folder of a cgroup controller, of either version."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            return Path("/sys/fs/cgroup", controller, path.lstrip("/"))
        if not names and controller in _words(Path("/sys/fs/cgroup", path.lstrip("/"), "cgroup.controllers")):
            return Path("/sys/fs/cgroup", path.lstrip("/"))
    return None


def _words(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def enter_namespace() -> None:
    """Start this process anew in a mount namespace of its own, where the machine allows one."""
    if os.environ.get(OWN_NAMESPACE) or not shutil.which("unshare"):
        return
    for kind, words in (("root", ["unshare", "-m"]), ("user", ["unshare", "-Urm"])):
        if (
            subprocess.run(
                [*words, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False
            ).returncode
            == 0
        ):
            environ = {**os.environ, OWN_NAMESPACE: kind}
            os.execvpe(words[0], [*words, sys.executable, *sys.argv], environ)


def compile_library(folder: Path) -> None:
    """The failing calls, for LD_PRELOAD; nothing where there is no compiler."""
    library = folder / "faulty.so"
    with suppress(OSError, subprocess.CalledProcessError):
        shell("gcc", "-O2", "-shared", "-fPIC", "-o", str(library), str(HERE / "faulty.c"), "-ldl")
        os.environ[LIBRARY] = str(library)


def failing(*rules: str) -> dict[str, str]:
    """The environment of processes whose calls follow these rules (see faulty.c), paced."""
    library = os.environ.get(LIBRARY)
    return {"LD_PRELOAD": library, "FAULTS": ";".join([*rules, PACE])} if library else {}


@contextmanager
def disk(folder: Path, kind: str, megabytes: int = 24) -> Iterator[Path]:
    """A small file system of its own: `tmpfs`, `ext4` in a file, or the `folder` itself."""
    root = folder / "runs"
    root.mkdir(exist_ok=True)
    image = folder / "disk.img"
    if kind == "tmpfs":
        shell("mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(root))
    elif kind == "ext4":
        with image.open("wb") as file:
            file.truncate(megabytes << 20)
        shell("mkfs.ext4", "-q", "-m", "0", str(image))
        shell("mount", "-o", "loop", str(image), str(root))
    try:
        yield root
    finally:
        if kind in ("tmpfs", "ext4"):
            subprocess.run(["umount", "-l", str(root)], check=False, capture_output=True)


def fill(root: Path, left: int) -> None:
    """Take all room but so many bytes."""
    room = os.statvfs(root)
    size = max(0, room.f_bavail * room.f_bsize - left)
    fd = os.open(root / "filler", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        with suppress(OSError):
            os.posix_fallocate(fd, 0, max(1, size))
        with suppress(OSError):  # which is what is wanted
            while not left:
                os.write(fd, bytes(1024))
    finally:
        os.close(fd)


def unfill(root: Path) -> None:
    """Give the room back."""
    (root / "filler").unlink(missing_ok=True)


def remounted(root: Path, image: Path) -> None:
    """The file system as it is after the machine was started again."""
    shell("umount", str(root))
    shell("mount", "-o", "loop", str(image), str(root))


def power_cut(root: Path) -> None:
    """End an ext4 without its journal being written: what was not flushed is lost (EXT4_IOC_SHUTDOWN, NOLOGFLUSH)."""
    fd, number = os.open(root, os.O_RDONLY), 0x8004587D
    try:
        done = ctypes.CDLL(None, use_errno=True).ioctl(fd, ctypes.c_ulong(number), ctypes.byref(ctypes.c_uint32(2)))
        if done:
            raise OSError(ctypes.get_errno(), "EXT4_IOC_SHUTDOWN")
    finally:
        os.close(fd)


@contextmanager
def cgroup(controller: str) -> Iterator[Path]:
    """A cgroup of its own; what is in it at the end moves back."""
    parent = cgroup_of(controller)
    assert parent is not None
    folder = Path(tempfile.mkdtemp(prefix="trainkit-", dir=parent))
    try:
        yield folder
    finally:
        for pid in _words(folder / "cgroup.procs"):
            with suppress(OSError):
                (parent / "cgroup.procs").write_text(pid)
        folder.rmdir()
