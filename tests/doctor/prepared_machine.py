"""A machine under a temporary root, in good order until a test spoils it; programs on it are real executables."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainkit.cli.pipeline import resolve_request
from trainkit.doctor.check import CheckResult, Commands, Host, Level, Space, Target
from trainkit.doctor.examine import CHECKS, apply
from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan

MIB, GIB = 2**20, 2**30
PLENTY = Space(total=100 * GIB, free=90 * GIB, files=1_000_000)


@dataclass
class Machine:
    """What a test may change before it calls `examine`. commands: what may run; environ: PATH is the machine's own."""

    root: Path
    commands: Commands
    environ: dict[str, str] = field(default_factory=dict)
    facts: Facts = field(
        default_factory=lambda: Facts("linux", "x86_64", "localhost", "3.11.9", sys.executable, 4, 64 * GIB)
    )
    limits: Mapping[str, tuple[int, int]] = field(
        default_factory=lambda: {"open files": (65536, 65536), "processes": (-1, -1), "locked memory": (-1, -1)}
    )
    spaces: dict[Path, Space] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.bin, self.site, self.home, self.work = (
            self.folder(name) for name in ("usr/bin", "site-packages", "home/ada", "work")
        )
        self.folder("dev/shm")
        self.environ |= {"PATH": str(self.bin), "HOME": str(self.home)}

    def folder(self, path: str) -> Path:
        """A folder below the root."""
        folder = self.root / path
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def file(self, path: str, text: str = "") -> Path:
        """A file below the root."""
        self.folder(str(Path(path).parent))
        (self.root / path).write_text(text)
        return self.root / path

    def program(self, path: str, script: str) -> Path:
        """A real executable below the root: a shell script."""
        program = self.file(path, f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        return program

    def package(self, name: str, version: str, *requires: str, files: tuple[str, ...] = ()) -> None:
        """An installed distribution: its metadata and its files, without which Python 3.12 does not list them."""
        info = f"site-packages/{name.replace('-', '_')}-{version}.dist-info"
        lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}", *(f"Requires-Dist: {r}" for r in requires)]
        self.file(f"{info}/METADATA", "\n".join(lines) + "\n")
        self.file(f"{info}/RECORD", "".join(f"{path},,\n" for path in files))
        for path in files:
            self.file(f"site-packages/{path}")
        self.facts = replace(self.facts, packages={**self.facts.packages, name: version})

    def host(self, **changes: Any) -> Host:
        """The frozen value that checks get."""
        values: dict[str, Any] = {
            "facts": self.facts,
            "environ": dict(self.environ),
            "root": self.root,
            "folder": self.work,
            "packages": (str(self.site),),
            "headers": Path(sysconfig.get_path("include")),
            "limits": self.limits,
            "run": replace(self.commands, environ=dict(self.environ)),
            "space": lambda path: self.spaces.get(path, PLENTY),
        }
        return Host(**(values | changes))

    def examine(self, name: str, target: Target | None = None, **changes: Any) -> CheckResult:
        """What one check finds here."""
        return apply(CHECKS[name], self.host(**changes), target or Target())

    def finds(self, name: str, level: Level, *words: str, target: Target | None = None, **changes: Any) -> str:
        """What one check says here: its level is this, and these words are in it."""
        result = self.examine(name, target, **changes)
        said = text_of(result)
        assert result.level == level, said
        assert not [each for each in words if each not in said], said
        return said


def text_of(result: CheckResult) -> str:
    """Everything that a result says."""
    return "\n".join(
        "\n".join((finding.level, finding.what, *finding.evidence, *finding.fix)) for finding in result.findings
    )


def target_for(machine: Machine, recipe: str, *overrides: str) -> Target:
    """The plan of a shipped recipe on the machine."""
    resolved = resolve_request(recipe, overrides, ())
    return Target(build_plan(resolved, machine.facts).plan, resolved.recipe)
