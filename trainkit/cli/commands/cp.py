"""`trainkit cp`: copy a shipped recipe or preset, to edit it."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path
from typing import Annotated

import typer

from trainkit.errors import UsageError


def cp(
    name: Annotated[str, typer.Argument(help="A name that `trainkit ls` shows.")],
    destination: Annotated[Path | None, typer.Argument(help="File or folder; default: the working folder.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Copy a shipped recipe or preset, to edit it.

    Example: trainkit cp quickstart my-run.yaml
    """
    from trainkit.cli.disk import Disk

    shipped = Disk().shipped()
    path = shipped.get(f"recipes/{name}") or shipped.get(name)
    if path is None:
        near = difflib.get_close_matches(name, [*shipped, *(key.removeprefix("recipes/") for key in shipped)], n=1)
        raise UsageError(
            f"nothing shipped is named {name!r}",
            hint=f"did you mean {near[0]!r}?" if near else "`trainkit ls` shows the names",
        )
    source = Path(path)
    target = destination or Path()
    if target.is_dir():
        target = target / source.name
    try:
        with target.open("wb" if force else "xb") as file:
            file.write(source.read_bytes())
    except FileExistsError as error:
        raise UsageError(f"{target} exists", hint="give another name, or --force to replace it") from error
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}", hint="give another destination") from error
    sys.stdout.write(f"{target}\n")
