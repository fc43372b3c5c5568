"""Every source of data by its kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from trainkit.recipe.schema import Recipe
from trainkit.trainer.data import dataset, jsonl, random, target, text, tokens
from trainkit.trainer.data.source import Source

# Each raises TrainingError, with the setting or file to blame, for what cannot be trained on.
SOURCES: Mapping[str, Callable[[Recipe, Path], Source]] = {
    "text": text.open_source,
    "random": random.open_source,
    "tokens": tokens.open_source,
    "jsonl": jsonl.open_source,
    "dataset": dataset.open_source,
    "target": target.open_source,
}
