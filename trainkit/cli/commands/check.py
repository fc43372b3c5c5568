"""`trainkit check`: validation only, for one recipe or many."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated, Any

import typer

from trainkit.cli.options import Json, Presets
from trainkit.errors import ExitCode, TrainkitError


def check(
    recipes: Annotated[
        list[str], typer.Argument(metavar="RECIPE...", help="Recipe files, run directories or shipped names.")
    ],
    presets: Presets = None,
    as_json: Json = False,
) -> None:
    """Validate recipes without planning or starting anything. Exit code 2 means that one of them is wrong.

    Example: trainkit check recipes/*.yaml
    """
    from trainkit.cli.diagnostics import show_diagnostics
    from trainkit.cli.pipeline import resolve_request

    reports: list[dict[str, Any]] = []
    for recipe in recipes:
        try:
            diagnostics = resolve_request(recipe, (), presets or ()).warnings
            valid = True
        except TrainkitError as error:
            diagnostics, valid = error.diagnostics, False
        reports.append({"recipe": recipe, "valid": valid, "diagnostics": [asdict(item) for item in diagnostics]})
        if not as_json:
            show_diagnostics(diagnostics)
            sys.stdout.write(f"{recipe}: {'ok' if valid else 'wrong'}\n")
    if as_json:
        sys.stdout.write(json.dumps(reports, indent=2, ensure_ascii=False) + "\n")
    if not all(report["valid"] for report in reports):
        raise typer.Exit(ExitCode.USAGE)
