"""Padding that costs the fast kernel of attention: which samples are filled up, and what to do instead."""

from __future__ import annotations

from collections.abc import Iterator

from trainkit.plan.context import Context
from trainkit.plan.model import Notice
from trainkit.recipe.schema import DatasetData, HfModel, JsonlData

# torch's flash kernel takes no mask, so that scaled_dot_product_attention falls back to another one
# (torch.nn.functional.scaled_dot_product_attention); it computes in 16 bits only, and other formats have none to lose.
_FLASH_FORMATS = ("bf16", "fp16")


def padding_notices(context: Context) -> Iterator[Notice]:
    """A warning where batches come with an attention mask on CUDA. Texts that are predicted one by one need none."""
    recipe = context.recipe
    model, data = recipe.model, recipe.data
    if recipe.program.kind != "builtin" or context.topology.device != "cuda" or context.dtype not in _FLASH_FORMATS:
        return
    if not isinstance(model, HfModel) or not isinstance(data, JsonlData | DatasetData):
        return
    labelled = model.task == "sequence_classification"
    if model.task == "causal_lm" or (data.packing and not labelled):
        return
    if recipe.efficiency.attention not in ("auto", "sdpa"):
        return
    what = (
        f"texts shorter than data.sequence_length {data.sequence_length} are filled up, which takes an attention mask, "
        "and with a mask sdpa does not use its flash kernel"
    )
    remedy = "set efficiency.attention: flash_attention_2, which leaves padding out"
    yield Notice("warning", what, remedy if labelled else f"{remedy}, or data.packing: true")
