"""Every error that trainkit raises, and what it says of the system's own."""

from __future__ import annotations

import errno
import re
import resource
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal


class ExitCode(IntEnum):
    """What trainkit's own outcomes look like to a shell. A program's failure keeps the program's own code."""

    OK = 0
    FAILED = 1  # of a program: the built-in trainer's, for what it can explain
    USAGE = 2
    BUG = 3
    MACHINE = 4


# A blocker is an error of this machine alone: the plan is sound, and `run` ends with exit code 4.
Severity = Literal["error", "blocker", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from.

    layer: what brought it, as a person would say it: ``preset strategy/fsdp``, ``file team.yaml``, ``flag``.
    strength: position among the layers, weakest 0; a stronger layer wins.
    source: the file's path, the variable's name, or the flag as typed.
    line, column: 1-based; 0 where the source has no lines.
    length: how many characters the caret underlines.
    text: the source line (or the flag's text), for showing.
    """

    layer: str
    strength: int
    source: str
    line: int = 0
    column: int = 0
    length: int = 1
    text: str = ""

    @property
    def place(self) -> str:
        """``file:line:column``, or the source alone where there are no lines."""
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One finding: what is wrong, where, why, and what to do next."""

    severity: Severity
    what: str
    key: str = ""  # dotted recipe key, where there is one
    origin: Origin | None = None
    why: str = ""
    hint: str = ""


def blocker(what: str, hint: str = "", key: str = "") -> Diagnostic:
    """Why this machine cannot run a plan that is sound."""
    return Diagnostic("blocker", what, key, hint=hint)


def warning(what: str, hint: str = "", key: str = "") -> Diagnostic:
    """What is probably not meant."""
    return Diagnostic("warning", what, key, hint=hint)


def note(what: str, hint: str = "", key: str = "") -> Diagnostic:
    return Diagnostic("note", what, key, hint=hint)


class TrainkitError(Exception):
    """Base of every error that trainkit raises on purpose; carries diagnostics and decides the exit code."""

    exit_code: ExitCode = ExitCode.BUG

    def __init__(self, diagnostics: Iterable[Diagnostic] | Diagnostic | str, *, hint: str = "") -> None:
        if isinstance(diagnostics, str):
            diagnostics = Diagnostic("error", diagnostics, hint=hint)
        if isinstance(diagnostics, Diagnostic):
            diagnostics = (diagnostics,)
        self.diagnostics: tuple[Diagnostic, ...] = tuple(diagnostics)
        super().__init__("; ".join(d.what for d in self.diagnostics))

    @property
    def hints(self) -> tuple[str, ...]:
        """What to do, each thing once."""
        return tuple(dict.fromkeys(d.hint for d in self.diagnostics if d.hint))


class RecipeError(TrainkitError):
    """The recipe, a layer of it, or a combination in it is wrong."""

    exit_code = ExitCode.USAGE


class UsageError(TrainkitError):
    """The command line is wrong."""

    exit_code = ExitCode.USAGE


class MachineError(TrainkitError):
    """The recipe is sound, but this machine cannot run the plan."""

    exit_code = ExitCode.MACHINE


class TrainingError(TrainkitError):
    """The built-in trainer cannot start or go on, for a reason that it can name."""

    exit_code = ExitCode.FAILED


def one_line_each(error: TrainkitError) -> str:
    """What a rank or a worker, which knows of no recipe file, writes of a failure: a line for each finding."""
    return "".join(f"error: {each.what}{f' ({each.hint})' if each.hint else ''}\n" for each in error.diagnostics)


_ROOM = "make room, or write to another place"
_DISK = "the disk or its server fails: see dmesg, and write to another place"
_FILES = "raise the number of open files (ulimit -n)"
_PROCESSES = "raise the number of processes (ulimit -u, or pids.max of the cgroup), or lower data.workers"
MEMORY = (
    "memory ran out: lower batch.micro or data.workers, or raise the limit (ulimit -v, or memory.max of the cgroup)"
)
# Errors of the machine, wherever they happen -> what to do.
HINTS: dict[int, str] = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EFBIG: "raise the size of files (ulimit -f), or write to another place",
    errno.EROFS: "write to another place",
    errno.EIO: _DISK,
    errno.ESTALE: _DISK,
    errno.ETIMEDOUT: _DISK,
    errno.EMFILE: _FILES,
    errno.ENFILE: _FILES,
    errno.EAGAIN: _PROCESSES,
    errno.ENOMEM: MEMORY,
}
# What libraries make of the same -> what it is, what to do.
_SAID: dict[str, tuple[str, str]] = {
    r"can't start new thread|Thread creation failed": (
        "no more threads may be started",
        f"{_PROCESSES}; or the memory (ulimit -v)",
    ),
    r"Too many open files": ("too many open files", _FILES),
    r"(?:unable to|could not) (?:write to|open|mmap|allocate|resize).*(?:shared memory|</?torch_)|out of shared memory|"
    r"Bus error": ("shared memory (/dev/shm) is full, or cannot be used", "enlarge /dev/shm, or set data.workers to 0"),
    r"failed to map segment|can't allocate memory|Cannot allocate memory|bad_alloc": (
        "memory cannot be allocated",
        MEMORY,
    ),
    r"Connection (?:closed|reset) by peer|Broken pipe|Socket closed|Application timeout caused pair closure|"
    r"Timed out waiting \d+ms": ("another rank ended, or can no longer be reached", "see the other ranks' logs"),
    r"No space left on device": ("no space left on device", _ROOM),
}


def refusal(error: BaseException) -> tuple[str, str] | None:
    """What the system refused, with the path where it is known, and a hint; None for any other error."""
    if isinstance(error, MemoryError):
        return "memory cannot be allocated", MEMORY
    # What Python says where it can allocate nothing, not even its own error.
    if isinstance(error, SystemError) and resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return f"memory cannot be allocated ({error})", MEMORY
    if isinstance(error, OSError) and error.errno in HINTS:
        path = f": {error.filename}" if error.filename else ""
        return f"the system refuses: {error.strerror}{path}", HINTS[error.errno]
    if isinstance(error, OSError | RuntimeError | ImportError):
        words = " ".join(str(error).split())
        for pattern, (what, hint) in _SAID.items():
            if re.search(pattern, words):
                return f"{what} ({words[:200]})", hint
    return None


def refusal_in(lines: Iterable[str]) -> tuple[str, str] | None:
    """The first refusal of the system that a log shows, as of :func:`refusal`."""
    return next(filter(None, (refusal(RuntimeError(line.strip())) for line in lines)), None)


def first_line(error: BaseException) -> str:
    """A library's message in one line: transformers and Arrow follow it with pages."""
    kind = "" if isinstance(error, ValueError | OSError | ImportError | RuntimeError) else f"{type(error).__name__}: "
    return kind + str(error).strip().partition("\n")[0][:300]
