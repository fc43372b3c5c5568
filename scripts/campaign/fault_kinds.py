"""The faults of the campaign `faults`: where each can be made, what it needs, what a run may say and end with."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from fault_places import ANOTHER_USER, Place, cgroup, disk, failing, fill, power_cut, remounted, shell, unfill
from tiny_runs import Run

STRATEGIES = ("single", "ddp", "fsdp", "zero2")
MOMENTS = ("before", "starting", "first step", "saving", "between steps", "near the end")
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
    alone: Callable[[Case, Path, Callable[[str], Mapping[int, float]]], list[str]] | None = None  # judges by itself
    path: bool = False  # whether a path of the run must be named, too


@contextmanager
def full_disk(case: Case, folder: Path) -> Iterator[Place]:
    """All room is taken but for so many bytes."""
    left = (0, 4096, 20_000, 100_000, 250_000)[case.amount]
    with disk(folder, case.where) as root:
        yield Place(root, lambda _: fill(root, left), lambda: unfill(root), failing())


@contextmanager
def failed_disk(case: Case, folder: Path) -> Iterator[Place]:
    """An ext4 that fails for good: its journal is aborted, or as at a power cut; mended by mounting it anew."""

    def strike(_: Run) -> None:
        if case.where == "power cut":
            power_cut(root)
        else:
            shell("mount", "-o", "remount,abort", str(root))

    with disk(folder, "ext4") as root:
        yield Place(root, strike, lambda: remounted(root, folder / "disk.img"), failing())


@contextmanager
def read_only(case: Case, folder: Path) -> Iterator[Place]:
    """A file system that is mounted read-only before the start."""
    with disk(folder, case.where) as root:
        yield Place(
            root,
            lambda _: void(shell("mount", "-o", "remount,ro", str(root))),
            lambda: void(shell("mount", "-o", "remount,rw", str(root))),
        )


def void(_: object) -> None:
    """For what is not to be returned."""


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
            script = f'echo $$ > {group}/cgroup.procs && exec "$@"'
            yield Place(root, before=("sh", "-c", script, "sh"), environ=failing())
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
        yield Place(root, before=("sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"))


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

    calls = "open+write+fsync+rename+mkdir"
    yield Place(
        root,
        strike,
        lambda: switch.unlink(missing_ok=True),
        failing(f"calls={calls} path={root}/ {delay} switch={switch}"),
    )


@contextmanager
def removed(case: Case, folder: Path) -> Iterator[Place]:
    """A folder of the run is removed, or a link to a folder with files of another run is in its place."""
    root = folder / "runs"

    def strike(run: Run) -> None:
        found = run.directory()
        if found is None:
            return
        inner = {"run": found, "root": root / found.parent.name}.get(
            case.where.split()[0], found / case.where.split()[0]
        )
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
