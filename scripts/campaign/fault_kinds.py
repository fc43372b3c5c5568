"""The faults of the campaign `faults`: where each can be made, what it needs, what a run may say and end with.

A place is made before the run, struck at its moment, and mended before the run that resumes. Each is real: full,
failing and read-only file systems, cgroups, limits, clocks. All mounts are in the campaign's own mount namespace:
whatever happens, they are gone when it ends.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import psutil
import tiny_runs
from tiny_runs import References, Run

OWN_NAMESPACE = "TRAINKIT_CAMPAIGN_NAMESPACE"
LIBRARY = "TRAINKIT_CAMPAIGN_LIBRARY"
ANOTHER_USER = ("setpriv", "--reuid=61234", "--regid=61234", "--clear-groups")
PACE = "who=trainer calls=write path=metrics.jsonl delay=60"  # so that a step can be seen before the next


@dataclass
class Place:
    """Where one run meets its fault."""

    root: Path  # output.root
    strike: Callable[[Run], object] = lambda run: None
    mend: Callable[[], object] = lambda: None
    environ: Mapping[str, str | None] = field(default_factory=dict)
    before: Sequence[str] = ()


def shell(*argv: str) -> str:
    """Run a command of the system; CalledProcessError where it fails."""
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


@cache
def abilities() -> dict[str, str]:
    """What cases may need -> why this machine lacks it; empty for what it has."""
    there = {
        "mounts": (OWN_NAMESPACE in os.environ, "no mount namespace of its own (needs root, or user namespaces)"),
        "loop": (not os.geteuid() and Path("/dev/loop-control").exists(), "no loop devices (needs root)"),
        "gcc": (LIBRARY in os.environ, "no gcc, which compiles the calls that fail"),
        "user": (starts_as_another_user(), "no other user who may start this interpreter (needs root, setpriv)"),
    }
    for name in ("memory", "pids"):
        folder = cgroup_of(name)
        there[name] = (bool(folder and os.access(folder, os.W_OK)), f"no {name} cgroup to write to (needs root)")
    if os.environ.get(OWN_NAMESPACE) == "user":  # root there is not root here
        there |= {name: (False, f"{name} needs root") for name in ("loop", "user", "memory", "pids")}
    return {name: "" if able else why for name, (able, why) in there.items()}


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
        tried = [*words, "mount", "-t", "tmpfs", "none", "/mnt"]
        if not subprocess.run(tried, capture_output=True, check=False).returncode:
            os.execvpe(words[0], [*words, sys.executable, *sys.argv], {**os.environ, OWN_NAMESPACE: kind})


def compile_library(folder: Path) -> None:
    """The failing calls, for LD_PRELOAD; nothing where there is no compiler."""
    library = folder / "faulty.so"
    with suppress(OSError, subprocess.CalledProcessError):
        shell("gcc", "-O2", "-shared", "-fPIC", "-o", str(library), str(Path(__file__).with_name("faulty.c")), "-ldl")
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


def power_cut(root: Path) -> None:
    """End an ext4 without its journal being written: what was not flushed is lost (EXT4_IOC_SHUTDOWN, NOLOGFLUSH)."""
    fd, number = os.open(root, os.O_RDONLY), 0x8004587D
    try:
        done = ctypes.CDLL(None, use_errno=True).ioctl(fd, ctypes.c_ulong(number), ctypes.byref(ctypes.c_uint32(2)))
        if done:
            raise OSError(ctypes.get_errno(), "EXT4_IOC_SHUTDOWN")
    finally:
        os.close(fd)


def within(group: Path) -> tuple[str, ...]:
    """The words that start a command in a cgroup."""
    return ("sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh")


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


# The faults.

STRATEGIES = ("single", "ddp", "fsdp", "zero2")
MOMENTS = ("before", *tiny_runs.MOMENTS)
AMOUNTS = range(5)  # of a table of the fault's own: bytes left, error numbers, limits
OK, MACHINE, ANY = frozenset({0}), frozenset({0, 1, 4}), frozenset({0, 1, 4, 137})
KILLED = -signal.SIGKILL  # trainkit itself; its guardian says the rest
NO_ROOM = ("No space left on device", "no room", "full")


@dataclass(frozen=True)
class Case:
    """One run and its fault."""

    fault: str
    where: str
    moment: str
    amount: int
    strategy: str


@dataclass(frozen=True)
class Fault:
    """codes: that a run may end with. says: one of these names the cause to who reads the end of a run that failed."""

    place: Callable[[Case, Path], AbstractContextManager[Place]]
    wheres: tuple[str, ...]
    codes: frozenset[int]
    says: tuple[str, ...]
    needs: tuple[str, ...] = ()
    moments: tuple[str, ...] = MOMENTS
    amounts: tuple[int, ...] = tuple(AMOUNTS)
    strategies: tuple[str, ...] = STRATEGIES
    records: bool = True  # whether status.json can be true at the end
    alone: Callable[[Case, Path, References], list[str]] | None = None  # judges by itself
    path: bool = False  # whether a path of the run must be named, too


@contextmanager
def full_disk(case: Case, folder: Path) -> Iterator[Place]:
    """All room is taken but for so many bytes."""
    left = (0, 4096, 20_000, 100_000, 250_000)[case.amount]
    with disk(folder, case.where) as root:
        yield Place(root, lambda _: fill(root, left), lambda: (root / "filler").unlink(missing_ok=True), failing())


@contextmanager
def failed_disk(case: Case, folder: Path) -> Iterator[Place]:
    """An ext4 that fails for good: its journal is aborted, or as at a power cut; mended by mounting it anew."""

    def strike(_: Run) -> None:
        if case.where == "power cut":
            power_cut(root)
        else:
            shell("mount", "-o", "remount,abort", str(root))

    def mend() -> None:  # as after a start of the machine
        shell("umount", str(root))
        shell("mount", "-o", "loop", str(folder / "disk.img"), str(root))

    with disk(folder, "ext4") as root:
        yield Place(root, strike, mend, failing())


@contextmanager
def read_only(case: Case, folder: Path) -> Iterator[Place]:
    """A file system that is mounted read-only before the start."""
    with disk(folder, case.where) as root:
        yield Place(
            root,
            lambda _: shell("mount", "-o", "remount,ro", str(root)),
            lambda: shell("mount", "-o", "remount,rw", str(root)),
        )


# who:calls:path of what fails; %R is output.root
CALLS = (
    "trainer:write:metrics.jsonl", "trainer:write:checkpoints", "trainer:fsync:checkpoints", "trainer:open:checkpoints",
    "trainer:rename:checkpoints", "trainer:mkdir:checkpoints", "trainer:close:checkpoints",
    "trainer:open+write+fsync:result.json", "trainer:open:metrics.jsonl",
    "trainer:read:trainer.json", "wrapper:open:logs/rank-", "wrapper:write:logs/rank-",
    "wrapper:open+write+rename:ranks/", "wrapper:read:status.json", "guardian:open+rename:status.json",
    "guardian:write+fsync:status.json", "guardian:read:ranks/", "trainkit:open+write+rename:summary.json",
    "trainkit:open+write:plan.json", "trainkit:rename:recipe.yaml", "trainkit:open:launcher.log", "trainkit:open:.lock",
    "trainkit:mkdir:%R", "trainkit:read:metrics.jsonl", "trainkit:read:status.json", "trainkit:read:logs/rank-",
    "launcher:open+write:%R", ":open+write+mkdir+rename+fsync:%R",
)  # fmt: skip


@contextmanager
def failing_call(case: Case, folder: Path) -> Iterator[Place]:
    """Calls of one process for one file fail, from the moment on."""
    who, calls, path = case.where.split(":")
    number = (5, 28, 122, 116, 30)[case.amount]  # EIO, ENOSPC, EDQUOT, ESTALE, EROFS
    switch, root = folder / "switch", folder / "runs"
    rule = f"calls={calls} path={path.replace('%R', str(root))} errno={number} switch={switch}"
    yield Place(
        root, lambda _: switch.touch(), switch.unlink, failing(f"who={who} {rule}" if who else rule)
    )  # fmt: skip


@contextmanager
def clock(case: Case, folder: Path) -> Iterator[Place]:
    """The time of day jumps, for all processes of the run or for one of them."""
    seconds = (315_360_000, -315_360_000, 3600, -3600, 30)[case.amount]
    switch, root = folder / "switch", folder / "runs"

    def strike(run: Run) -> None:
        switch.touch()
        if case.where == "files of the future" and (found := run.directory()):
            for path in [found, *found.rglob("*")]:
                os.utime(path, (4e9, 4e9))

    who = "" if case.where in ("all", "files of the future") else f"who={case.where}"
    yield Place(root, strike, switch.unlink, failing(f"{who} clock={seconds} switch={switch}"))


@contextmanager
def out_of_memory(case: Case, folder: Path) -> Iterator[Place]:
    """The kernel kills a rank (or all) in a cgroup without memory, or allocations fail at the limit of addresses."""
    root = folder / "runs"
    if case.where == "addresses":
        size = (2, 1, 1, 3, 4)[case.amount] << 30 if case.amount != 2 else 600 << 20
        yield Place(root, before=("prlimit", f"--as={size}", "--"))
        return
    with cgroup("memory") as group:

        def strike(run: Run) -> None:
            pid = run.rank().get("pid")
            if pid and case.where == "rank":
                (group / "cgroup.procs").write_text(str(pid))
                limit(group, 1 << 20)

        if case.where == "all":
            limit(group, (250, 120, 40, 330, 400)[case.amount] << 20)
            yield Place(root, before=within(group), environ=failing())
        else:
            yield Place(root, strike, environ=failing())


def limit(group: Path, size: int) -> None:
    """The memory of a cgroup of either version, bytes."""
    name = "memory.max" if (group / "memory.max").exists() else "memory.limit_in_bytes"
    (group / name).write_text(str(size))


@contextmanager
def few_descriptors(case: Case, folder: Path) -> Iterator[Place]:
    """No more than so many open files, from the start or for one rank in its middle."""
    number = (12, 24, 100, 260, 600)[case.amount]
    if case.where == "from the start":
        yield Place(folder / "runs", before=("prlimit", f"--nofile={number}:{number}", "--"))
        return

    def strike(run: Run) -> None:
        pid = run.rank().get("pid") if case.where == "a rank" else run.status().get("pids", {}).get("guardian")
        if pid and psutil.pid_exists(pid):
            shell("prlimit", f"--nofile={number}:{number}", f"--pid={pid}")

    yield Place(folder / "runs", strike, environ=failing())


@contextmanager
def few_processes(case: Case, folder: Path) -> Iterator[Place]:
    """No more than so many processes and threads, in a cgroup or of a user."""
    number = (1, 2, 4, 8, 16)[case.amount]
    root = folder / "runs"
    if case.where == "user":
        for path in (root, folder / "tmp", folder):
            path.mkdir(exist_ok=True)
            path.chmod(0o777)
        home = {"HOME": str(folder), "PATH": "/usr/bin:/bin"}
        words = (*ANOTHER_USER, "prlimit", f"--nproc={number}", "--")
        yield Place(root, before=words, environ=home)
        return
    with cgroup("pids") as group:
        (group / "pids.max").write_text(str(number))
        yield Place(root, before=within(group))


@contextmanager
def shared_memory(case: Case, folder: Path) -> Iterator[Place]:
    """A /dev/shm that is tiny, read-only or closed."""
    options = {"tiny": "size=64k", "read-only": "ro", "closed": "ro,mode=0"}[case.where]
    script = f'mount -t tmpfs -o {options} none /dev/shm && exec "$@"'
    yield Place(folder / "runs", before=("unshare", "-m", "sh", "-c", script, "sh"))


@contextmanager
def slow_disk(case: Case, folder: Path) -> Iterator[Place]:
    """Every call for a file of the run takes its time, or waits until the file system answers again."""
    switch, root = folder / "switch", folder / "runs"
    # torch writes a checkpoint in more than a hundred calls: at 120 ms for each the five of a run take 80 s.
    delay = "hang=1" if case.where == "hangs" else f"delay={(10, 20, 40, 80, 120)[case.amount]}"

    def strike(run: Run) -> None:
        switch.touch()
        if case.where == "hangs":
            with suppress(subprocess.TimeoutExpired):
                run.process.wait((1, 2, 4, 6, 9)[case.amount])
            switch.unlink()

    rule = f"calls=open+write+fsync+rename+mkdir path={root}/ {delay} switch={switch}"
    yield Place(root, strike, lambda: switch.unlink(missing_ok=True), failing(rule))


@contextmanager
def removed(case: Case, folder: Path) -> Iterator[Place]:
    """A folder of the run is removed, or a link to a folder with files of another run is in its place."""
    root = folder / "runs"

    def strike(run: Run) -> None:
        found = run.directory()
        if found is None:
            return
        what = case.where.split()[0]
        inner = {"run": found, "root": found.parent}.get(what, found / what)
        if inner.exists():
            inner.rename(folder / "removed")
            if case.where.endswith("link"):
                inner.symlink_to(root / "bystander" / "20200101-000000-abcdef")

    def mend() -> None:
        for path in (root / "tiny", *root.glob("tiny/2*"), *root.glob("tiny/2*/*")):
            if path.is_symlink():
                path.unlink()

    yield Place(root, strike, mend, failing())


SURROUNDINGS: dict[str, tuple[dict[str, str | None], str]] = {
    "no HOME": ({"HOME": None}, ""),
    "HOME not writable": ({"HOME": "/proc"}, ""),
    "TMPDIR missing": ({"TMPDIR": "/nowhere/at/all"}, ""),
    "TMPDIR read-only": ({"TMPDIR": "/proc"}, ""),
    "C locale": ({"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, ""),
    "ASCII": ({"PYTHONIOENCODING": "ascii"}, ""),
    "no stdin": ({}, "<&-"), "no stdout": ({}, ">&-"), "no stderr": ({}, "2>&-"), "no streams": ({}, "<&- >&- 2>&-"),
    "full stdout": ({}, ">/dev/full"), "full streams": ({}, ">/dev/full 2>&1"),
    "no PATH": ({"PATH": None}, ""), "no USER": ({"USER": None, "LOGNAME": None}, ""),
    "blocked signals": ({}, "trap '' TERM INT HUP CHLD PIPE"), "umask 777": ({}, "umask 277"),
}  # fmt: skip


@contextmanager
def surroundings(case: Case, folder: Path) -> Iterator[Place]:
    """Variables and streams that a run is used to are not there."""
    environ, script = SURROUNDINGS[case.where]
    lead, tail = (f"{script}; ", "") if script and script[0] not in "<>2" else ("", script)
    yield Place(folder / "runs", environ=environ, before=("sh", "-c", f'{lead}exec "$@" {tail}', "sh"))


@contextmanager
def stopped_rank(case: Case, folder: Path) -> Iterator[Place]:
    """A rank stops for good (as on a hanging disk), and trainkit is told to end."""

    def strike(run: Run) -> None:
        pid = run.rank().get("pid")
        if pid and psutil.pid_exists(pid):
            os.kill(pid, signal.SIGSTOP)
        run.process.terminate()

    yield Place(folder / "runs", strike, environ=failing())


FAULTS: dict[str, Fault] = {
    "full disk": Fault(full_disk, ("tmpfs", "ext4"), MACHINE, NO_ROOM, ("mounts",), path=True),
    "failed disk": Fault(
        failed_disk, ("aborted", "power cut"), ANY, ("Input/output error", "Read-only file system"), ("loop",),
        MOMENTS[1:], (0,), records=False, path=True,
    ),
    "read-only": Fault(
        read_only, ("tmpfs", "ext4"), frozenset({4}), ("Read-only file system",), ("loop",), ("before",), (0,),
        path=True,
    ),
    "failing call": Fault(
        failing_call, CALLS, MACHINE,
        ("Input/output error", *NO_ROOM, "Disk quota exceeded", "Stale file handle", "Read-only file system"), ("gcc",),
        records=False, path=True,
    ),
    "clock": Fault(
        clock, ("all", "trainer", "guardian", "trainkit", "wrapper", "files of the future"), OK, (), ("gcc",)
    ),
    "memory": Fault(
        out_of_memory, ("rank",), ANY, ("memory",), ("memory",), ("starting", "first step", "between steps")
    ),
    "memory of all": Fault(out_of_memory, ("all",), ANY | {KILLED}, ("memory",), ("memory",), ("before",)),
    "addresses": Fault(out_of_memory, ("addresses",), ANY, ("emory",), (), ("before",)),
    "descriptors": Fault(
        few_descriptors, ("from the start", "a rank", "guardian"), ANY, ("oo many open files", "files may be open"), (),
        ("before", "first step"),
    ),
    "processes": Fault(
        few_processes, ("cgroup",), ANY, ("Resource temporarily unavailable", "thread"), ("pids",), ("before",)
    ),
    "processes of a user": Fault(
        few_processes, ("user",), ANY, ("Resource temporarily unavailable", "thread"), ("user",), ("before",)
    ),
    "shared memory": Fault(
        shared_memory, ("tiny", "read-only", "closed"), MACHINE, ("/dev/shm",), ("mounts",), ("before",), (0,)
    ),
    "slow disk": Fault(slow_disk, ("slow", "hangs"), OK, (), ("gcc",)),
    "removed": Fault(
        removed,
        ("run", "checkpoints", "attempts", "attempts/1/logs", "root", "run link", "checkpoints link", "attempts link"),
        MACHINE, ("No such file", "removed", "a link is in the place"), ("gcc",), MOMENTS[1:], (0,), records=False,
    ),
    "surroundings": Fault(surroundings, tuple(SURROUNDINGS), OK, (), (), ("before",), (0,)),
    "stopped rank": Fault(stopped_rank, ("program",), frozenset({143}), ("SIGTERM",), ("gcc",), MOMENTS[1:5], (0,)),
}  # fmt: skip
