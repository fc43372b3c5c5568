"""Rules on sources with targets (`model.task: seq2seq_lm`), and on settings that only such data has."""

from __future__ import annotations

from collections.abc import Iterator

from trainkit.errors import Diagnostic
from trainkit.recipe.validation.rule_context import Context

TASK = "seq2seq_lm"
# Key -> its value where nobody has set it.
OF_PAIRS = {"data.target_length": None, "data.padding": "longest"}


def check_pairs(context: Context) -> Iterator[Diagnostic]:
    """Errors where an encoder-decoder has no pairs to learn from, or others are given settings of pairs."""
    kind, task = context.get("data.kind"), context.get("model.task")
    if context.get("model.kind") != "hf" or task != TASK:
        for key, default in OF_PAIRS.items():
            if (context.get(key) or default) != default and context.get("program.kind") == "builtin":
                hint = f"remove it, or choose model.kind: hf with model.task: {TASK}"
                yield context.error(key, f"{key} is for model.task {TASK}, which this model is not for", hint)
        return
    if kind in ("text", "tokens"):
        what = f"model.task {TASK} needs sources with targets, and data.kind {kind} has none"
        hint = "choose data.kind: jsonl or dataset with data.prompt_field, or model.task: causal_lm"
        yield context.error("model.task", what, hint)
    if kind not in ("jsonl", "dataset"):
        return
    for key in ("data.messages_field", "data.tokens_field"):
        if context.get(key):
            what = f"{key} is one text, and model.task {TASK} learns to write one text for another"
            yield context.error(key, what, "name the source in data.prompt_field and the target in data.field")
            return
    if not context.get("data.prompt_field"):
        what = f"model.task {TASK} requires data.prompt_field, the field of the source"
        yield context.error("data.prompt_field", what, "set it; data.field is that of the target")


def check_written(context: Context) -> Iterator[Diagnostic]:
    """Errors where predictions are to be written that no model here can write."""
    key, strategy = "predict.tokens", context.get("strategy.kind")
    if not context.whole(key) or context.get("program.kind") != "builtin":
        return
    if context.get("model.kind") != "hf" or context.get("model.task") != TASK:
        yield context.error(key, f"{key} is for model.task {TASK}, which this model is not for", "remove it")
    elif context.get("data.kind") == "target":
        what = f"{key} needs texts to write, and of data.kind target the tokenizer is not known"
        yield context.error(key, what, "choose data.kind: jsonl or dataset, or remove it")
    elif context.get("predict.split") == "none":
        yield context.error(key, f"{key} requires predict.split", "set predict.split: validation")
    elif strategy in ("fsdp", "zero3"):
        what = f"{key} writes on each rank by itself, and {strategy} divides the weights"
        yield context.error(key, what, "remove it and export the model, or set strategy.kind to ddp or zero2")
