"""Which shipped presets say what was chosen, so that the recipe can extend them instead of repeating them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainkit.recipe.layers.layer import normalise, read_document
from trainkit.recipe.layers.paths import Files
from trainkit.recipe.schema.fields import schema
from trainkit.wizard.question import Settings
from trainkit.wizard.view import same

_RECIPES = "recipes/"


@dataclass(frozen=True)
class Preset:
    """A shipped preset and everything that it sets, by dotted key."""

    name: str
    sets: Settings


def presets(files: Files) -> tuple[Preset, ...]:
    """The shipped presets."""
    return tuple(
        Preset(name, dict(leaves(normalise(read_document(files.read(path)).tree, {}))))
        for name, path in files.shipped().items()
        if not name.startswith(_RECIPES)
    )


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The settings of a recipe's tree by dotted key; what is no setting is left out."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key in schema().settings:
            yield key, value
        elif isinstance(value, Mapping):
            yield from leaves(value, f"{key}.")


def fitting(offered: tuple[Preset, ...], wanted: Settings, effective: Settings) -> tuple[Preset, ...]:
    """The fewest presets that say the most of what is wanted and nothing else.

    wanted: settings that must be written; effective: every setting's value in the recipe to be.
    """
    chosen: list[Preset] = []
    left = dict(wanted)
    while left:
        useful = [each for each in offered if each.sets.keys() & left.keys() and _agrees(each, effective)]
        if not useful:
            break
        best = max(useful, key=lambda each: (len(each.sets.keys() & left.keys()), -len(each.sets)))
        chosen.append(best)
        left = {key: value for key, value in left.items() if key not in best.sets}
    return tuple(chosen)


def _agrees(preset: Preset, effective: Settings) -> bool:
    return all(same(effective.get(key), value) for key, value in preset.sets.items())
