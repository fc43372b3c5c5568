"""Models of transformers: read from a folder or drawn at random, and called with the inputs of a batch."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from trainkit.data.encode import IGNORE_INDEX
from trainkit.data.files import refuse_special
from trainkit.data.formats import KEEPS_APART, packing_of
from trainkit.distribution import install
from trainkit.errors import TrainingError, first_line
from trainkit.recipe.schema import HfModel, Recipe
from trainkit.recipe.suggestions import did_you_mean
from trainkit.text import join_names
from trainkit.trainer.models.base import Remarks, TensorPlan, Wrapped, blocks_of, cast_weights
from trainkit.trainer.models.losses import in_32_bits, linear_cross_entropy
from trainkit.trainer.models.moe import routers_loss, routers_of
from trainkit.trainer.models.quantized import (
    as_plain,
    device_map,
    quantize_in_place,
    reading_options,
    refuse_quantized,
    tell_peft,
)
from trainkit.trainer.models.sample_parts import SampleParts
from trainkit.trainer.models.weights import divide, drawn, give_memory, put
from trainkit.trainer.optim import DTYPES

# Architectures (`model_type`) whose logits are what one linear layer gives, as it is: neither scaled nor capped.
PLAIN = frozenset(
    (
        *("bloom", "falcon", "gemma", "gpt2", "gpt_neox", "llama", "mistral", "mixtral", "olmo2", "opt"),
        *("phi", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3", "stablelm", "starcoder2"),
        *("longt5", "mt5", "t5", "umt5"),
        *("albert", "bert", "camembert", "distilbert", "electra", "modernbert", "roberta", "xlm-roberta"),
    )
)


class OutputLayer:
    """The output layer of a language model, which can compute the loss itself, without ever holding all logits.

    A model's own code calls it last. Told the targets before, it gives the summed loss instead of logits, and the model
    hands that on where it would hand on logits.
    """

    def __init__(self, layer: nn.Linear) -> None:
        self._layer = layer
        self._asked: tuple[Tensor, int | None] | None = None
        layer.forward = self._forward  # type: ignore[method-assign,assignment]

    @contextmanager
    def giving_loss(self, targets: Tensor, at_most: int | None) -> Iterator[None]:
        """Inside, it gives the loss of :func:`linear_cross_entropy`."""
        self._asked = targets, at_most
        try:
            yield
        finally:
            self._asked = None

    def _forward(self, hidden: Tensor) -> Tensor:
        weight, bias = self._layer.weight, self._layer.bias
        if self._asked is None:
            return functional.linear(hidden, weight, bias)
        return linear_cross_entropy((hidden, weight, bias), *self._asked)


_CHANCES = ("drop", "jitter", "noise")  # parts of names of settings that make training draw random numbers


ATTENTION_OF_PARTS = "sdpa_of_sample_parts"  # as transformers knows it


class Transformer(Wrapped):
    """A model of transformers; its loss is computed from its logits, summed over targets."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        settings = inner.config.to_dict()
        drawing = [value for name, value in settings.items() if any(part in name for part in _CHANCES)]
        self.stochastic = any(isinstance(value, float) and value > 0 for value in drawing)
        self.vocabulary = settings.get("vocab_size")
        self.padding = settings.get("pad_token_id")
        self.context = settings.get("max_position_embeddings") or settings.get("n_positions")
        self.attention = str(inner.config._attn_implementation)
        self.attention_width = attention_width(inner.config)
        self.routers = routers_of(inner.config)
        self.routing = (self.routers.experts, self.routers.top_k) if self.routers else (0, 0)
        # Cached keys and values are only useful for generation, and cost memory in training; and with them transformers
        # does not look where texts begin.
        self._options = {"use_cache": False} if self._takes_option("use_cache") else {}
        self._output: OutputLayer | None = None
        self._parts: SampleParts | None = None

    def write(self, **options: Any) -> Tensor:
        """transformers' generate(): as a method, which a strategy can treat as it does a forward pass."""
        return cast("Tensor", self.inner.generate(**options))

    def tensor_plan(self) -> TensorPlan | None:
        """Of transformers, where it divides linear layers alone."""
        plan: Mapping[str, str] = getattr(self.inner.config, "base_model_tp_plan", None) or {}
        if not plan or set(plan.values()) - {"colwise", "rowwise", "replicated_with_grad_allreduce"}:
            return None
        columns, rows = ([each for each, style in plan.items() if style == word] for word in ("colwise", "rowwise"))
        entries = {place.split(".")[-2] for place in columns}
        return TensorPlan(
            {place.rpartition(".")[2]: 1 for place in columns}, {place.rpartition(".")[2] for place in rows}, entries
        )

    def divide_samples(self, parts: SampleParts) -> None:
        """Through an attention of its own, around sdpa's; transformers takes a mask of four dimensions as it is."""
        config = self.inner.config
        layers = getattr(config, "layer_types", None) or ()
        window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        if window or set(layers) - {"full_attention"} or type(self) is not Transformer:
            super().divide_samples(parts)
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.masking_utils import sdpa_mask

        def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
            if mask is not None and mask.shape[-1] != key.shape[2]:  # else the model writes a text, on each rank
                key, value, mask = parts.attended(key, value, mask if mask.shape[-1] > 1 else None)
            return sdpa_attention_forward(module, query, key, value, mask, **options)

        AttentionInterface.register(ATTENTION_OF_PARTS, attend)
        AttentionMaskInterface.register(ATTENTION_OF_PARTS, sdpa_mask)
        self.inner.set_attn_implementation(ATTENTION_OF_PARTS)
        self._parts = parts

    def _takes_option(self, name: str) -> bool:
        """Whether the model knows an option, or hands it on to its body, which does."""
        body = getattr(self.inner, self.inner.base_model_prefix, self.inner)
        hands_on = any(each.kind is each.VAR_KEYWORD for each in self._takes.values())
        return name in self._takes or (hands_on and name in inspect.signature(body.forward).parameters)

    def join_loss(self) -> None:
        # With adapters around it, the output layer is no longer a plain layer.
        if self.loss_function is None and self.inner.config.model_type in PLAIN:
            layer = self.inner.get_output_embeddings()
            self._output = OutputLayer(layer) if type(layer) is nn.Linear else None

    def forward(self, tokens: Tensor, targets: Tensor | None = None, **more: Tensor) -> Tensor:
        """(batch, sequence) int64 -> logits (batch, sequence, vocabulary), or with targets the loss summed over tokens.

        Targets of -100 are not counted. `position_ids` (batch, sequence) begin at 0 with each text of a sample of
        several, which sees itself alone. In training the routers' losses are part of the sum.
        """
        shape = tokens.shape
        if self._parts is not None:
            return self._of_part(self._parts, tokens, targets, **more)
        if "position_ids" in more and self.attention.startswith("flash"):
            # FlashAttention tells texts apart by positions in one row alone (transformers: _is_packed_sequence).
            tokens, targets = tokens.reshape(1, -1), None if targets is None else targets.reshape(1, -1)
            more = {**more, "position_ids": more["position_ids"].reshape(1, -1)}
        inputs = {"tokens": tokens, "targets": targets, **more}
        found = self._called({"input_ids": tokens, **more}, targets, inputs)
        return found if targets is not None else found.reshape(*shape, -1)

    def _of_part(self, parts: SampleParts, tokens: Tensor, targets: Tensor | None, **more: Tensor) -> Tensor:
        length, places = tokens.shape[1], more.pop("position_ids", None)
        mask = parts.mask(length, places)
        # In place of none one that no mask looks like: transformers would make its own.
        more["attention_mask"] = tokens.new_ones(1, 1, 1, 1, dtype=torch.bool) if mask is None else mask
        if places is None:
            places = torch.arange(length, device=tokens.device)[None]
        more["position_ids"], tokens = parts.own(places), parts.own(tokens)
        targets = None if targets is None else parts.own_targets(targets)
        found = self._called({"input_ids": tokens, **more}, targets, {"tokens": tokens, "targets": targets, **more})
        return parts.gathered(found, 1)[:, :length] if targets is None else parts.summed(found)

    def _called(self, given: Mapping[str, Any], truth: Tensor | None, inputs: Mapping[str, Any]) -> Tensor:
        """The logits, or where the truth is known the loss. inputs: of the batch, for a loss of the user's own."""
        known = self.known(given)
        if truth is not None and self._output is not None:
            with self._output.giving_loss(truth, self.targets_at_most):
                outputs = self.inner(**known, **self._options)
            loss = outputs.logits
        else:
            outputs = self.inner(**known, **self._options)
            if truth is None:
                return cast("Tensor", outputs.logits)
            if self.loss_function is not None:
                loss = self.loss_function(outputs, inputs)
            else:
                logits = in_32_bits(outputs.logits.flatten(0, -2))
                loss = functional.cross_entropy(logits, truth.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
        if self.routers is None or not self.training:  # evaluation counts predictions only
            return cast("Tensor", loss)
        aside, self.load_of_pass = routers_loss(self.routers, outputs, truth)
        return cast("Tensor", loss + aside)


class Labelled(Transformer):
    """The same for data with labels, by other names; a masked model's are its hidden tokens."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.routers, self.routing = None, (0, 0)

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, labels: Tensor | None = None, **more: Tensor
    ) -> Tensor:
        """input_ids, attention_mask, …: (batch, sequence); labels: (batch,) or (batch, sequence), -100 uncounted.

        Returns logits (labels' shape, choices), or with labels the summed loss.
        """
        given = {"input_ids": input_ids, **more}
        return self._called(given, labels, {**given, "labels": labels})


def _begun_with(padding: int | None) -> Remarks:
    what = "model.config.decoder_start_token_id is not set: decoders begin with the padding token, as T5's do"
    return ((logging.INFO, f"{what} ({padding})"),)


class Classifier(Labelled):
    """One label a sample."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.labels, self.told_padding = int(inner.config.num_labels), True
        config = inner.config
        if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = self.padding
            self.remarks = _begun_with(self.padding)

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, labels: Tensor | None = None, **more: Tensor
    ) -> Tensor:
        """As of :class:`Labelled`. TrainingError for a text without the token at which the model reads its label."""
        try:
            return super().forward(input_ids, labels, **more)
        except ValueError as error:
            if "<eos>" not in str(error):  # transformers names it so, whatever it is
                raise
            config = self.inner.config
            raise TrainingError(
                f"data: {config.model_type} reads the label at token {config.eos_token_id} "
                "(model.config.eos_token_id), which is not once in each text",
                hint="name the model's own tokenizer in data.tokenizer, which ends texts with it",
            ) from error

    def join_loss(self) -> None:  # a classifier has few logits
        pass

    def head(self) -> Sequence[nn.Parameter]:
        """The layers that give the labels."""
        body = set(self.inner.base_model.parameters())
        return [parameter for parameter in self.inner.parameters() if parameter not in body]


class EncoderDecoder(Labelled):
    """Writes a target for a source: what the decoder reads is the target, shifted by one place."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        config = inner.config
        if getattr(config, "output_router_logits", False):
            what = f"model.config.output_router_logits: the loss of {config.model_type}'s routers is not trained here"
            raise TrainingError(what, hint="leave it out, and train without the routers' loss")
        self.told_padding = True
        if self.padding is None:
            what = "model.config.pad_token_id is not set, which a decoder reads behind the end of a target"
            raise TrainingError(what, hint="set it to the padding token of the tokenizer")
        # Of T5, which has relative positions, `n_positions` says only how long the samples of its own training were.
        self.context = getattr(config, "max_position_embeddings", None)
        # Lists of blocks on both sides, also where the model does not say what its blocks are.
        halves = (inner.get_encoder(), inner.get_decoder())
        self.blocks = tuple(block for half in halves for block in blocks_of(half))
        try:
            self._shifted(torch.full((1, 1), self.padding + 1))
        except (AttributeError, TypeError, ValueError):  # nothing says what the decoder begins with
            config.decoder_start_token_id = self.padding
            self.remarks = _begun_with(self.padding)

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, labels: Tensor | None = None, decoder_input_ids: Tensor | None = None, **more: Tensor
    ) -> Tensor:
        """input_ids, attention_mask: (batch, source); labels, decoder_input_ids: (batch, target), -100 uncounted.

        Returns logits (batch, target, vocabulary), or with labels the summed loss.
        """
        read = decoder_input_ids if decoder_input_ids is not None or labels is None else self._shifted(labels)
        return super().forward(input_ids, labels, decoder_input_ids=cast("Tensor", read), **more)

    def shown(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        found = super().shown(inputs)
        if "decoder_input_ids" in found or "labels" not in inputs:
            return found
        return {**found, "decoder_input_ids": self._shifted(inputs["labels"])}

    def begin(self, ends: Tensor) -> Tensor:
        """What the decoder reads before its first token (1, 1). ends: what goes before and after a target (1, ids)."""
        # Some begin with the last of these, the target's language.
        return self._shifted(ends)[:, :1]

    def _shifted(self, labels: Tensor) -> Tensor:
        """(batch, target) -> the same shape, as transformers' own class does it."""
        if make := getattr(self.inner, "prepare_decoder_input_ids_from_labels", None):
            return cast("Tensor", make(labels))
        read = labels.new_full(labels.shape, self.inner.config.decoder_start_token_id)
        read[:, 1:] = labels[:, :-1]
        return read.masked_fill(read == IGNORE_INDEX, cast("int", self.padding))


# `model.task` -> transformers' class, and what goes around it.
TASKS: Mapping[str, tuple[str, type[Transformer]]] = {
    "causal_lm": ("AutoModelForCausalLM", Transformer),
    "seq2seq_lm": ("AutoModelForSeq2SeqLM", EncoderDecoder),
    "masked_lm": ("AutoModelForMaskedLM", Labelled),
    "sequence_classification": ("AutoModelForSequenceClassification", Classifier),
}
_SIZES = ("num_hidden_layers", "num_attention_heads", "hidden_size")
# Settings of models in which a token does not go through all weights.
_UNEVEN = ("num_experts", "num_local_experts", "n_routed_experts", "is_encoder_decoder")


def attention_width(config: Any) -> int | None:
    """Layers x heads x size of a head, where every layer is of the same kind and every token goes through all."""
    kinds = getattr(config, "layer_types", None)
    if any(getattr(config, name, None) for name in _UNEVEN) or len(set(kinds or ())) > 1:
        return None
    sizes: list[Any] = [getattr(config, name, None) for name in _SIZES]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return None
    layers, heads, width = sizes
    return int(layers * heads * (getattr(config, "head_dim", None) or width // heads))


def build_hf(recipe: Recipe, device: str = "cpu", mesh: DeviceMesh | None = None) -> Transformer:
    """The model of a recipe, in `precision.weights`, from a folder or with random weights.

    device: where it is; `meta` for sizes without weights. mesh: the ranks that it is divided over, of the CPU (see
    :mod:`trainkit.trainer.models.weights`). TrainingError when it cannot be built.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    asked = cast("HfModel", recipe.model)
    auto_class, wrapper = TASKS[asked.task]
    if asked.path is not None:
        refuse_special(asked.path, "model.path")
    maker = getattr(transformers, auto_class)
    config = configuration(asked)
    if recipe.data.kind == "dataset" and packing_of(recipe, config.model_type) == "isolated":
        require_apart(config.model_type)
    try:
        inner, remarks = _made(recipe, maker, config, device, mesh)
    except TrainingError:
        raise
    except Exception as error:  # transformers and the Rust below it raise anything
        folder = f" from {asked.path}" if asked.path else ""
        raise TrainingError(f"model: transformers cannot build it{folder}: {first_line(error)}") from error
    # Whatever format the folder holds them in, and not by way of a wider one, which would take twice the memory.
    cast_weights(inner, DTYPES[recipe.precision.weights])
    model = wrapper(inner)
    tell_peft(model, asked.quantize.bits)
    model.remarks = (*model.remarks, *remarks)
    for name in ("sequence_length", "target_length"):
        asked_length = getattr(recipe.data, name, None)
        if model.context and isinstance(asked_length, int) and asked_length > model.context:
            what = f"data.{name}: the model has {model.context} places, fewer than {asked_length}"
            raise TrainingError(what, hint="lower it, or raise the model's own setting in model.config")
    return model


def require_apart(model_type: str) -> None:
    """TrainingError where texts of one sample would see one another, though they are not to."""
    from transformers import masking_utils

    what = "data.packing isolated: "
    if model_type not in KEEPS_APART:
        what += f"{model_type} is not known to keep the texts of a sample apart"
        raise TrainingError(what, hint="set data.packing to none, or to dense where texts may see one another")
    if not hasattr(masking_utils, "find_packed_sequence_indices"):
        what += "transformers before 4.53 does not keep the texts of a sample apart"
        raise TrainingError(what, hint=install(sys.executable, "transformers>=4.53"))


def _made(recipe: Recipe, maker: Any, config: Any, device: str, mesh: DeviceMesh | None) -> tuple[Any, Remarks]:
    """The model of transformers, with random weights or a folder's, quantised where that is asked for; and remarks."""
    asked, seed, dtype = cast("HfModel", recipe.model), recipe.train.seed, DTYPES[recipe.precision.weights]
    attention = None if recipe.efficiency.attention == "auto" else recipe.efficiency.attention
    if device == "meta":
        return _without_values(maker, config, attention), ()
    if asked.path is None:
        return _drawn(maker, asked, config, attention, Start(seed, dtype, device, mesh)), ()
    refuse_quantized(config, asked.path)
    if not asked.quantize.bits or mesh is not None:
        options = {"device_map": device_map("cpu" if mesh else device), "dtype": dtype} if fills_by_tensor() else {}
        with filled_by_tensor(seed, mesh):
            return read_weights(maker, asked.path, config, attention, options)
    with torch.device("meta"):
        # trust_remote_code: not given, it would ask on the terminal
        plain = maker.from_config(copy.deepcopy(config), trust_remote_code=False)
        options = reading_options(plain, asked.quantize, device)
    read, remarks = read_weights(maker, asked.path, config, attention, options)
    as_plain(read)
    return read, remarks


@dataclass(frozen=True, slots=True)
class Start:
    """How a model begins: the seed of what is drawn, the format, and where its values are."""

    seed: int
    dtype: torch.dtype
    device: str
    mesh: DeviceMesh | None


def fills_by_tensor() -> bool:
    """Whether transformers builds models without values and fills them tensor by tensor: from release 5 on.

    Older ones build them whole in the machine's memory, on each rank.
    """
    import transformers

    return int(transformers.__version__.partition(".")[0]) >= 5


def reads_slices() -> bool:
    """Whether transformers reads of a tensor the slice alone that a divided parameter has.

    Older releases build the model of a folder whole in the machine's memory, on each rank.
    """
    return importlib.util.find_spec("transformers.distributed.sharding_utils") is not None


def _without_values(maker: Any, config: Any, attention: str | None) -> Any:
    """A model of a configuration on the meta device."""
    with torch.device("meta"):
        made = maker.from_config(config, attn_implementation=attention)
        made.tie_weights()  # early releases of transformers 5 do not on this device
    return made


def _drawn(maker: Any, asked: HfModel, config: Any, attention: str | None, start: Start) -> Any:
    """A model with random weights."""
    if not fills_by_tensor():
        model = maker.from_config(config, attn_implementation=attention)
    else:
        model = _without_values(maker, config, attention)
        cast_weights(model, start.dtype)
        if start.mesh is not None:
            divide(model, start.mesh)
        give_memory(model, "cpu" if asked.quantize.bits or start.mesh else start.device)
        buffers = {name: (each, each._version) for name, each in model.named_buffers()}
        with drawing_by_name(model, start.seed) as done:
            model.initialize_weights()
        missed: dict[str, Tensor] = {name: each for name, each in model.named_parameters() if each not in done}
        missed |= {name: each for name, (each, version) in buffers.items() if each._version == version}
        if missed:  # what a model's own code sets as it is built, and its library does not draw
            built = maker.from_config(copy.deepcopy(config), attn_implementation=attention)
            whole = {**dict(built.named_parameters()), **dict(built.named_buffers())}
            for name, each in missed.items():
                put(whole[name], each)
    if asked.quantize.bits and start.mesh is None:
        quantize_in_place(model, asked.quantize, start.device)
    return model


@contextmanager
def drawing_by_name(inner: Any, seed: int) -> Iterator[set[nn.Parameter]]:
    """In this context transformers draws each module's weights by a generator of its own, and a rank keeps its part.

    Yields a set to which they are added as they are drawn.
    """
    from transformers import PreTrainedModel

    names = {module: name for name, module in inner.named_modules()}
    done: set[nn.Parameter] = set()

    def by_name(initialize: Any, module: nn.Module) -> None:
        # Some models set the weights of a module's children once more (GPT-2's projections).
        with drawn(seed, names[module], [module, *module.children()]) as those:
            initialize(module)
        done.update(those)

    models = [module for module in inner.modules() if isinstance(module, PreTrainedModel)]
    for module in models:
        module._init_weights = partial(by_name, module._init_weights)
    try:
        yield done
    finally:
        for module in models:
            del module._init_weights


@contextmanager
def filled_by_tensor(seed: int, mesh: DeviceMesh | None) -> Iterator[None]:
    """In this context `from_pretrained` draws what a folder lacks by name, and reads each rank's slices alone."""
    from transformers import PreTrainedModel

    if not fills_by_tensor():
        yield
        return
    original = PreTrainedModel.__dict__["_load_pretrained_model"]

    def load(model: Any, *given: Any, **more: Any) -> Any:
        stack.enter_context(drawing_by_name(model, seed))
        if mesh is not None and reads_slices():
            divide(model, mesh)  # (distributed/sharding_utils.py: DtensorShardOperation)
        return original.__get__(None, PreTrainedModel)(model, *given, **more)

    PreTrainedModel._load_pretrained_model = staticmethod(load)
    try:
        with ExitStack() as stack:  # what is missing is drawn after what is there was read
            yield
    finally:
        PreTrainedModel._load_pretrained_model = original


def configuration(asked: HfModel) -> Any:
    """The configuration of the folder or the architecture, with the recipe's own settings in it."""
    import huggingface_hub.errors
    from transformers import AutoConfig

    try:
        if asked.path is None:
            config = AutoConfig.for_model(asked.architecture)
        else:
            config = AutoConfig.from_pretrained(asked.path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises anything over a config.json that it did not write
        key = "model.architecture" if asked.path is None else "model.path"
        raise TrainingError(f"{key}: {first_line(error)}") from error
    known = {*config.to_dict(), *config.attribute_map, "num_labels"}  # which is kept as the names of the labels
    if getattr(config, "is_encoder_decoder", False):
        known.add("decoder_start_token_id")  # which transformers 5 leaves out where it is not set
    for name in asked.config:
        if name not in known:
            hint = did_you_mean(name, sorted(known), f"it has {', '.join(sorted(known))}")
            raise TrainingError(f"model.config.{name}: {config.model_type} has no such setting", hint=hint)
    # Made again, so that what the architecture derives from its settings is derived from these.
    refused = getattr(huggingface_hub.errors, "StrictDataclassError", ValueError)
    try:
        return type(config)(**{**(config.to_dict() if asked.path else {}), **asked.config})
    except (refused, TypeError, ValueError) as error:
        raise TrainingError(f"model.config: {config.model_type} refuses it: {first_line(error)}") from error


def has_head(asked: HfModel) -> bool:
    """Whether a folder holds a classifier already, whose labels count."""
    if asked.path is None:
        return False
    return any("ForSequenceClassification" in name for name in configuration(asked).architectures or ())


def read_weights(
    maker: Any, folder: str, config: Any, attention: str | None, options: Mapping[str, Any]
) -> tuple[Any, Remarks]:
    """The model with a folder's weights, and remarks on them. TrainingError where a weight has another size."""
    inner, found = maker.from_pretrained(
        folder,
        config=config,
        attn_implementation=attention,
        local_files_only=True,
        trust_remote_code=False,  # not given, it would ask on the terminal
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # which only lets us name them
        **options,
    )
    # Until 4.57 the names alone, then with both sizes.
    resized = sorted(each if isinstance(each, str) else each[0] for each in found["mismatched_keys"])
    if resized:
        size = tuple(inner.state_dict()[resized[0]].shape)
        others = f", and so have {len(resized) - 1} more" if resized[1:] else ""
        raise TrainingError(
            f"model.path: {resized[0]} has another size in {folder} than {size}, which the model needs{others}",
            hint="the folder's own sizes hold: leave them out of model.config",
        )
    # A new head for another task is expected; any other weight that only the folder or only the model has is a warning.
    remarks = []
    same_task = type(inner).__name__ in (inner.config.architectures or ())
    for key, fate in (
        ("missing_keys", f"not in {folder} and drawn at random"),
        ("unexpected_keys", f"in {folder} and not in the model"),
    ):
        if names := sorted(found[key]):
            in_the_body = any(name.startswith(f"{inner.base_model_prefix}.") for name in names)
            count = "1 weight is" if len(names) == 1 else f"{len(names)} weights are"
            level = logging.WARNING if same_task or in_the_body else logging.INFO
            remarks.append((level, f"model.path: {count} {fate}: {join_names(names, 3)}"))
    return inner, tuple(remarks)
