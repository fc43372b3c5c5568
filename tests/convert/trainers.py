"""The settings files of other trainers in `tests/corpus/trainers`, and what of a file a recipe's text names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.convert.reading import imported

CORPUS = Path(__file__).parent.parent / "corpus" / "trainers"


def files_of(tool: str) -> dict[str, str]:
    """The files of a tool's folder by their paths in it."""
    folder = CORPUS / tool
    return {str(each.relative_to(folder)): each.read_text() for each in sorted(folder.rglob("*")) if each.is_file()}


def set_leaves(tree: Any) -> Iterator[str]:
    """Names of all that is set in a file, at any depth."""
    for name, value in tree.items() if isinstance(tree, Mapping) else ():
        items = value if isinstance(value, list) else [value]
        if any(isinstance(each, Mapping) and each for each in items):
            for each in items:
                yield from set_leaves(each)
        elif value is not None and value is not False:
            yield str(name)


def unnamed(tool: str, name: str) -> list[str]:
    """What is set in a file of the corpus and neither a setting nor named in the recipe that it becomes."""
    files = files_of(tool)
    text = imported(name, files)
    return [each for each in set_leaves(yaml.safe_load(files[name])) if not re.search(rf"\b{re.escape(each)}\b", text)]
