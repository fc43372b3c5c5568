"""What a DeepSpeed file says of a recipe's strategy: one reading for `--deepspeed`, and for files that are imported."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from trainkit.frameworks.base.fields import Unsupported
from trainkit.frameworks.deepspeed.fields import FIELDS, FORMATS, OFFLOADS, OUTDATED, ZERO
from trainkit.recipe.layers.merge import value_at


class Said(NamedTuple):
    """A setting of the recipe, the key of the file that says it, and its value."""

    setting: str
    key: str
    value: Any


def faults(tree: Any) -> Iterator[tuple[str, str, str]]:
    """Key by key, what a recipe cannot build upon: what is wrong, and what to write."""
    for key, instead in OUTDATED.items():
        if value_at(tree, key) not in (None, False):
            yield key, f"{key} is a name that DeepSpeed has replaced", f"write {instead}"
    swapped = [f"{ZERO}.{name}.nvme_path" for name in OFFLOADS if value_at(tree, f"{ZERO}.{name}.device") == "nvme"]
    if len({str(path) for key in swapped if (path := value_at(tree, key)) is not None}) > 1:
        what = "optimizer state and parameters are swapped to different folders"
        yield swapped[0], what, "write one path; each run swaps to folders of its own below it"


def formats(tree: Any) -> tuple[str, ...]:
    """The 16-bit formats that the file enables."""
    rows = {row.name.partition(".")[0]: (row.name, *row.aliases) for row in FORMATS}
    return tuple(name for name, keys in rows.items() if any(value_at(tree, key) is True for key in keys))


def sharding(tree: Any, stage: int) -> Iterator[Said]:
    """Everything that the file says and a strategy of this stage has a setting for, apart from sizes."""
    seen = {"strategy.kind"}  # of two folders for one setting, the second is a disagreement with the file
    for row in FIELDS:
        section, _, last = row.name.rpartition(".")
        unused = last == "nvme_path" and value_at(tree, f"{section}.device") != "nvme"
        value = value_at(tree, row.name)
        if value is None or unused or stage not in row.stages or not section.startswith(ZERO):
            continue
        found = row.decode(value)
        if isinstance(found, Unsupported) or seen >= found.keys():
            continue
        seen |= found.keys()
        yield from (Said(setting, row.name, each) for setting, each in found.items())
