"""Rows in JSON lines: one object a line."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from trainkit.recipe.schema import JsonlData, Recipe
from trainkit.trainer.data.row_dataset import source_of_rows
from trainkit.trainer.data.rows import json_lines
from trainkit.trainer.data.source import Source


def open_source(recipe: Recipe, run_dir: Path) -> Source:
    """The source of a recipe whose `data.kind` is jsonl. TrainingError names the file and the line to blame."""
    data = cast("JsonlData", recipe.data)
    paths = [data.path] if isinstance(data.path, str) else data.path
    return source_of_rows(recipe, json_lines([Path(path).absolute() for path in paths]))
