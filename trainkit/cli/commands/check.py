"""`trainkit check`: validation only, for one recipe or many."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import typer

from trainkit.cli.grammar import take_apart
from trainkit.cli.options import Json, Presets
from trainkit.errors import Diagnostic, ExitCode, TrainkitError, UsageError


def check(context: typer.Context, presets: Presets = None, as_json: Json = False) -> None:
    """Validate recipes without planning or starting anything. Exit code 2 means that one of them is wrong.

    RECIPE is a file, a run directory or a shipped name. Its variants are validated with it.

    Example: trainkit check recipes/*.yaml
    """
    from trainkit.cli.diagnostics import show_diagnostics

    words = take_apart(context.args, most=len(context.args), what="recipes")
    if not words.positional:
        raise UsageError("no recipe is named", hint="trainkit check RECIPE...; `trainkit ls` shows the shipped ones")
    reports: list[dict[str, Any]] = []
    for recipe in words.positional:
        diagnostics, valid = judge(recipe, words.overrides, presets or ())
        reports.append({"recipe": recipe, "valid": valid, "diagnostics": [asdict(item) for item in diagnostics]})
        if not as_json:
            show_diagnostics(diagnostics)
            sys.stdout.write(f"{recipe}: {'ok' if valid else 'wrong'}\n")
    if as_json:
        sys.stdout.write(json.dumps(reports, indent=2) + "\n")
    if not all(report["valid"] for report in reports):
        raise typer.Exit(ExitCode.USAGE)


def judge(recipe: str, overrides: Sequence[str], presets: Sequence[str]) -> tuple[list[Diagnostic], bool]:
    """What is to be said of a recipe and of each of its variants, every finding once, and whether all are valid."""
    from trainkit.cli.pipeline import resolve_request

    found: list[Diagnostic] = []
    valid = True
    variants: list[str | None] = [None]
    for variant in variants:
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
