"""The model section: a tagged union on `kind`, one class per family of models."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from trainkit.recipe.schema.base import Section, setting

Count = Annotated[int, Field(ge=1)]


class Moe(Section):
    """Mixture of experts. `moe: 8` is short for `moe: {experts: 8}`."""

    short_form: ClassVar[str] = "experts"

    experts: int = setting(0, "Feed-forward layers to choose from in a block with experts; 0 for a dense model.", ge=0)
    top_k: Count = setting(2, "Experts that each token goes through.")
    every: Count = setting(1, "Every n-th block has experts, the last of each n.")
    balance_coef: float = setting(0.01, "Weight of the load-balancing loss (Switch Transformers).", ge=0)
    z_coef: float = setting(0.001, "Weight of the router z-loss (ST-MoE).", ge=0)

    @model_validator(mode="after")
    def _means_something(self) -> Moe:
        if not self.experts and self.model_fields_set - {"experts"} and self != Moe():
            raise ValueError("experts is 0, so that the other settings of experts do nothing")
        if 0 < self.experts < self.top_k:
            raise ValueError(f"top_k {self.top_k} is more than there are experts ({self.experts})")
        return self


class GptModel(Section):
    """The native byte-level GPT."""

    kind: Literal["gpt"] = setting(
        "gpt", "Decoder-only transformer with learned positions, pre-norm blocks and tied embeddings."
    )
    layers: Count = setting(4, "Transformer blocks.")
    heads: Count = setting(4, "Attention heads; must divide `hidden_size`.")
    hidden_size: Count = setting(128, "Width of the residual stream.")
    vocab_size: Count = setting(256, "Number of token ids; bytes need 256.")
    dropout: float = setting(0.0, "Dropout probability.", ge=0, lt=1)
    moe: Moe = setting(Moe(), "Mixture of experts in place of the feed-forward layers.")

    @model_validator(mode="after")
    def _heads_divide(self) -> GptModel:
        if self.hidden_size % self.heads:
            raise ValueError(f"hidden_size {self.hidden_size} is not divisible by heads {self.heads}")
        if self.moe.experts and self.moe.every > self.layers:
            raise ValueError(f"moe.every {self.moe.every} leaves no block of {self.layers} with experts")
        return self


# With a second kind: Annotated[GptModel | …, Field(discriminator="kind")]; pydantic takes no discriminator for one.
Model = GptModel
