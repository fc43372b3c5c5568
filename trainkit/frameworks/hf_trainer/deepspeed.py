"""DeepSpeed's file for Trainer, which fills every "auto" in it from the script's own settings and compares the rest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trainkit.frameworks.base.draft import Draft, ImportContext
from trainkit.frameworks.hf_trainer.fields import DEEPSPEED
from trainkit.plan.context import Context
from trainkit.plan.provenance import Source, SourcedFile
from trainkit.recipe.layers.merge import value_at
from trainkit.recipe.yaml.reader import compose_bytes

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
# What the plan compares with the file, so that an import sets it in the recipe too.
_FORMATS = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16"}
_BATCH = {
    "train_micro_batch_size_per_gpu": "batch.micro",
    "gradient_accumulation_steps": "batch.accumulation",
    "train_batch_size": "batch.global",
}


def file(context: Context) -> SourcedFile:
    """The file, from the recipe or with the user's as base."""
    from trainkit.frameworks.deepspeed.config import deepspeed_config
    from trainkit.frameworks.deepspeed.readers import TRAINER_OF_HF

    resolved = context.resolved
    base = resolved.attachments.get("strategy.config")
    content, made_by = deepspeed_config(
        resolved.recipe, context.batch, context.dtype, base, resolved.given, reader=TRAINER_OF_HF
    )
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    return SourcedFile(DEEPSPEED, text, {key: Source(tuple(keys)) for key, keys in made_by})


def implied(context: Context) -> dict[str, float]:
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


def import_base(draft: Draft, context: ImportContext) -> None:
    """Number format and batch out of a file that stays the base, where no flag says them."""
    base = draft.settings.get("strategy.config")
    if base is None or draft.problems:
        return
    tree = compose_bytes(context.files.read(base.value)).tree
    reason = "the DeepSpeed file says it, and Trainer requires its own flag to say the same"
    formats = [dtype for name, dtype in _FORMATS.items() if value_at(tree, f"{name}.enabled") is True]
    if len(formats) == 1 and draft.get("precision.dtype") is None:
        draft.set("precision.dtype", formats[0], base.origin, reason)
    for name, key in _BATCH.items():
        value = value_at(tree, name)
        # Two corners of the batch give the third.
        is_open = sum(draft.get(each) is not None for each in _BATCH.values()) < 2
        if type(value) is int and value > 0 and draft.get(key) is None and is_open:
            draft.set(key, value, base.origin, reason)
