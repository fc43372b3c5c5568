"""Environments of fewer packages than the tests' own: what extras of trainkit bring, and a Python with nothing else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from trainkit.distribution import NAME


def plain(name: str) -> str:
    return name.lower().replace("_", "-")


def brought_by(extras: Iterable[str]) -> set[str]:
    """The names of trainkit's own distribution and of all that it requires with the extras."""
    found: set[tuple[str, frozenset[str]]] = set()
    _collect(NAME, extras, found)
    return {NAME, *(name for name, _ in found)}


def _collect(distribution: str, extras: Iterable[str], found: set[tuple[str, frozenset[str]]]) -> None:
    for requirement in map(Requirement, metadata.requires(distribution) or ()):
        marker = requirement.marker
        if marker and not any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            continue
        one = plain(requirement.name), frozenset(requirement.extras)
        if one not in found:
            found.add(one)
            _collect(requirement.name, requirement.extras, found)


def python_with(extras: Iterable[str], folder: Path) -> Path:
    """A virtual environment in which the packages of the extras are linked to; its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site = next((folder / "lib").glob("python3*/site-packages"))
    for distribution in map(metadata.distribution, brought_by(extras)):
        for file in distribution.files or ():
            there = Path(str(distribution.locate_file(file.parts[0])))
            if file.parts[0] == "..":
                program = Path(str(distribution.locate_file(file))).resolve()
                # Scripts name the interpreter that they are for.
                if program.parent == Path(sys.executable).parent and not program.read_bytes().startswith(b"#!"):
                    (folder / "bin" / program.name).symlink_to(program)
            elif file.parts[0] != "__pycache__" and not (site / there.name).exists():
                (site / there.name).symlink_to(there)
    return folder / "bin" / "python"
