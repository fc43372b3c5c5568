"""Data: what a sample is, and the order in which every rank sees the samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from trainkit.lazy import Registry
from trainkit.recipe.schema import Recipe
from trainkit.trainer.data.source import Source

# `data.kind` -> the function that opens it. Each raises TrainingError, naming the setting or file, for unusable data.
SOURCES: Registry[Callable[[Recipe, Path], Source]] = Registry(
    {
        "text": "trainkit.trainer.data.text:open_source",
        "random": "trainkit.trainer.data.random:open_source",
        "tokens": "trainkit.trainer.data.tokens:open_source",
        "dataset": "trainkit.trainer.data.dataset:open_source",
        "target": "trainkit.trainer.data.target:open_source",
    }
)
