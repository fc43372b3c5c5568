"""DeepSpeed's file for Trainer, which fills every "auto" in it from the script's own settings and compares the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainkit.errors import Diagnostic, warning
from trainkit.launch_plan.context import Context
from trainkit.recipe.merge import value_at
from trainkit.tools.base.fields import is_set
from trainkit.tools.base.imported_recipe import ImportContext, ImportedRecipe, open_foreign_file
from trainkit.tools.deepspeed.fields import BATCH, ZERO3_INIT, formats
from trainkit.tools.hf.argv_reader import own_flags

# integrations/deepspeed.py: trainer_config_process and trainer_config_finalize
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


def implied(context: Context) -> dict[str, float]:
    """What the user's file says of fields: Trainer ends with an error where its own settings are not the same."""
    base = context.resolved.attachments.get("strategy.config")
    if base is None or not context.zero:
        return {}
    found = ((field, _number(base.tree, key)) for key, field in COMPARED.items())
    return {field: value for field, value in found if value is not None}


def notices(context: Context) -> Iterator[Diagnostic]:
    """What Trainer is told in vain, because it takes the file's word for it (integrations/deepspeed.py)."""
    base = context.resolved.attachments.get("strategy.config")
    if context.recipe.strategy.kind == "zero3" and str(context.recipe.env.get(ZERO3_INIT)).lower() == "false":
        # integrations/deepspeed.py: what --deepspeed names is announced to from_pretrained, whatever the variable says
        what = f"Trainer builds the model of stage 3 in parts where --deepspeed is given, and {ZERO3_INIT} does nothing"
        yield warning(what, "leave it out")
    if base is None or not context.zero:
        return
    for section, recipe, flag in (
        ("optimizer", "optimizer.name", "optim"),
        ("scheduler", "schedule", "lr_scheduler_type"),
    ):
        kind = value_at(base.tree, f"{section}.type")
        if kind is not None and (is_set(context, recipe) or flag in own_flags(context.resolved)):
            what = f"Trainer takes the {section} {kind} of the DeepSpeed file, and not what --{flag} says"
            yield warning(what, f"remove {section} from the file to have the script's own")
    if value_at(base.tree, "gradient_clipping") is None and is_set(context, "train.max_grad_norm"):
        norm = context.recipe.train.max_grad_norm
        what = f"the DeepSpeed file has no gradient_clipping: max_grad_norm {norm:g} does not reach DeepSpeed, which "
        yield warning(f"{what}clips at 1 (not at all before 0.19.3)", 'add "gradient_clipping": "auto"')


def _number(tree: Any, key: str) -> float | None:
    """The number at a key; a last part that is a number counts in a list."""
    above, _, place = key.rpartition(".")
    found = value_at(tree, above) if place.isdigit() else value_at(tree, key)
    if place.isdigit() and isinstance(found, list) and len(found) > int(place):
        found = found[int(place)]
    return found if isinstance(found, int | float) and not isinstance(found, bool) else None


def import_base(draft: ImportedRecipe, context: ImportContext) -> None:
    """Number format and batch out of a file that stays the base, where no flag says them."""
    base = draft.settings.get("strategy.config")
    if base is None or draft.problems:
        return
    tree = open_foreign_file(context, base.value).tree
    reason = "the DeepSpeed file says it, and Trainer requires its own flag to say the same"
    enabled = formats(tree)
    if len(enabled) == 1 and draft.get("precision.dtype") is None:
        draft.set("precision.dtype", enabled[0], base.origin, reason)
    sizes = {row.keys[0]: value_at(tree, row.name) for row in (*BATCH[1:], BATCH[0])}
    for key, value in sizes.items():
        # Two corners of the batch give the third.
        is_open = sum(draft.get(each) is not None for each in sizes) < 2
        if type(value) is int and value > 0 and draft.get(key) is None and is_open:
            draft.set(key, value, base.origin, reason)
