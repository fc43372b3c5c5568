"""The model section: a tagged union on `kind`, one class per family of models."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from trainkit.recipe.schema.base import Section, setting

Count = Annotated[int, Field(ge=1)]


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

    @model_validator(mode="after")
    def _heads_divide(self) -> GptModel:
        if self.hidden_size % self.heads:
            raise ValueError(f"hidden_size {self.hidden_size} is not divisible by heads {self.heads}")
        return self


# With a second kind: Annotated[GptModel | …, Field(discriminator="kind")]; pydantic takes no discriminator for one.
Model = GptModel
