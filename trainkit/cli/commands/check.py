"""`trainkit check`: validation only, for one recipe or many."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

import typer

from trainkit.cli.options import Json, Presets
from trainkit.cli.words import take_apart
from trainkit.errors import ExitCode, TrainkitError, UsageError


def check(context: typer.Context, presets: Presets = None, as_json: Json = False) -> None:
    """Validate recipes without planning or starting anything. Exit code 2 means that one of them is wrong.

    RECIPE is a file, a run directory or a shipped name.

    Example: trainkit check recipes/*.yaml
    """
    from trainkit.cli.diagnostics import show_diagnostics
    from trainkit.cli.pipeline import resolve_request

    words = take_apart(context.args, most=len(context.args), what="recipes")
    if not words.positional:
        raise UsageError("no recipe is named", hint="trainkit check RECIPE...; `trainkit ls` shows the shipped ones")
    reports: list[dict[str, Any]] = []
    for recipe in words.positional:
        try:
            diagnostics = resolve_request(recipe, words.overrides, presets or ()).warnings
            valid = True
        except TrainkitError as error:
            diagnostics, valid = error.diagnostics, False
        reports.append({"recipe": recipe, "valid": valid, "diagnostics": [asdict(item) for item in diagnostics]})
        if not as_json:
            show_diagnostics(diagnostics)
            sys.stdout.write(f"{recipe}: {'ok' if valid else 'wrong'}\n")
    if as_json:
        sys.stdout.write(json.dumps(reports, indent=2) + "\n")
    if not all(report["valid"] for report in reports):
        raise typer.Exit(ExitCode.USAGE)
