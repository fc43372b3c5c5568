"""`trainkit ls`: the shipped recipes, presets and machines."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from trainkit.cli.disk import MACHINES, MODELINE, Disk
from trainkit.cli.options import Json
from trainkit.errors import ExitCode
from trainkit.text import table


def ls(
    pattern: Annotated[str, typer.Argument(metavar="[WORD]", help="Show only names that hold this word.")] = "",
    as_json: Json = False,
) -> None:
    """List what is shipped. `trainkit cp NAME` copies a recipe or preset, `extends: NAME` builds on a preset.

    Machines are for planning: `trainkit plan RECIPE --on 8xh100`.

    Example: trainkit ls strategy
    """
    from trainkit.cli.machines import profiles

    known = {**Disk().shipped(), **{f"{MACHINES}/{name}": str(path) for name, path in profiles().items()}}
    found = [(name, path, first_comment(Path(path))) for name, path in sorted(known.items()) if pattern in name]
    if as_json:
        listing = [dict(zip(("name", "path", "description"), each, strict=True)) for each in found]
        sys.stdout.write(json.dumps(listing, indent=2) + "\n")
        return
    if not found:
        sys.stderr.write(f"nothing shipped has {pattern!r} in its name; `trainkit ls` shows all\n")
        raise typer.Exit(ExitCode.USAGE)
    sys.stdout.write(table((name, description) for name, _, description in found))


def first_comment(path: Path) -> str:
    """The first comment of a YAML file that is not an editor's modeline: what the file is for."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and not line.startswith(MODELINE):
            return line.lstrip("# ").rstrip()
    return ""
