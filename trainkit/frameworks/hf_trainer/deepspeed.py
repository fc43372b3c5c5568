"""DeepSpeed's file for Trainer, which fills every "auto" in it from the script's own settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trainkit.frameworks.hf_trainer.row import Value
from trainkit.plan.context import Context
from trainkit.plan.provenance import Source, SourcedFile
from trainkit.recipe.layers.merge import value_at

# Key of the file -> the field that Trainer compares it with.
COMPARED: Mapping[str, str] = {
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.weight_decay": "weight_decay",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.betas.0": "adam_beta1",
    "optimizer.params.betas.1": "adam_beta2",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.warmup_num_steps": "warmup_steps",
}


def file(context: Context, name: str) -> SourcedFile:
    """The file, from the recipe or with the user's as base."""
    from trainkit.frameworks.deepspeed.config import deepspeed_config
    from trainkit.frameworks.deepspeed.readers import TRAINER_OF_HF

    resolved = context.resolved
    base = resolved.attachments.get("strategy.config")
    content, made_by = deepspeed_config(
        resolved.recipe, context.batch, context.dtype, base, resolved.given, reader=TRAINER_OF_HF
    )
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    return SourcedFile(name, text, {key: Source(tuple(keys)) for key, keys in made_by})


def implied(context: Context) -> dict[str, Value]:
    """What the user's file says of fields: Trainer ends with an error where its own settings are not the same."""
    base = context.resolved.attachments.get("strategy.config")
    if base is None or not context.zero:
        return {}
    found = ((field, _number(base.tree, key)) for key, field in COMPARED.items())
    return {field: value for field, value in found if value is not None}


def _number(tree: Any, key: str) -> float | None:
    """The number at a key; a last part that is a number counts in a list."""
    above, _, place = key.rpartition(".")
    found = value_at(tree, above) if place.isdigit() else value_at(tree, key)
    if place.isdigit() and isinstance(found, list) and len(found) > int(place):
        found = found[int(place)]
    return found if isinstance(found, int | float) and not isinstance(found, bool) else None
