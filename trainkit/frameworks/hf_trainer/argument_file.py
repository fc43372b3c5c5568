"""The JSON file that scripts on Trainer take in the place of all their flags, as the flags that it stands for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from trainkit.frameworks.base.detection import MARKS
from trainkit.frameworks.base.draft import Draft, ImportContext
from trainkit.recipe.layers.paths import absolute


def flags_in_file(draft: Draft, context: ImportContext, words: Sequence[str]) -> list[str]:
    """The words, or where they are one JSON file with fields of TrainingArguments, the flags that say the same."""
    if len(words) != 1 or not words[0].endswith(".json"):
        return list(words)
    try:
        fields = json.loads(context.files.read(absolute(words[0], context.cwd)))
    except (OSError, ValueError):
        return list(words)  # a word of the script's own
    if not isinstance(fields, dict) or not MARKS & fields.keys():
        return list(words)
    draft.remark(f"{words[0]} is taken apart: its values stand here, and reach the script as flags.")
    return [word for name, value in fields.items() for word in _flag(name, value)]


def _flag(name: str, value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
