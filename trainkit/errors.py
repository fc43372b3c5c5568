"""The closed tree of errors, the diagnostics that they carry, and the exit codes."""

from __future__ import annotations

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


Severity = Literal["error", "warning", "note"]


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


def in_words(error: TrainkitError) -> str:
    """What a rank or a worker, which knows of no recipe file, writes of a failure: a line for each finding."""
    return "".join(f"error: {each.what}{f' ({each.hint})' if each.hint else ''}\n" for each in error.diagnostics)
