"""Jupyter notebooks: the shell lines in them, and what to do where the training is in a cell."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from typing import Any

from trainkit.errors import UsageError

SUFFIX = ".ipynb"
_SHELL_CELLS = ("%%bash", "%%sh", "%%shell", "%%script bash")
_LAUNCHED_INSIDE = re.compile(r"\bnotebook_launcher\s*\(")
_TRAINS = re.compile(r"\b(?:Seq2Seq|SFT|DPO)?Trainer\s*\(|\bAccelerator\s*\(|\bdeepspeed\.initialize\s*\(")
_TO_SCRIPT = "jupyter nbconvert --to script"


def shell_text(text: str, path: str) -> str:
    """The shell text of a notebook: `!` lines and shell cells, each in a shell of its own.

    Raises UsageError where it is none, or has none.
    """
    cells = list(_code(text, path))
    lines = [line for cell in cells for line in _shell(cell)]
    if any(line.startswith("(") for line in lines):
        return "\n".join(lines)
    code = "\n".join(cells)
    if _LAUNCHED_INSIDE.search(code):
        what = f"{path}: notebook_launcher starts processes inside the notebook, which no other process can do"
        hint = (
            f"write the function and its call into a script ({_TO_SCRIPT} {path}), and give its processes to trainkit"
        )
        raise UsageError(what, hint=f"{hint}: trainkit import torchrun --nproc_per_node N SCRIPT.py")
    if _TRAINS.search(code):
        what = f"{path}: the training is in the notebook's own cells, which no launcher can start"
        raise UsageError(what, hint=f"make a script of it: {_TO_SCRIPT} {path}; then trainkit import python SCRIPT.py")
    raise UsageError(f"{path}: no cell starts a training", hint="name the script or the command that does")


def _code(text: str, path: str) -> Iterator[str]:
    try:
        content: Any = json.loads(text)
        for cell in content["cells"]:
            if cell["cell_type"] == "code":
                yield "".join(cell["source"])
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is no Jupyter notebook", hint="check the file") from error


def _shell(cell: str) -> Iterator[str]:
    """The shell's part of a cell, and what lasts beyond it: variables, and the folder."""
    first, _, rest = cell.lstrip().partition("\n")
    if first.startswith(_SHELL_CELLS):
        yield f"(\n{rest}\n)"
        return
    lines = iter(cell.splitlines())
    for line in lines:
        bare = line.strip()
        if bare.startswith("!"):
            while bare.endswith("\\"):
                bare += f"\n{next(lines, '').strip()}"
            yield f"({bare[1:]}\n)"
        elif found := re.match(r"%(?:set_)?env\s+(\w+)[=\s]\s*(.*)", bare):
            yield f"export {found[1]}={shlex.quote(found[2])}"
        elif found := re.match(r"%cd\s+(.*)", bare):
            yield f"cd {found[1]}"
        elif found := re.match(r"os\.chdir\((['\"])(.*)\1\)", bare):
            yield f"cd {shlex.quote(found[2])}"
        elif found := re.match(r"os\.environ\[(['\"])(\w+)\1\]\s*=\s*(?:(['\"])(.*)\3|(.*))", bare):
            # What Python makes is known to nobody here, as what a command prints.
            value = shlex.quote(found[4]) if found[3] else f'"$(python -c {shlex.quote(found[5])})"'
            yield f"export {found[2]}={value}"
