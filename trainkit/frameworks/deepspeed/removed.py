"""What a user's DeepSpeed file asks for and the installed DeepSpeed no longer has, which ends the run before step 1."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trainkit.frameworks.deepspeed.offloading import ZERO
from trainkit.machine.versions import at_least
from trainkit.plan.context import Context
from trainkit.plan.model import Notice
from trainkit.recipe.layers.merge import value_at

# Key of the file -> the first version that ends with an error at it (deepspeed/runtime/config.py, 0.19.6 to 0.19.8).
KEYS: Mapping[str, str] = {
    **dict.fromkeys(
        ("nebula", "compression_training", "quantize_training", "sparse_attention",
         f"{ZERO}.mics_shard_size", f"{ZERO}.mics_hierarchical_params_gather"),
        "0.19.7",
    ),
    **dict.fromkeys(
        ("amp", "sparse_gradients", "eigenvalue", "elasticity", "graph_harvesting", "curriculum_learning",
         "progressive_layer_drop", f"{ZERO}.zeropp_loco_param"),
        "0.19.8",
    ),
}  # fmt: skip
# Type of optimizer, in small letters -> the first version without it.
OPTIMIZERS: Mapping[str, str] = dict.fromkeys(("onebitadam", "onebitlamb", "zerooneadam"), "0.19.7")


def removed_notices(context: Context) -> Iterator[Notice]:
    """A warning for each."""
    base, installed = context.resolved.attachments.get("strategy.config"), context.facts.packages.get("deepspeed", "")
    if base is None or not context.zero or not installed:  # a missing package is said by itself
        return
    kind = value_at(base.tree, "optimizer.type")
    asked = {key: first for key, first in KEYS.items() if value_at(base.tree, key) is not None}
    if str(kind).lower() in OPTIMIZERS:
        asked[f"the optimizer {kind}"] = OPTIMIZERS[str(kind).lower()]
    for name, first in asked.items():
        if at_least(installed, first):
            what = f"DeepSpeed {installed} no longer has {name}, which the DeepSpeed file asks for"
            yield Notice("warning", what, f"pip install 'deepspeed<{first}', or take it out of the file")
