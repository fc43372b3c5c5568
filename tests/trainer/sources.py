"""Data sets of a few rows in temporary folders, opened as the trainer opens them, and their samples as text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from trainkit.recipe.schema import Recipe
from trainkit.trainer.data import SOURCES
from trainkit.trainer.data.source import Source

TINY = {"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 8, "intermediate_size": 8, "vocab_size": 256}
BERT: dict[str, Any] = {"kind": "hf", "architecture": "bert", "task": "sequence_classification", "config": TINY}


def lines(path: Path, rows: Iterable[object]) -> Path:
    """A file of JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


def parquet(path: Path, rows: Sequence[Mapping[str, Any]], group: int = 20, **options: Any) -> Path:
    arrow, files = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_table(arrow.Table.from_pylist(list(rows)), path, row_group_size=group, **options)
    return path


def opened(kind: str, path: object = None, model: Mapping[str, Any] | None = None, **settings: Any) -> Source:
    """A source of a kind of data. path: of a file or folder, or several."""
    return SOURCES[kind](recipe_of(kind, path, model, **settings), Path())


def recipe_of(kind: str, path: object = None, model: Mapping[str, Any] | None = None, **settings: Any) -> Recipe:
    """The recipe of such a source."""
    named = {"path": [str(each) for each in path] if isinstance(path, list) else str(path)} if path else {}
    recipe = {"data": {"kind": kind, **named, **settings}, **({"model": model} if model else {})}
    return Recipe.model_validate(recipe)


def shown(ids: Any) -> list[str]:
    """Bytes as text, with a dot where nothing is predicted."""
    return ["".join("." if each < 0 else chr(each) for each in row) for row in ids.tolist()]
