"""Imports without a process: a recipe out of words and files that exist in memory alone."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.made_up_recipes import MemoryFiles
from trainkit.convert.importing import check_import, import_words
from trainkit.errors import Diagnostic, RecipeError, UsageError
from trainkit.recipe.resolve import resolve
from trainkit.recipe.resolved import Request, Resolved
from trainkit.recipe.schema.launching import program_argv
from trainkit.tools.base.imported_recipe import ImportContext

HERE = "/here"


def context(files: Mapping[str, Any]) -> ImportContext:
    """A context with these files beside the usual scripts; a mapping is written as JSON."""
    contents = {name: each if isinstance(each, str) else json.dumps(each) for name, each in files.items()}
    scripts = dict.fromkeys(("run_glue.py", "train.py"), "")
    return ImportContext(MemoryFiles({f"{HERE}/{name}": each for name, each in (scripts | contents).items()}), HERE)


def imported(line: str, files: Mapping[str, Any] | None = None, **more: Any) -> str:
    """The recipe's text for a command or a file name."""
    return checked(shlex.split(line), context(files or {}), f"{HERE}/recipe.yaml", **more)


def script(text: str, files: Mapping[str, Any] | None = None, **more: Any) -> str:
    """The recipe's text for a shell script."""
    return imported("go.sh", {"go.sh": text, **(files or {})}, **more)


def refusal(line: str, files: Mapping[str, Any] | None = None, **more: Any) -> Diagnostic:
    """The one error for which an import is refused; it has a next step."""
    with pytest.raises((UsageError, RecipeError)) as caught:
        imported(line, files, **more)
    (found,) = caught.value.diagnostics
    assert found.hint
    return found


def checked(words: Sequence[str], there: ImportContext, target: str, **more: Any) -> str:
    """The recipe's text for words that are imported and checked as the command does it."""
    found = import_words(words, there, target, **more)
    check_import(found, there, target)
    return found.text


def read(
    text: str,
    files: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    variant: str | None = None,
) -> Resolved:
    """The text as trainkit reads it."""
    there = context({**(files or {}), "recipe.yaml": text})
    request = Request(recipe=f"{HERE}/recipe.yaml", cwd=HERE, environ=environ or {}, variant=variant)
    return resolve(request, there.files)


def settings(text: str, files: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What the text sets, by key; words of the program under program.args as they are."""
    resolved = read(text, files)
    return {key: resolved.history[key][-1].value for key in resolved.history if key not in ("version", "name")}


def columns_of(found: Mapping[str, Any]) -> dict[str, str]:
    """What settings say of the columns of rows, by part."""
    start = "data.columns."
    return {key.removeprefix(start): each for key, each in found.items() if key.startswith(start)}


def argv(text: str, environ: Mapping[str, str] | None = None) -> list[str]:
    """The words of the text's program."""
    return program_argv(read(text, environ=environ).recipe.program.args)


def comments(text: str) -> str:
    """All comments as one line."""
    return " ".join(line.strip("# ") for line in text.splitlines() if line.startswith("#"))
