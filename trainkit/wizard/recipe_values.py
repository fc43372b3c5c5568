"""Recipe values by dotted key: from a tree, as a tree, and compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainkit.recipe.schema.fields import schema, tagged_sections
from trainkit.recipe.validation.validate import default_kind

Settings = Mapping[str, Any]


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The settings of a recipe's tree by dotted key; unknown keys are left out."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key in schema().settings:
            yield key, value
        elif isinstance(value, Mapping):
            yield from flatten(value, f"{key}.")


def nest(settings: Settings) -> dict[str, Any]:
    """The settings as the tree of a recipe."""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        target = tree
        *sections, name = key.split(".")
        for section in sections:
            target = target.setdefault(section, {})
        target[name] = value
    return tree


def same(one: Any, other: Any) -> bool:
    """Whether two values are the same to a recipe, where `true` is not 1."""
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def section_kind(section: str, *layers: Settings) -> str:
    """The kind of a tagged section in the first of these layers that gives it, else its default; empty for others."""
    if section not in tagged_sections():
        return ""
    return str(next((kind for layer in layers if (kind := layer.get(f"{section}.kind"))), default_kind(section)))


def belongs(key: str, *layers: Settings) -> bool:
    """Whether the kind of the key's section has it: a setting of another kind, answered earlier, means nothing."""
    section = key.partition(".")[0]
    if section not in tagged_sections() or key.endswith(".kind"):
        return True
    return any(each.variant in ("", section_kind(section, *layers)) for each in schema().settings.get(key, ()))
