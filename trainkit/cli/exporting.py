"""`trainkit plan --export`: the other tool's files, on the terminal or in a folder, and what they do not carry."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from trainkit.cli.diagnostics import show_diagnostics
from trainkit.errors import Diagnostic, UsageError
from trainkit.machine.facts import Facts
from trainkit.recipe.resolved import Resolved


def write_export(resolved: Resolved, facts: Facts, tool: str, folder: str | None) -> None:
    """Export the plan of a recipe that has been found sound. Raises UsageError where it cannot be written."""
    from trainkit.convert.export_formats import EXPORTS, export
    from trainkit.planner.decisions import decide

    if tool not in EXPORTS:
        raise UsageError(f"there is no export to {tool!r}", hint=f"choose one of: {', '.join(EXPORTS)}")
    context, *_ = decide(resolved, facts, ())
    made = export(context, tool, folder or ".")
    if made.left:
        what = f"{tool} is not told: {', '.join(made.left)}"
        show_diagnostics((Diagnostic("note", what, hint="tell the program itself, or keep the recipe"),))
    where = "the first line of the file shows the whole command"
    show_diagnostics([Diagnostic("note", each, hint=where) for each in made.notes])
    if folder is not None:
        _write(Path(folder), made.files)
    elif len(made.files) == 1:
        sys.stdout.write(next(iter(made.files.values())))
    else:
        raise UsageError(f"there are {len(made.files)} files: {', '.join(made.files)}", hint="add --output FOLDER")


def _write(folder: Path, files: Mapping[str, str]) -> None:
    from trainkit.files import write_atomically

    taken = [name for name in files if (folder / name).exists()]
    if taken:
        raise UsageError(f"{folder / taken[0]} exists", hint="give another --output")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_atomically(folder / name, content)
            sys.stdout.write(f"{folder / name}\n")
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror}", hint="give another --output") from error
