"""The model section: a tagged union on `kind`, one class per family of models."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from trainkit.recipe.schema.base import MOST, Count, ImportPath, Section, section, setting
from trainkit.recipe.schema.launching import Scalar


class Moe(Section):
    """Mixture of experts. `moe: 8` is short for `moe: {experts: 8}`."""

    short_form: ClassVar[str] = "experts"

    experts: int = setting(0, "Experts (feed-forward layers) per block; 0 for a dense model.", ge=0)
    top_k: Count = setting(2, "Experts that each token is routed to.")
    every: Count = setting(1, "Every n-th block has experts, the last of each n.")
    balance_coef: float = setting(0.01, "Weight of the load-balancing loss (Switch Transformers).", ge=0)
    z_coef: float = setting(0.001, "Weight of the router z-loss (ST-MoE).", ge=0)
    parallel: Count = setting(
        1, "Expert parallelism under fsdp: over how many ranks each block's experts are shared out; tokens go to them."
    )

    def _contradictions(self) -> Iterator[str]:
        if not self.experts and self.model_fields_set - {"experts"} and self != Moe():
            yield "experts is 0, so the other settings of experts have no effect"
        if 0 < self.experts < self.top_k:
            yield f"top_k {self.top_k} is more than there are experts ({self.experts})"
        if self.experts % self.parallel:
            yield f"experts {self.experts} is not divisible by parallel {self.parallel}"


class Quantize(Section):
    """Frozen weights in few bits, which adapters train beside (QLoRA). `quantize: 4` is short for `{bits: 4}`."""

    short_form: ClassVar[str] = "bits"

    bits: Literal[0, 4, 8] = setting(
        0, "Bits of each weight in the linear layers of the blocks, through bitsandbytes; 0 does not quantise."
    )
    quant_type: Literal["nf4", "fp4"] = setting(
        "nf4", "Values of 4-bit weights: `nf4` follows the distribution of weights, `fp4` is floating point."
    )
    double_quant: bool = setting(True, "Also quantise the constants of 4-bit weights, from 0.5 to 0.127 bits a weight.")

    def _contradictions(self) -> Iterator[str]:
        if self.bits != 4 and (self.quant_type, self.double_quant) != ("nf4", True):
            yield f"quant_type and double_quant are for 4 bits, and bits is {self.bits}"


class GptModel(Section):
    """The native byte-level GPT."""

    kind: Literal["gpt"] = setting(
        "gpt", "Decoder-only transformer with learned positions, pre-norm blocks and tied embeddings."
    )
    layers: int = setting(4, "Transformer blocks.", ge=1, le=100_000)
    heads: Count = setting(4, "Attention heads; must divide `hidden_size`.")
    hidden_size: Count = setting(128, "Width of the residual stream.")
    vocab_size: Count = setting(256, "Number of token ids; bytes need 256.")
    dropout: float = setting(0.0, "Dropout probability.", ge=0, lt=1)
    moe: Moe = section(Moe, "Mixture of experts in place of the feed-forward layers.")

    def _contradictions(self) -> Iterator[str]:
        if self.hidden_size % self.heads:
            yield f"hidden_size {self.hidden_size} is not divisible by heads {self.heads}"
        if self.moe.experts and self.moe.every > self.layers:
            yield f"moe.every {self.moe.every} leaves no block of {self.layers} with experts"


class HfModel(Section):
    """A model of transformers, from a folder or the Hub, or with random weights."""

    kind: Literal["hf"] = setting("hf", "Any architecture of transformers.")
    task: Literal["causal_lm", "seq2seq_lm", "masked_lm", "sequence_classification"] = setting(
        "causal_lm",
        "The model's task: predict the next token, a target text for a source text (encoder-decoders such "
        "as t5 and bart), masked tokens, or a label per sample.",
    )
    mask_share: float = setting(
        0.15,
        "Share of tokens that a masked model predicts: 80 % of them are masked, 10 % replaced, 10 % kept (BERT).",
        gt=0,
        lt=1,
    )
    mask_token: Annotated[int, Field(ge=0, le=MOST)] | None = setting(
        None, "Id of the mask token; null is the tokenizer's."
    )
    path: str | None = setting(
        None,
        "Folder with config.json and weights, as `save_pretrained` writes it, relative to the working folder; "
        "or the name of "
        "a repository of the Hub, `owner/name`, if there is no such folder.",
        reads="repository",
        missing="give a folder as save_pretrained writes it, or a name of the Hub",
    )
    revision: str | None = setting(None, "Branch, tag or commit of a `path` on the Hub; null is `main`.", min_length=1)
    architecture: str | None = setting(
        None, "Architecture with random weights instead, as transformers calls it (`llama`, `gpt2`)."
    )
    config: dict[str, Scalar | list[Scalar]] = setting(
        {}, "Settings of the architecture by their own names; they override those of the folder or of transformers."
    )

    quantize: Quantize = section(Quantize, "Frozen weights in 4 or 8 bits, for peft.kind lora (QLoRA).")

    def _contradictions(self) -> Iterator[str]:
        if (self.path is None) == (self.architecture is None):
            given = "neither" if self.path is None else "both"
            yield f"an hf model needs path or architecture, and {given} of them is given"
        if self.task != "masked_lm" and (self.mask_token is not None or self.mask_share != 0.15):
            yield f"mask_share and mask_token are for task masked_lm, and task is {self.task}"


class TargetModel(Section):
    """A model of the user's own, by import path; the working folder is searched after installed packages."""

    kind: Literal["target"] = setting("target", "A model of the user's own.")
    target: ImportPath = setting(
        "",
        "Function that makes the model, a torch.nn.Module, `pkg.mod:name`, called with `args`. The model is "
        "called with the inputs of "
        "a batch by name and returns its loss (alone, first in a tuple or as `loss`), or the input of train.loss.",
        expects="an import path pkg.mod:name",
    )
    args: dict[str, Scalar | list[Scalar]] = setting({}, "Arguments of the target, by name.", lines=True)

    def _contradictions(self) -> Iterator[str]:
        if not self.target:
            yield "target must name the model as pkg.mod:name"


class Peft(Section):
    """Parameter-efficient training: small adapters are trained, and the model stays unchanged."""

    kind: Literal["none", "lora"] = setting(
        "none", "`none`: all weights are trained. `lora`: low-rank adapters, and a classifier's head."
    )
    rank: Count = setting(8, "Rank of the adapters.")
    alpha: float = setting(16.0, "Adapters are scaled by alpha / rank.", gt=0)
    dropout: float = setting(0.0, "Dropout probability before an adapter.", ge=0, lt=1)
    target_modules: list[str] = setting(
        [], "Names of the layers that get adapters, or their last parts; empty means every linear layer of the blocks."
    )
    rslora: bool = setting(False, "Scale by alpha / sqrt(rank) instead, for high ranks (rsLoRA).")
    dora: bool = setting(False, "Train magnitude and direction separately (DoRA); slower.")
    path: str | None = setting(
        None,
        "Adapters to start from: a folder, as peft or `trainkit export --adapter` writes it, or the name of a "
        "repository of the Hub; null for new ones.",
        reads="repository",
        missing="give a folder as peft or trainkit export --adapter writes it, or a name of the Hub",
    )
    revision: str | None = setting(None, "Branch, tag or commit of a `path` on the Hub; null is `main`.", min_length=1)

    def _contradictions(self) -> Iterator[str]:
        if self.kind == "none" and self.model_fields_set - {"kind"} and self != Peft():
            yield "kind is none, so the other settings of adapters have no effect"


Model = Annotated[GptModel | HfModel | TargetModel, Field(discriminator="kind")]


# Settings of a config.json that say how many tokens a model can read at once.
_PLACES = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len")


def places_of(settings: Mapping[str, Any]) -> int | None:
    """How many tokens a model can read at once, by its config.json; None where nothing says it.

    Of T5, which has relative positions, `n_positions` says only how long the samples of its own training were.
    """
    names = _PLACES[:1] if settings.get("is_encoder_decoder") else _PLACES
    found = (settings.get(name) for name in names)
    return next((size for size in found if isinstance(size, int) and size > 0), None)


def quantized_bits(recipe: Any) -> int:
    """Bits of the frozen weights that a recipe asks for; 0 where they stay as they are."""
    return recipe.model.quantize.bits if isinstance(recipe.model, HfModel) else 0
