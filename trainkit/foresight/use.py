"""What it takes to let a model answer: its weights, and the keys and values that are kept of each token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainkit.foresight.architectures import ALIASES, DEFAULTS
from trainkit.foresight.trace import Trace
from trainkit.recipe.schema import HfModel, Recipe
from trainkit.tasks import CAUSAL
from trainkit.text import format_memory

ITEM = 2  # bytes of a value: a model answers in 16 bits


@dataclass(frozen=True, slots=True)
class Use:
    """Bytes in 16 bits. cache: of each token of each answer that is written at a time; None where it is not known."""

    weights: int
    cache: int | None = None

    def words(self, tokens: int) -> str:
        """With answers of so many tokens."""
        kept = f" and {format_memory(self.cache * tokens)} of cache for {tokens:,} tokens" if self.cache else ""
        return f"to answer afterwards, in 16 bits: {format_memory(self.weights)} of weights{kept}"


def use_of(recipe: Recipe, trace: Trace, model: Mapping[str, Any]) -> Use:
    """What a trained model takes. model: the settings of its folder, where it has one.

    Adapters are merged into their base. The cache is that of transformers, DynamicCache: keys and values of each layer,
    without regard to windows of attention, beyond which less is kept. trainkit's native model keeps none.
    """
    adapts = recipe.peft.kind != "none"
    weights = sum(each.size * each.of for each in trace.parameters if not (adapts and each.trained)) * ITEM
    asked = recipe.model
    if not isinstance(asked, HfModel) or asked.task != CAUSAL:
        return Use(weights)
    name = str(asked.architecture or model.get("model_type"))
    alias = ALIASES.get(name, {})
    given = {**DEFAULTS.get(name, {}), **{alias.get(key, key): each for key, each in {**model, **asked.config}.items()}}
    sizes = [given.get(alias.get(key, key)) for key in ("num_hidden_layers", "num_attention_heads", "hidden_size")]
    if not all(isinstance(each, int) and each for each in sizes):
        return Use(weights)
    layers, heads, width = map(int, sizes)  # type: ignore[arg-type]
    share = given.get("head_dim") or width // heads
    return Use(weights, 2 * layers * int(given.get("num_key_value_heads") or heads) * int(share) * ITEM)
