"""Where the checks look: environment, files, processes and limits as one frozen value, so that a test can give it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from trainkit.doctor.commands import Done
from trainkit.machine.facts import Facts
from trainkit.plan.model import Plan
from trainkit.recipe.schema import Recipe


@dataclass(frozen=True, slots=True)
class Space:
    """A file system. In bytes, as this user may fill it; files: how many more it takes, None where it has no count."""

    total: int
    free: int
    files: int | None = None


class Run(Protocol):
    """Runs a command to its end, or for so many seconds. Never raises for what the command does."""

    def __call__(
        self, argv: tuple[str, ...], limit: float, *, environ: Mapping[str, str] | None = None, text: str = ""
    ) -> Done:
        """environ: the command's whole environment, the surroundings' own by default. text: its standard input."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Everything that a check may look at.

    root: where /proc, /sys, /dev, /usr and the like are looked for. folder: the working folder.
    packages: folders of Python packages, as sys.path has them. headers: folder of the interpreter's C headers.
    space: of the file system of a path; raises OSError. ceilings: soft and hard limit of this process by name
    (``open files``, ``processes``, ``locked memory``); -1 is none.
    """

    facts: Facts
    environ: Mapping[str, str]
    root: Path
    folder: Path
    packages: tuple[str, ...]
    headers: Path
    ceilings: Mapping[str, tuple[int, int]]
    run: Run
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
        """The user's home folder."""
        return Path(self.environ.get("HOME") or "~").expanduser()


@dataclass(frozen=True)
class Aim:
    """What this machine is to be fit for: the plan of a recipe, or without one anything. node_rank: its number."""

    plan: Plan | None = None
    recipe: Recipe | None = None
    node_rank: int = 0

    @property
    def anything(self) -> bool:
        """Whether no recipe narrows it down."""
        return self.plan is None

    @property
    def cuda(self) -> bool:
        """Whether CUDA cards may be used."""
        return self.plan is None or self.plan.topology.device == "cuda"

    @property
    def ranks(self) -> int:
        """Ranks on this machine; 2 where nothing is planned."""
        return self.plan.topology.groups[0].processes if self.plan else 2

    @cached_property
    def ops(self) -> tuple[str, ...]:
        """The DeepSpeed ops that the plan builds before the ranks start."""
        words = [str(word) for item in (self.plan.preparations if self.plan else ()) for word in item.argv]
        return tuple(words[words.index("--ops") + 1].split(",")) if "--ops" in words else ()

    @property
    def deepspeed(self) -> bool:
        """Whether DeepSpeed takes part."""
        return self.plan is None or self.plan.strategy.kind.startswith("zero") or self.plan.launcher.kind == "deepspeed"

    @property
    def compiles(self) -> bool:
        """Whether torch.compile is used, which makes C++ code on the CPU."""
        return self.recipe is None or self.recipe.efficiency.compile.enabled

    @property
    def compiles_cuda(self) -> bool:
        """Whether CUDA extensions are known to be built: DeepSpeed's ops on cards."""
        return self.plan is not None and bool(self.ops) and self.cuda

    @property
    def output_root(self) -> str:
        """The folder of run directories."""
        return self.plan.output_root if self.plan else "runs"
