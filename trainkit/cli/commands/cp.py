"""`trainkit cp`: copy a shipped recipe or preset, to edit it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from trainkit.cli.disk import MODELINE, Disk, schema_uri
from trainkit.cli.options import Force
from trainkit.errors import UsageError


def cp(
    name: Annotated[str, typer.Argument(help="A name that `trainkit ls` shows.")],
    destination: Annotated[str, typer.Argument(help="File or folder (`new/` is made); default: here.")] = ".",
    force: Force = False,
) -> None:
    """Copy a shipped recipe or preset, to edit it.

    Example: trainkit cp quickstart my-run.yaml
    """
    shipped = Disk().shipped()
    path = shipped.get(f"recipes/{name}") or shipped.get(name)
    if path is None:
        from trainkit.recipe.validation.suggestions import nearest

        near = nearest(name, [*shipped, *(key.removeprefix("recipes/") for key in shipped)])
        hint = f"did you mean {near!r}?" if near else "`trainkit ls` shows the names"
        raise UsageError(f"nothing shipped is named {name!r}", hint=hint)
    source, target = Path(path), Path(destination)
    if destination.endswith("/") or target.is_dir():
        target = target / source.name
    # With the modeline of this installation: a copy elsewhere is as far from the schema as it may be.
    lines = [line for line in source.read_text(encoding="utf-8").splitlines(keepends=True) if MODELINE not in line]
    text = f"{MODELINE}{schema_uri()}\n{''.join(lines)}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        if not target.exists():
            raise UsageError(f"{target.parent} is not a folder", hint="give another destination") from error
        raise UsageError(f"{target} exists", hint="give another name, or --force to replace it") from error
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}", hint="give another destination") from error
    sys.stdout.write(f"{target}\n")
