"""`trainkit check`: validation only, for one recipe or many."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import typer

from trainkit.cli.diagnostics import show_diagnostics
from trainkit.cli.options import Json, Presets
from trainkit.cli.pipeline import no_recipe, resolve_request, split_line
from trainkit.errors import Diagnostic, ExitCode, TrainkitError


def check(context: typer.Context, presets: Presets = None, as_json: Json = False) -> None:
    """Validate recipes without planning or starting anything. Exit code 2 means that one of them is wrong.

    RECIPE is a file, a run directory or a shipped name. Its variants are validated with it.

    Example: trainkit check recipes/*.yaml
    """
    recipes, overrides = split_line(context.args, most=len(context.args), what="recipes")
    if not recipes:
        raise no_recipe("check RECIPE...")
    reports: list[dict[str, Any]] = []
    for recipe in recipes:
        diagnostics, valid = judge(recipe, overrides, presets)
        reports.append({"recipe": recipe, "valid": valid, "diagnostics": [asdict(item) for item in diagnostics]})
        if not as_json:
            show_diagnostics(diagnostics)
            sys.stdout.write(f"{recipe}: {'ok' if valid else 'wrong'}\n")
    if as_json:
        sys.stdout.write(json.dumps(reports, indent=2) + "\n")
    if not all(report["valid"] for report in reports):
        raise typer.Exit(ExitCode.USAGE)


def judge(recipe: str, overrides: Sequence[str], presets: Sequence[str] | None) -> tuple[list[Diagnostic], bool]:
    """The findings on a recipe and each of its variants, every one once, and whether all are valid."""
    found: list[Diagnostic] = []
    valid = True
    variants: list[str | None] = [None]
    for variant in variants:  # which grows: the recipe without a variant names them
        try:
            resolved = resolve_request(recipe, overrides, presets, variant=variant)
            found += resolved.warnings
            if variant is None:
                variants += resolved.variants
        except TrainkitError as error:
            found += error.diagnostics
            valid = False
    unique = {(each.what, each.key, each.origin.place if each.origin else ""): each for each in reversed(found)}
    return list(reversed(unique.values())), valid
