"""A script of one's own on Trainer: the recipe of trainkit's trainer that takes as much memory, as far as it tells."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from trainkit.launch_plan.context import Context
from trainkit.lazy import call, load
from trainkit.optimizers import OPTIMIZERS
from trainkit.recipe.described import MODEL_ARGUMENT
from trainkit.recipe.schema import Recipe
from trainkit.tasks import CAUSAL, LABELLING, MASKED, WRITING

own_flags: Callable[..., Mapping[str, Any]] = call("trainkit.tools.hf.argv_reader:own_flags")  # few plans need it

# How the scripts of transformers, trl and others call the tokens of a sample, and those of a target.
LENGTHS = ("block_size", "max_seq_length", "max_seq_len", "max_length", "model_max_length", "cutoff_len",
           "max_source_length")  # fmt: skip
TARGETS = ("max_target_length",)
# A script's name says what it trains; else the class that the model was saved from.
TASKS: Mapping[str, str] = {
    r"mlm|MaskedLM|PreTraining": MASKED,
    r"glue|classif|SequenceClassification": LABELLING,
    r"summari|translat|seq2seq|ConditionalGeneration": WRITING,
    r"clm|sft|dpo|CausalLM|LMHead": CAUSAL,
}


def as_builtin(context: Context) -> Recipe | str:
    """The recipe, or why none is known."""
    recipe, model = context.recipe, context.resolved.described.model
    if recipe.program.kind != "hf":
        return "what a program of your own takes is in its code"
    own = own_flags(context.resolved)
    if not model:
        named = _text(own, MODEL_ARGUMENT)
        why = f"{named} is no folder here" if named else f"its arguments name no model (--{MODEL_ARGUMENT})"
        return f"what a script of your own takes depends on its model, and {why}"
    length = next((found for name in LENGTHS if (found := _number(own, name))), None)
    if length is None:
        return f"the script's arguments do not say how many tokens a sample has (--{', --'.join(LENGTHS[:3])}, …)"
    task = _task(recipe.program.script or recipe.program.module or "", model)
    if task is None:
        return "neither the script's name nor the model's class tells what is trained"
    name = (
        recipe.optimizer.name
        if context.resolved.given("optimizer.name")
        else _text(own, "optim") or str(_field("optim").default)
    )
    if name not in OPTIMIZERS:
        return f"it is not known what the optimizer {name} keeps"
    target = next((found for each in TARGETS if (found := _number(own, each))), length)
    checkpoints = recipe.efficiency.gradient_checkpointing.every or _switch(own, "gradient_checkpointing")
    weights = _text(own, "dtype") or _text(own, "torch_dtype") or ""
    sections: dict[str, Any] = {
        "model": {"kind": "hf", "path": recipe.program.seen(_text(own, MODEL_ARGUMENT)), "task": task},
        "data": {"kind": "random", "sequence_length": length, **({"target_length": target} if task == WRITING else {})},
        "precision": {"dtype": context.dtype, "tf32": recipe.precision.tf32,
                      "weights": "bf16" if weights in ("bf16", "bfloat16") else "fp32"},
        "optimizer": {"name": name},
        "efficiency": {"gradient_checkpointing": bool(checkpoints)},
        "strategy": recipe.strategy.model_dump(mode="json"),
    }  # fmt: skip
    if _switch(own, "use_peft"):
        sections["peft"] = {"kind": "lora", "rank": _number(own, "lora_r") or 16}
    if _switch(own, "load_in_4bit"):
        sections["model"]["quantize"] = {"bits": 4}
    try:
        return Recipe.model_validate(sections)
    except ValidationError as error:
        first = error.errors()[0]
        return f"trainkit's trainer takes no such {'.'.join(map(str, first['loc']))}: {first['msg']}"


def _field(name: str) -> Any:
    """The field of TrainingArguments of that name, older ones included; None for an argument of the script's own."""
    return load("trainkit.tools.hf.fields:BY_NAME").get(name)


def _flag(own: Mapping[str, Any], name: str) -> Any:
    field = _field(name)
    return own.get(field.name if field else name)  # they are by their newest names


def _text(own: Mapping[str, Any], name: str) -> str:
    flag = _flag(own, name)
    return " ".join(flag.values) if flag else ""


def _number(own: Mapping[str, Any], name: str) -> int | None:
    text = _text(own, name)
    return int(text) if text.isdecimal() and int(text) else None


def _switch(own: Mapping[str, Any], name: str) -> bool:
    flag = _flag(own, name)
    return bool(flag and flag.switch)


def _task(script: str, model: Mapping[str, Any]) -> str | None:
    classes = " ".join(map(str, model.get("architectures") or ()))
    for text in (script.rsplit("/", 1)[-1], classes):
        for pattern, task in TASKS.items():
            if re.search(pattern, text):
                return task
    return None
