"""Refusals of models that a task cannot train, by what a folder's config.json or `model.architecture` says they are."""

from __future__ import annotations

from collections.abc import Iterator

from trainkit.architectures import (
    ENDED,
    EXPERTS,
    LOOKING_AHEAD,
    MIXTURES,
    OVERFLOWING,
    TASKS_OF,
    TRANSFORMERS,
    UNPADDED,
    quantized_already,
)
from trainkit.errors import Diagnostic, warning
from trainkit.launch_plan.context import Asked, Context
from trainkit.machine.facts import release
from trainkit.recipe.repository import is_repository
from trainkit.recipe.resolved import Resolved
from trainkit.recipe.schema import GptModel, HfModel
from trainkit.recipe.schema.model import quantized_bits
from trainkit.recipe.suggestions import did_you_mean

WRITING = "seq2seq_lm"
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


def architecture_problems(asked: Asked) -> Iterator[Diagnostic]:
    """An error where the model is known not to be trained (by its task); nothing about a model that is not known.

    A transformers that is newer than the table may have learned more: then nothing is refused. What it has not, or
    cannot quantise, is known of the table's own release.
    """
    resolved, version = asked.resolved, asked.packages.get("transformers")
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
    elif described.model.get("quantization_config") is not None:
        yield resolved.error("model.path", *quantized_already(str(model.path)))
    elif not _newer(version):
        yield from _problems(resolved)
        if version is not None and release(version)[:2] == release(TRANSFORMERS):
            yield from _unknown(resolved)
            yield from _not_quantised(resolved)


def architecture_notices(context: Context) -> Iterator[Diagnostic]:
    """The same as warnings, where transformers is newer than what is known of it, and what is hardly meant."""
    version, resolved = context.facts.packages.get("transformers"), context.resolved
    model, name, known = resolved.recipe.model, _name(resolved), resolved.described.model
    if not isinstance(model, HfModel):
        return
    halved = model.task == "causal_lm" and WRITING in TASKS_OF.get(name, ()) and "causal_lm" in TASKS_OF[name]
    if halved and not resolved.given("model.task") and known.get("is_encoder_decoder", True):
        what = (
            f"{name} is an encoder-decoder, and as causal_lm, the default of model.task, its decoder alone is trained"
        )
        yield warning(what, f"{_hint(name)}; or write model.task: causal_lm")
    if name in OVERFLOWING and model.path and context.dtype == "fp16":
        what = f"{name} was trained in bf16, with activations that fp16 cannot hold: the loss may become NaN"
        yield warning(what, "set precision: bf16, or fp32 on cards without units for it")
    if _newer(version):
        for found in _problems(resolved):
            what = f"{found.what} (as of transformers {TRANSFORMERS}; {version} is installed)"
            yield warning(what, found.hint)


def _name(resolved: Resolved) -> str:
    """The `model_type`; empty where it is not known."""
    found = getattr(resolved.recipe.model, "architecture", None) or resolved.described.model.get("model_type")
    return found if isinstance(found, str) else ""


def _newer(version: str | None) -> bool:
    return version is not None and release(version)[:2] > release(TRANSFORMERS)


def _problems(resolved: Resolved) -> Iterator[Diagnostic]:
    model = resolved.recipe.model
    if not isinstance(model, HfModel):
        return
    settings, name = resolved.described.model, _name(resolved)
    if name not in TASKS_OF:
        return
    key = "model.task" if resolved.given("model.task") else "model.architecture" if model.architecture else "model.path"
    tasks = TASKS_OF[name]
    if model.task in tasks:
        switch = LOOKING_AHEAD.get(name, "")
        if model.task == "causal_lm" and switch != "" and not {**settings, **model.config}.get(switch or ""):
            what = f"model.task causal_lm: {name} sees the token that it is to predict"
            hint = f"set model.task: {'masked_lm' if 'masked_lm' in tasks else 'sequence_classification'}"
            hint += f", or model.config.{switch}: true, with which it looks back alone" if switch else ""
            yield resolved.error(key, what, hint, why="it was made to fill in tokens with those on both sides in view")
        yield from _without_padding(resolved)
        if name in ENDED and model.task == "sequence_classification" and _endless(resolved):
            what = f"model.task sequence_classification: {name} reads the label at the token that ends a text"
            hint = (
                "name the model's tokenizer in data.tokenizer, which ends texts with it, or take a model such as bert"
            )
            yield resolved.error(key, what, hint, why="random samples and bytes have no such token")
        return
    why = f"{CLASSES[model.task]} of transformers {TRANSFORMERS} does not have it"
    yield resolved.error(key, f"model.task {model.task}: {_what(name, model.task)}", _hint(name), why=why)


def _endless(resolved: Resolved) -> bool:
    """Whether the recipe's texts have no token at their end."""
    data = resolved.recipe.data
    return data.kind == "random" or (data.kind in ("jsonl", "dataset") and getattr(data, "tokenizer", None) is None)


def _without_padding(resolved: Resolved) -> Iterator[Diagnostic]:
    """Of a classifier that cannot tell where a text ends."""
    model, settings = resolved.recipe.model, resolved.described.model
    if not isinstance(model, HfModel) or model.task != "sequence_classification" or (model.path and not settings):
        return
    known = {**settings, **model.config}
    if known.get("pad_token_id") is None and ("pad_token_id" in known or _name(resolved) in UNPADDED):
        what = f"model.config.pad_token_id: {_name(resolved)} has no padding token"
        hint = "set it to that of the tokenizer, or to its end of text where it has none; for bytes to 0"
        why = "a classifier reads the last token of a text, and cannot tell where it ends"
        yield resolved.error("model.config", what, hint, why=why)


def _unknown(resolved: Resolved) -> Iterator[Diagnostic]:
    """Of a type that transformers does not have, or of a config.json that says none."""
    settings, name, model = resolved.described.model, _name(resolved), resolved.recipe.model
    path = getattr(model, "path", None)
    if name in TASKS_OF or (path is not None and not settings):  # which is not known
        return
    key = "model.path" if path is not None else "model.architecture"
    if not name:
        what, why = f"the config.json of {path} has no model_type, which says what the model is", ""
    else:
        what, why = (
            f"{name} is no model of transformers {TRANSFORMERS}",
            "model_type in its config.json" if path else "",
        )
    hint = did_you_mean(name, TASKS_OF, "choose a model of transformers")
    if settings.get("auto_map"):
        why = "code that lies beside weights is not run"
        hint = "import it as your own module, with model.kind: target, or choose a model of transformers"
    yield resolved.error(key, f"{key}: {what}", hint, why=why)


def _not_quantised(resolved: Resolved) -> Iterator[Diagnostic]:
    name, settings = _name(resolved), {**resolved.described.model, **getattr(resolved.recipe.model, "config", {})}
    few = any(isinstance(settings.get(each), int) and settings[each] <= 1 for each in EXPERTS)
    if quantized_bits(resolved.recipe) and name in MIXTURES and not few:
        why = f"the experts of a block of {name} lie in one tensor, and bitsandbytes quantises linear layers alone"
        what = f"model.quantize: {name} is a mixture of experts"
        yield resolved.error("model.quantize", what, "leave model.quantize out, or take a dense model", why=why)


def _what(name: str, task: str) -> str:
    if task == WRITING:
        return f"{name} is no encoder-decoder of texts"
    if WRITING in TASKS_OF[name] and task == "causal_lm":
        return f"{name} is an encoder-decoder, which writes a target for a source and continues no text"
    return f"{name} is not made for it"


def _hint(name: str) -> str:
    tasks = TASKS_OF[name]
    if not tasks:
        return "choose another model: this one is for none of the tasks"
    if WRITING in tasks:
        return f"set model.task: {WRITING}, with the source in data.prompt_field and the target in data.field"
    return f"set model.task: {' or '.join(tasks)}, or choose another model"
