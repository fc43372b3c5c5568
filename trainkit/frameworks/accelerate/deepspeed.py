"""DeepSpeed of `Accelerator()`: one file, because accelerate's own keys lose the paths and are errors beside a file."""

from __future__ import annotations

import json
from collections.abc import Iterator

from trainkit.frameworks.accelerate.setting import Setting, word
from trainkit.frameworks.deepspeed.readers import ACCELERATOR
from trainkit.plan.context import Context
from trainkit.plan.model import Variable
from trainkit.plan.provenance import Source, SourcedFile

CONFIG = "deepspeed.json"


def settings(context: Context) -> Iterator[Setting]:
    """That DeepSpeed is used, and its file; none under other strategies."""
    if not context.zero:
        return
    kind = ("strategy.kind",)
    whole = context.recipe.strategy.kind == "zero3"
    yield Setting("ACCELERATE_USE_DEEPSPEED", ("true",), keys=kind)
    yield Setting("ACCELERATE_DEEPSPEED_CONFIG_FILE", (Variable.RUN_DIR, f"/{CONFIG}"), keys=kind)
    yield Setting("ACCELERATE_DEEPSPEED_ZERO3_INIT", (word(whole),), "deepspeed_config.zero3_init_flag", whole, kind)


def file(context: Context) -> SourcedFile:
    """The file, from the recipe or with the user's as base."""
    from trainkit.frameworks.deepspeed.config import deepspeed_config

    resolved = context.resolved
    base = resolved.attachments.get("strategy.config")
    content, made_by = deepspeed_config(
        resolved.recipe, context.batch, context.dtype, base, resolved.given, reader=ACCELERATOR
    )
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    return SourcedFile(CONFIG, text, {key: Source(tuple(keys)) for key, keys in made_by})
