"""What a check is, what it may look at, what it finds, and how it runs other programs within a time limit."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

from trainkit.distribution import pip
from trainkit.launch_plan.model import Plan
from trainkit.machine.facts import Facts
from trainkit.recipe.schema import Recipe

MOST_OUTPUT = 64 * 1024  # characters of each stream that are kept
REMOVING = 1.0  # seconds in which what was killed may still write


@dataclass(frozen=True, slots=True)
class Done:
    """A command that has ended. code: its exit code, minus the signal; None where it could not be started or hung."""

    code: int | None
    output: str = ""
    errors: str = ""
    why: str = ""  # it has no exit code

    @property
    def fine(self) -> bool:
        return self.code == 0

    @property
    def said(self) -> str:
        """The last line of its output, for evidence; else why there is none."""
        lines = [line.strip() for line in (self.errors or self.output).splitlines() if line.strip()]
        return self.why or (lines[-1] if lines else f"exit code {self.code}, no output")


@dataclass
class Commands:
    """Starts commands in process groups of their own, and ends what still lives when it is closed."""

    environ: Mapping[str, str]
    _living: set[int] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closed: bool = False

    def __call__(self, argv: tuple[str, ...], limit: float, *, environ: Mapping[str, str] | None = None) -> Done:
        """Run to its end, or kill it with all that it started after `limit` seconds."""
        try:
            process = subprocess.Popen(
                argv,
                env=dict(self.environ if environ is None else environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                encoding="utf-8",
                errors="replace",
            )
        except OSError as error:
            return Done(None, why=f"{argv[0]} cannot be started: {error.strerror}")
        with self._lock:
            self._living.add(process.pid)
            if self._closed:
                _kill_group(process.pid)
        try:
            output, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            _kill_group(process.pid)
            output = errors = ""
            with contextlib.suppress(subprocess.TimeoutExpired):  # what left the group may still hold the pipes
                output, errors = process.communicate(timeout=1)
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
            return Done(None, output, errors, f"{argv[0]} did not end within {limit:g} s")
        finally:
            with self._lock:
                self._living.discard(process.pid)
        return Done(process.returncode, output[-MOST_OUTPUT:], errors[-MOST_OUTPUT:])

    def close(self) -> None:
        """End the commands that still run, and those that a check starts later."""
        with self._lock:
            self._closed = True
            for pid in self._living:
                _kill_group(pid)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has just ended
        os.killpg(pid, signal.SIGKILL)


@contextlib.contextmanager
def private_environment() -> Iterator[Mapping[str, str]]:
    """This process's environment with a temporary folder for the checks alone, removed with all that is left in it.

    A compiler that is killed leaves its files, and Python's search for a temporary folder its trial file.
    """
    import tempfile

    environ = dict(os.environ)
    folder = ""
    with contextlib.suppress(OSError):  # no folder can be written to: then nothing can be left either
        folder = environ["TMPDIR"] = tempfile.mkdtemp(prefix="trainkit-doctor-")
    try:
        yield environ
    finally:
        # Until it is gone: a killed compiler's files may appear after the first attempt.
        end = time.monotonic() + REMOVING
        while folder and os.path.lexists(folder) and time.monotonic() < end:
            shutil.rmtree(folder, ignore_errors=True)


Level = Literal["ok", "skipped", "note", "warning", "problem"]  # from harmless to worst
LEVELS: tuple[Level, ...] = get_args(Level)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found.

    what: a clause without a period; evidence: paths, versions, values, a line each; fix: commands to paste.
    """

    level: Level
    what: str
    evidence: tuple[str, ...] = ()
    fix: tuple[str, ...] = ()


def ok(what: str, *evidence: str) -> Finding:
    return Finding("ok", what, evidence)


def skipped(why: str) -> Finding:
    return Finding("skipped", why)


# What a check may need: the name of a property of `Target`, and why the check is skipped without it.
NEEDS: Mapping[str, str] = {
    "plan": "no recipe is named",
    "container": "no recipe with a container is named",
    "several": "one process meets no other",
    "cuda": "the plan uses no CUDA GPU",
    "compiles_cuda": "the plan compiles nothing for CUDA GPUs",
    "builds": "the plan builds nothing",
    "builds_ops": "the plan compiles none of DeepSpeed's ops",
}


def worst(levels: Iterable[Level]) -> Level:
    """The worst level; ok where there is none. A check that was skipped in part was not skipped."""
    found = set(levels)
    if found == {"skipped"}:
        return "skipped"
    return max(found - {"skipped"}, key=LEVELS.index, default="ok")


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What one check found, and in how many seconds."""

    name: str
    title: str
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def level(self) -> Level:
        return worst(finding.level for finding in self.findings)


@dataclass(frozen=True, slots=True)
class Check:
    """One independent check. title: what is examined, for people; limit: seconds after which it is given up.

    run: gives at least one finding; what the system refuses (OSError) becomes one.
    fast: it takes milliseconds, so `trainkit run` calls it before the start. needs: of the target, by NEEDS.
    """

    name: str
    title: str
    limit: float
    run: Callable[[Host, Target], Finding | Iterable[Finding]]
    fast: bool = False
    needs: str = ""


RLIMITS = {"open files": "RLIMIT_NOFILE", "processes": "RLIMIT_NPROC", "locked memory": "RLIMIT_MEMLOCK"}


@dataclass(frozen=True, slots=True)
class Space:
    """A file system. In bytes, as this user may fill it; files: how many more it takes, None where it has no count."""

    total: int
    free: int
    files: int | None = None


@dataclass(frozen=True, slots=True)
class Host:
    """Everything that a check may look at.

    root: where /proc, /sys, /dev, /usr and the like are looked for. folder: the working folder.
    packages: folders of Python packages, as sys.path has them. headers: folder of the interpreter's C headers.
    space: of the file system of a path; raises OSError. limits: soft and hard limit of this process by the names of
    RLIMITS; -1 is none. run: as `Commands` does, which never raises for what a command does.
    """

    facts: Facts
    environ: Mapping[str, str]
    root: Path
    folder: Path
    packages: tuple[str, ...]
    headers: Path
    limits: Mapping[str, tuple[int, int]]
    run: Callable[..., Done]
    space: Callable[[Path], Space]

    def under(self, path: str) -> Path:
        """An absolute path of the machine, below the root."""
        return self.root / path.lstrip("/")

    def which(self, name: str) -> Path | None:
        """The program that a shell would start, by PATH."""
        found = shutil.which(name, path=self.environ.get("PATH", os.defpath))
        return Path(found) if found else None

    def every(self, name: str) -> Iterator[Path]:
        """All programs of a name on PATH, in its order."""
        for folder in self.environ.get("PATH", os.defpath).split(os.pathsep):
            path = Path(folder or ".", name)
            if path.is_file() and os.access(path, os.X_OK):
                yield path

    @property
    def home(self) -> Path:
        return Path(self.environ.get("HOME") or "~").expanduser()

    @property
    def python(self) -> str:
        """The interpreter, for commands to paste."""
        return shlex.quote(self.facts.executable)

    @property
    def pip(self) -> str:
        return pip(self.facts.executable)


def this_host(facts: Facts, run: Callable[..., Done], folder: Path, environ: Mapping[str, str]) -> Host:
    """The host that this process sees. folder: the working folder. environ: of what the checks start."""
    import resource

    return Host(
        facts=facts,
        environ=environ,
        root=Path("/"),
        folder=folder,
        # The ranks start with -P: what `python -m` or a script puts first is not theirs.
        packages=tuple(folder or "." for folder in sys.path[0 if sys.flags.safe_path else 1 :]),
        headers=Path(sysconfig.get_path("include")),
        limits={name: resource.getrlimit(getattr(resource, constant)) for name, constant in RLIMITS.items()},
        run=run,
        space=space,
    )


def space(path: Path) -> Space:
    """As statvfs reports it."""
    found = os.statvfs(path)
    files = found.f_favail if found.f_files else None
    return Space(found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail, files)


@dataclass(frozen=True)
class Target:
    """What the host is to run: the plan of a recipe, or without one anything. node_rank: the host's number."""

    plan: Plan | None = None
    recipe: Recipe | None = None
    node_rank: int = 0

    @property
    def required(self) -> Level:
        """How bad it is that something is missing: a problem for a plan that needs it, a warning without a recipe."""
        return "problem" if self.plan else "warning"

    @property
    def container(self) -> bool:
        return self.plan is not None and self.plan.container is not None

    @property
    def cuda(self) -> bool:
        """Whether CUDA GPUs may be used."""
        return self.plan is None or self.plan.topology.device == "cuda"

    @property
    def ranks(self) -> int:
        """Ranks on this machine; 2 where nothing is planned."""
        return self.plan.topology.groups[0].processes if self.plan else 2

    @property
    def several(self) -> bool:
        """Whether there may be several ranks, on this machine or on others."""
        return self.plan is None or self.plan.topology.world_size > 1

    @cached_property
    def ops(self) -> tuple[str, ...]:
        """The DeepSpeed ops that the plan builds before the ranks start."""
        argv = [str(word) for item in (self.plan.preparations if self.plan else ()) for word in item.argv]
        return tuple(argv[argv.index("--ops") + 1].split(",")) if "--ops" in argv else ()

    @property
    def builds_ops(self) -> bool:
        return self.plan is None or bool(self.ops)

    @property
    def builds(self) -> bool:
        """Whether a C++ compiler is needed: for DeepSpeed's ops, or for torch.compile, which makes code for the CPU."""
        return self.builds_ops or self.recipe is None or self.recipe.efficiency.compile.enabled

    @property
    def compiles_cuda(self) -> bool:
        """Whether CUDA extensions may be built; of a plan these are DeepSpeed's ops."""
        return self.builds_ops and self.cuda

    @property
    def deepspeed(self) -> bool:
        """Whether DeepSpeed takes part."""
        return self.plan is None or self.plan.strategy.kind.startswith("zero") or self.plan.launcher.kind == "deepspeed"

    @property
    def output_root(self) -> str:
        """The folder of run directories."""
        return self.plan.output_root if self.plan else "runs"
