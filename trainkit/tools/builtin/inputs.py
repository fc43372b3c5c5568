"""What a recipe starts from and cannot: a model that its task does not train, a tokenizer, adapters.

A model is known by a folder's config.json or `model.architecture`. Which types there are, and which tasks have a class
for them, is read from the transformers that is installed. What its tables do not say stands here, by type
(`model_type` of a config.json).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from trainkit.data.formats import KEEPS_APART, PROMPTED
from trainkit.errors import Diagnostic, warning
from trainkit.lora import NO_LORA, SAME, differing
from trainkit.recipe.hub_name import is_repository
from trainkit.recipe.implied import ENCODER_RATE, FULL_RATE
from trainkit.recipe.resolved import Asked, Resolved
from trainkit.recipe.schema import DatasetData, GptModel, HfModel
from trainkit.recipe.schema.data import BYTES
from trainkit.recipe.schema.model import places_of, quantized_bits
from trainkit.recipe.suggestions import did_you_mean
from trainkit.tasks import CAUSAL, MASKED, task_of

if TYPE_CHECKING:
    from trainkit.data.seen import SeenData
    from trainkit.launch_plan.context import Context
    from trainkit.launch_plan.rules import InputRule

WRITING = "seq2seq_lm"
FROM_NOTHING = 1e-3  # learning rate of Adam that only random weights bear: fine-tuning stays a tenth below, or more
# Classes of the modules of trainkit's own model (trainer/models/gpt.py), with and without experts.
GPT_MODULES = (
    "Attention", "Block", "Dropout", "Embedding", "Experts", "Gpt", "LayerNorm", "Linear", "MixtureOfExperts",
    "ModuleList", "MoeBlock",
)  # fmt: skip
# Task -> transformers' class, and what it is for.
CLASSES = {
    "causal_lm": "AutoModelForCausalLM",
    WRITING: "AutoModelForSeq2SeqLM",
    "masked_lm": "AutoModelForMaskedLM",
    "sequence_classification": "AutoModelForSequenceClassification",
}

# Made to fill in what is hidden: unless this setting is true, they see the token that they are to predict next.
_ENCODERS = """
    bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert reformer rembert roberta
    roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod
"""
LOOKING_AHEAD: Mapping[str, str | None] = {
    **dict.fromkeys(_ENCODERS.split(), "is_decoder"),
    "xlm": "causal",
    "xlnet": None,  # there is no such setting
}

# Their configurations have no padding token by themselves, and a classifier reads the last token before the padding.
_UNPADDED = """
    arcee axk1 axk2 bloom ctrl deepseek_v2 deepseek_v3 diffllama doge exaone4 falcon gpt-sw3 gpt2 gpt_bigcode
    gpt_neo gpt_neox gpt_oss gptj jetmoe llama minicpm3 minimax ministral mistral mixtral mpt nemotron openai-gpt
    persimmon phi phimoe qwen2 qwen2_moe qwen3 qwen3_5_text qwen3_moe qwen3_next stablelm starcoder2
"""
UNPADDED = frozenset(_UNPADDED.split())

# Their classifiers read the label at the token that ends a text, and refuse texts without it.
ENDED = frozenset({"bart", "bigbird_pegasus", "mbart", "mt5", "mvp", "plbart", "t5", "umt5"})

# Trained in bfloat16, with activations beyond the largest number of float16
# (https://github.com/google-research/text-to-text-transfer-transformer/issues/539; transformers clamps them).
OVERFLOWING = frozenset({"longt5", "mt5", "t5", "umt5"})


# Blocks with less than 90 % of their weights in linear layers, which are all that bitsandbytes quantises, by
# trainer/models/quantized.py on models of the releases' own sizes: experts of a block lie in one tensor.
_MIXTURES = """
    afmoe aria_text axk1 axk2 bailing_hybrid beam cohere2_moe dbrx deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4
    dots1 dots3_note dots3_note_text ernie4_5_moe exaone_moe flex_olmo flint glm4_moe glm4_moe_lite glm_moe_dsa gpt_oss
    granitemoe granitemoe_swa granitemoehybrid granitemoeshared hunyuan_v1_moe hy_v3 hy_v4 inkling2_text inkling_text
    jamba jetmoe kimi_linear kolibri1 laguna lfm2_moe llama4 llama4_text longcat_flash mellum mimo_v2_flash minimax
    minimax_m2 minimax_m3_vl_text mistral4 mixtral olmoe phimoe qwen2_moe qwen3_5_moe qwen3_5_moe_text qwen3_moe
    qwen3_next solar_open zaya
"""
MIXTURES = frozenset(_MIXTURES.split())
# Settings that say how many experts there are: with one or none, a model is dense.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def quantized_already(folder: str) -> tuple[str, str]:
    """What is in the way where a model's config.json has a `quantization_config`, and what to do about it."""
    what = f"model.path: the weights in {folder} are already quantised"
    return what, "name the model in 16 or 32 bits; model.quantize: 4 quantises it"


def architecture_problems(asked: Asked) -> Iterator[Diagnostic]:
    """An error where the model is known not to be trained (by its task); nothing about a model that is not known."""
    resolved, tasks_of = asked.resolved, asked.architectures
    model, described = resolved.recipe.model, resolved.described
    named = getattr(resolved.recipe.strategy, "wrap_classes", [])
    chosen = isinstance(model, GptModel) and resolved.given("model.kind") is not None  # else another may be meant
    if chosen and (unknown := [name for name in named if name not in GPT_MODULES]):
        what = f"strategy.wrap_classes: the model has no module of class {', '.join(unknown)}"
        yield resolved.error("strategy.wrap_classes", what, f"it has {', '.join(GPT_MODULES)}")
    if not isinstance(model, HfModel):
        return
    if described.fault is not None:
        what, hint = described.fault
        if model.path and is_repository(model.path) and model.revision is None:  # else it is one, at its commit
            hint += f"; for {model.path} of the Hub move the folder of that name away"
        yield resolved.error("model.path", f"model.path: {what}", hint)
        return
    if described.model.get("quantization_config") is not None:
        yield resolved.error("model.path", *quantized_already(str(model.path)))
        return
    name = _name(resolved)
    if model.task in tasks_of.get(name, (model.task,)):
        yield from _of_task(resolved, name)
    else:
        key = _key(resolved, model)
        why = f"{CLASSES[model.task]} of transformers {asked.packages.get('transformers')} does not have it"
        what = f"model.task {model.task}: {_what(name, model.task, tasks_of[name])}"
        yield resolved.error(key, what, _hint(tasks_of[name]), why=why)
    if tasks_of and name not in tasks_of and (model.path is None or described.model):
        yield from _unknown(resolved, name, asked)
    settings = {**described.model, **model.config}
    few = any(isinstance(settings.get(each), int) and settings[each] <= 1 for each in EXPERTS)
    if quantized_bits(resolved.recipe) and name in MIXTURES and not few:
        why = f"the experts of a block of {name} lie in one tensor, and bitsandbytes quantises linear layers alone"
        what = f"model.quantize: {name} is a mixture of experts"
        yield resolved.error("model.quantize", what, "leave model.quantize out, or take a dense model", why=why)


def _name(resolved: Resolved) -> str:
    """The `model_type`; empty where it is not known."""
    found = getattr(resolved.recipe.model, "architecture", None) or resolved.described.model.get("model_type")
    return found if isinstance(found, str) else ""


def _key(resolved: Resolved, model: HfModel) -> str:
    if resolved.given("model.task"):
        return "model.task"
    return "model.architecture" if model.architecture else "model.path"


def _of_task(resolved: Resolved, name: str) -> Iterator[Diagnostic]:
    """What a type that the task has a class for needs besides."""
    model, data = resolved.recipe.model, resolved.recipe.data
    assert isinstance(model, HfModel)
    key, known = _key(resolved, model), {**resolved.described.model, **model.config}
    switch = LOOKING_AHEAD.get(name, "")
    if model.task == "causal_lm" and switch != "" and not known.get(switch or ""):
        what = f"model.task causal_lm: {name} sees the token that it is to predict"
        hint = f"set model.task: {'masked_lm' if switch else 'sequence_classification'}"
        hint += f", or model.config.{switch}: true, with which it looks back alone" if switch else ""
        yield resolved.error(key, what, hint, why="it was made to fill in tokens with those on both sides in view")
    if model.task != "sequence_classification":
        return
    # A classifier that cannot tell where a text ends; of a folder whose config.json is not known nothing is.
    unpadded = "pad_token_id" in known or name in UNPADDED
    if known.get("pad_token_id") is None and unpadded and (not model.path or resolved.described.model):
        what = f"model.config.pad_token_id: {name} has no padding token"
        hint = "set it to that of the tokenizer, or to its end of text where it has none; for bytes to 0"
        why = "a classifier reads the last token of a text, and cannot tell where it ends"
        yield resolved.error("model.config", what, hint, why=why)
    bytes_alone = data.kind == "dataset" and getattr(data, "tokenizer", None) in (None, BYTES)
    if name in ENDED and (data.kind == "random" or bytes_alone):
        what = f"model.task sequence_classification: {name} reads the label at the token that ends a text"
        hint = "name the model's tokenizer in data.tokenizer, which ends texts with it, or take a model such as bert"
        yield resolved.error(key, what, hint, why="random samples and bytes have no such token")


def _unknown(resolved: Resolved, name: str, asked: Asked) -> Iterator[Diagnostic]:
    """Of a type that the installed transformers does not have, or of a config.json that says none."""
    path = getattr(resolved.recipe.model, "path", None)
    key = "model.path" if path is not None else "model.architecture"
    what, why = f"the config.json of {path} has no model_type, which says what the model is", ""
    if name:
        what = f"{name} is not a model of transformers {asked.packages.get('transformers')}"
        why = "model_type in its config.json" if path else ""
    hint = did_you_mean(name, asked.architectures, "choose a model of transformers, or a release of it that has it")
    if resolved.described.model.get("auto_map"):
        why = "code that lies beside weights is not run"
        hint = "import it as your own module, with model.kind: target, or choose a model of transformers"
    yield resolved.error(key, f"{key}: {what}", hint, why=why)


def _what(name: str, task: str, tasks: Sequence[str]) -> str:
    if task == WRITING:
        return f"{name} is not an encoder-decoder for text"
    if WRITING in tasks and task == "causal_lm":
        return f"{name} is an encoder-decoder, which writes a target for a source and continues no text"
    return f"{name} is not made for it"


def _hint(tasks: Sequence[str]) -> str:
    if not tasks:
        return "choose another model: this one is for none of the tasks"
    if WRITING in tasks:
        return f"set model.task: {WRITING}, with rows of source and target"
    return f"set model.task: {' or '.join(tasks)}, or choose another model"


def architecture_notices(context: Context) -> Iterator[Diagnostic]:
    """What of a model is hardly meant."""
    resolved, model, name = context.resolved, context.recipe.model, _name(context.resolved)
    if not isinstance(model, HfModel):
        return
    tasks = context.facts.architectures.get(name, ())
    halved = model.task == "causal_lm" and WRITING in tasks and "causal_lm" in tasks
    if halved and not resolved.given("model.task") and resolved.described.model.get("is_encoder_decoder", True):
        what = (
            f"{name} is an encoder-decoder, and as causal_lm, the default of model.task, its decoder alone is trained"
        )
        yield warning(what, f"{_hint(tasks)}; or write model.task: causal_lm")
    if name in OVERFLOWING and model.path and context.dtype == "fp16":
        what = f"{name} was trained in bf16, with activations that fp16 cannot hold: the loss may become NaN"
        yield warning(what, "set precision: bf16, or fp32 on GPUs without units for it")
    rate, usual = context.recipe.optimizer.lr, FULL_RATE if model.task == "causal_lm" else ENCODER_RATE
    adam = context.recipe.optimizer.name.startswith("adam") and model.task != WRITING
    if model.path and context.recipe.peft.kind == "none" and adam and rate >= FROM_NOTHING:
        what = f"optimizer.lr {rate:g} is a rate for random weights: a trained model forgets what it knows"
        yield warning(what, f"set optimizer.lr: {usual:g}, or train adapters (peft.kind: lora)", "optimizer.lr")


def rows_can_be_learned_from(asked: Asked) -> Iterator[Diagnostic]:
    """The first rows are of no format that the task knows, or a file is none that has rows."""
    seen: SeenData | None = asked.seen
    if seen is not None and seen.fault is not None:
        what, hint = seen.fault
        key = "data.columns" if "data.columns:" in what and getattr(asked.recipe.data, "columns", None) else "data.path"
        yield asked.resolved.error(key, what, hint)
    prefix = getattr(asked.recipe.data, "prompt_prefix", None)
    if seen is not None and seen.form is not None and prefix and seen.form.name not in PROMPTED:
        what = f"data.prompt_prefix goes before a prompt or a source, and the rows are {seen.form.described}"
        yield asked.resolved.error("data.prompt_prefix", what, "remove it, or name the prompt's column in data.columns")
    everything = getattr(asked.recipe.data, "train_on_prompts", False)
    if seen is not None and seen.form is not None and everything and "labels" in seen.form.columns:
        what = "data.train_on_prompts learns all of a row, and the column labels of these says what is learned"
        yield asked.resolved.error("data.train_on_prompts", what, "remove one of them")


def chats_need_a_template(asked: Asked) -> Iterator[Diagnostic]:
    """The rows are chats, and the tokenizer is known to have no template."""
    data, seen = asked.recipe.data, asked.seen
    form = seen.form.name if seen is not None and seen.form is not None else ""
    if form not in ("messages", "conversations", "alpaca") or task_of(asked.recipe) != CAUSAL:
        return
    assert isinstance(data, DatasetData)
    why, built_in = "a template says how a chat is written as one text", "data.chat_template: chatml, llama3 or alpaca"
    if data.chat_template == "none" and form != "alpaca":
        what = "data.chat_template none is for prompts with answers, and these rows are chats"
        yield asked.resolved.error("data.chat_template", what, f"leave it out, or set {built_in}", why=why)
    elif data.tokenizer in (None, BYTES):
        what = f"the rows of data.path are {seen.form.described}, and bytes have no chat template"
        yield asked.resolved.error("data.tokenizer", what, "name the tokenizer of a chat model", why=why)
    elif data.chat_template is None and asked.resolved.described.chats is False:
        what = (
            f"the rows of data.path are {seen.form.described}, and the tokenizer {data.tokenizer} has no chat template"
        )
        hint = f"set {built_in}, or a file with one"
        yield asked.resolved.error("data.chat_template", what, hint, why=why, at=asked.origin("data.path"))


def packed_texts_are_kept_apart(asked: Asked) -> Iterator[Diagnostic]:
    """Texts in one sample are to be apart, and the model is not known to keep them so."""
    data, model = asked.recipe.data, asked.recipe.model
    if not isinstance(data, DatasetData) or data.packing != "isolated" or not isinstance(model, HfModel):
        return
    name = model.architecture or str(asked.resolved.described.model.get("model_type") or "")
    if task_of(asked.recipe) == MASKED:
        what = f"data.packing isolated is for model.task {CAUSAL}: a masked model sees all texts of a sample"
        yield asked.resolved.error("data.packing", what, "set it to none or dense, or leave it out")
    elif task_of(asked.recipe) == CAUSAL and name and name not in KEEPS_APART:
        what = f"data.packing isolated: {name} is not known to keep the texts of a sample apart"
        yield asked.resolved.error("data.packing", what, "set it to none, or leave it out")


def tokenizer_fits_the_model(asked: Asked) -> Iterator[Diagnostic]:
    """A tokenizer gives ids that the model has no row for."""
    seen, rows = asked.seen, {**asked.resolved.described.model, **getattr(asked.recipe.model, "config", {})}
    tokenizer = seen.tokenizer if seen is not None else None
    known = rows.get("vocab_size") or getattr(asked.recipe.model, "vocab_size", None)
    if tokenizer is not None and tokenizer.size and isinstance(known, int) and tokenizer.size > known:
        what = f"data.tokenizer: {tokenizer.name} gives {tokenizer.size:,} ids, and the model has rows for {known:,}"
        hint = "leave data.tokenizer out: the model's own is the default"
        if isinstance(asked.recipe.model, GptModel):
            hint = f"set model.vocab_size to {tokenizer.size} or more"
        elif not getattr(asked.recipe.model, "path", None):
            hint = f"set model.config.vocab_size to {tokenizer.size} or more"
        yield asked.resolved.error("data.tokenizer", what, hint)


def lengths_are_those_of_the_model(asked: Asked) -> Iterator[Diagnostic]:
    """Samples are longer than the model is known to read."""
    model = asked.recipe.model
    known = {**asked.resolved.described.model, **model.config} if isinstance(model, HfModel) else {}
    judged = ("max_position_embeddings", "n_positions", "is_encoder_decoder")  # by the trainer
    places = places_of({name: known.get(name) for name in judged})
    for name in ("sequence_length", "target_length"):
        length = getattr(asked.recipe.data, name, None)
        if places is not None and isinstance(length, int) and length > places:
            what = f"data.{name}: the model has {places} places, fewer than {length}"
            hint = "lower it, or raise the model's own setting in model.config"
            yield asked.resolved.error(f"data.{name}", what, hint)


def tokenizer_notices(context: Context) -> Iterator[Diagnostic]:
    """A tokenizer whose ids a pretrained model does not know by these names."""
    tokenizer, model = context.seen.tokenizer, context.recipe.model
    if tokenizer is not None and tokenizer.own is False and isinstance(model, HfModel):
        what = f"data.tokenizer {tokenizer.name} is not that of {model.path}: the model learns each token anew"
        yield warning(what, "leave data.tokenizer out: the model's own is the default")


def adapters_are_those_of_the_recipe(asked: Asked) -> Iterator[Diagnostic]:
    """The folder of adapters is known to be none, or to hold others."""
    own, found, error = asked.recipe.peft, asked.resolved.described, asked.resolved.error
    if found.misfit is not None:
        what, hint = found.misfit
        yield error("peft.path", f"peft.path: {what}", hint)
    elif found.adapters and found.adapters.get("peft_type") != "LORA":
        yield error("peft.path", f"peft.path: what lies in {own.path} are no LoRA adapters", NO_LORA)
    elif found.adapters:
        asks = {"r": own.rank, "lora_alpha": own.alpha, "use_rslora": own.rslora, "use_dora": own.dora}
        if others := differing(found.adapters, asks):
            what = f"peft.path: the adapters in {own.path} are others than the recipe's: {'; '.join(others)}"
            yield error("peft.path", what, SAME)


INPUT_RULES: tuple[InputRule, ...] = (
    architecture_problems,
    rows_can_be_learned_from,
    chats_need_a_template,
    packed_texts_are_kept_apart,
    tokenizer_fits_the_model,
    lengths_are_those_of_the_model,
    adapters_are_those_of_the_recipe,
)
