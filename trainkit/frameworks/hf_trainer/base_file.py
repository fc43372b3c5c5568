"""What a DeepSpeed file that stays the base says, and the recipe has to say too: the plan compares the two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainkit.frameworks.base.draft import Draft, ImportContext
from trainkit.recipe.layers.merge import value_at
from trainkit.recipe.yaml.reader import compose_bytes

_FORMATS = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16"}
_CORNERS = {
    "train_micro_batch_size_per_gpu": "batch.micro",
    "gradient_accumulation_steps": "batch.accumulation",
    "train_batch_size": "batch.global",
}
_SAME = "the DeepSpeed file says it, and Trainer wants its own flag to say the same"


def said_in_base(draft: Draft, context: ImportContext) -> None:
    """Number format and batch out of the base, where no flag says them."""
    base = draft.settings.get("strategy.config")
    if base is None or draft.problems:
        return
    tree = compose_bytes(context.files.read(base.value)).tree
    found = {**_format(tree), **_batch(tree)}
    given = [key for key in _CORNERS.values() if draft.get(key) is not None]
    for key, value in found.items():
        if draft.get(key) is not None or (key in _CORNERS.values() and len(given) > 1):
            continue  # two corners of the batch give the third
        draft.set(key, value, base.origin, _SAME)
        given += [key] if key in _CORNERS.values() else []


def _format(tree: Any) -> Mapping[str, Any]:
    on = [dtype for name, dtype in _FORMATS.items() if value_at(tree, f"{name}.enabled") is True]
    return {"precision.dtype": on[0]} if len(on) == 1 else {}


def _batch(tree: Any) -> Mapping[str, Any]:
    return {key: value for name, key in _CORNERS.items() if type(value := value_at(tree, name)) is int and value > 0}
