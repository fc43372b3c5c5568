"""Refusals of adapters to start from (`peft.path`) that are others than the recipe's."""

from __future__ import annotations

from collections.abc import Iterator

from trainkit.errors import Diagnostic
from trainkit.lora import NO_LORA, SAME, differing
from trainkit.recipe.resolved import Resolved


def adapter_problems(resolved: Resolved) -> Iterator[Diagnostic]:
    """An error where the folder of adapters is known to be none, or to hold others."""
    asked, found = resolved.recipe.peft, resolved.described
    if found.misfit is not None:
        what, hint = found.misfit
        yield resolved.error("peft.path", f"peft.path: {what}", hint)
    elif found.adapters and found.adapters.get("peft_type") != "LORA":
        yield resolved.error("peft.path", f"peft.path: what lies in {asked.path} are no LoRA adapters", NO_LORA)
    elif found.adapters:
        own = {"r": asked.rank, "lora_alpha": asked.alpha, "use_rslora": asked.rslora, "use_dora": asked.dora}
        if others := differing(found.adapters, own):
            what = f"peft.path: the adapters in {asked.path} are others than the recipe's: {'; '.join(others)}"
            yield resolved.error("peft.path", what, SAME)
