"""`trainkit cp`: copy a shipped recipe or preset, to edit it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from trainkit.cli.disk import Disk, schema_uri
from trainkit.errors import UsageError

MODELINE = "# yaml-language-server: $schema="


def cp(
    name: Annotated[str, typer.Argument(help="A name that `trainkit ls` shows.")],
    destination: Annotated[str, typer.Argument(help="File or folder (`new/` is made); default: here.")] = ".",
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
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
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("w" if force else "x", encoding="utf-8") as file:
            file.write(with_schema(source))
    except FileExistsError as error:
        if not target.exists():
            raise UsageError(f"{target.parent} is not a folder", hint="give another destination") from error
        raise UsageError(f"{target} exists", hint="give another name, or --force to replace it") from error
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}", hint="give another destination") from error
    sys.stdout.write(f"{target}\n")


def with_schema(source: Path) -> str:
    """The file's text with a modeline that leads editors to the installed JSON Schema, wherever the copy is."""
    text = source.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines(keepends=True) if not line.startswith(MODELINE)]
    return f"{MODELINE}{schema_uri()}\n{''.join(lines)}"
