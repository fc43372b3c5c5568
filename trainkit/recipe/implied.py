"""What follows from what a recipe gives: kinds by the settings that they alone have, and the defaults of fine-tuning.

A pretrained model forgets what it knows at the learning rates of pretraining, and its own tokenizer is the only one
whose ids it knows. Whatever a layer gives counts more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trainkit.errors import Origin
from trainkit.recipe.merge import Merge, are_rows
from trainkit.recipe.resolved import Entry
from trainkit.recipe.schema.fields import schema

Implied = Iterator[tuple[str, Any, str]]  # key, value, and why
Get = Callable[[str], Any]
LORA_RATE, FULL_RATE, ENCODER_RATE, PAIRS_RATE = 2e-4, 1e-5, 2e-5, 1e-4
QLORA, DEVLIN = "QLoRA (arXiv:2305.14314, table 9)", "BERT (arXiv:1810.04805, appendix A.3)"
T5_GUIDE = "transformers' documentation of T5"
TULU = "usual for all weights of a language model (Tulu 2, arXiv:2311.10702: 1e-5 to 2e-5)"


def imply(state: Merge) -> None:
    """Put what follows beneath what the layers give. A later value may follow from an earlier one."""
    for rule in (_kinds, _tokenizer, _lengths, _fine_tuning):
        for key, value, why in rule(state.get):
            section, _, name = key.rpartition(".")
            target: Any = state.tree
            for part in section.split("."):
                target = target.setdefault(part, {}) if isinstance(target, dict) else None
            wrong = isinstance(value, str) and not value.isprintable()  # which is reported where it was given
            if not isinstance(target, dict) or name in target or wrong:
                continue
            target[name] = value
            cause = next(
                (state.places[each] for each in (f"{section}.path", "model.path") if each in state.places), None
            )
            origin = cause or state.places.get(section) or Origin("the recipe", 0, "the recipe")
            state.places.setdefault(key, origin)
            state.history.setdefault(key, []).append(Entry(value, origin, why, implied=True))


def _own_program(get: Get) -> bool:
    return get("program.kind") not in (None, "builtin") or any(get(f"program.{name}") for name in ("script", "module"))


def _kinds(get: Get) -> Implied:
    """`model.path` alone is a model of transformers, and a file of rows is a data set."""
    if _own_program(get):
        return
    for section in ("model", "data"):
        given = get(section)
        if not isinstance(given, Mapping) or "kind" in given:
            continue
        fitting = [
            kind for kind, model in schema().sections[section].kinds.items() if {*given} <= {*model.model_fields}
        ]
        rows = [path for path in (given.get("path"), given.get("validation_path")) if are_rows(path)]
        if section == "data" and "dataset" in fitting and rows:
            yield "data.kind", "dataset", f"{rows[0]} is a file of rows"
        elif len(fitting) == 1:
            yield f"{section}.kind", fitting[0], f"no other has {', '.join(given)}"
        elif section == "model" and fitting and "gpt" not in fitting:
            yield "model.kind", fitting[0], f"the native model has no {', '.join(given)}"


def _pretrained(get: Get) -> bool:
    return not _own_program(get) and get("model.kind") == "hf" and isinstance(get("model.path"), str)


def _tokenizer(get: Get) -> Implied:
    if _pretrained(get) and get("data.kind") in (None, "text", "dataset"):
        yield "data.tokenizer", get("model.path"), "the model's own: it knows no other's ids"


def _lengths(get: Get) -> Implied:
    if _pretrained(get) and get("data.kind") in (None, "text", "dataset") and get("data.streaming") is not True:
        why = "what 99 of 100 rows fit into" if get("data.kind") == "dataset" else "1024, or what the model can read"
        yield "data.sequence_length", "auto", why
        if get("model.task") == "seq2seq_lm":
            yield "data.target_length", "auto", "what 99 of 100 targets fit into"


def _fine_tuning(get: Get) -> Implied:
    """Defaults for a model with weights. Those of the schema are for pretraining."""
    if not _pretrained(get):
        return
    task = get("model.task") or "causal_lm"
    if get("peft.kind") == "lora":
        yield "optimizer.lr", LORA_RATE, f"for adapters: {QLORA}"
    elif task == "seq2seq_lm":
        yield "optimizer.lr", PAIRS_RATE, f"for an encoder-decoder: {T5_GUIDE}"
    elif task == "causal_lm":
        yield "optimizer.lr", FULL_RATE, f"for fine-tuning: {TULU}"
    else:
        yield "optimizer.lr", ENCODER_RATE, f"for an encoder: {DEVLIN}"
    yield "optimizer.weight_decay", 0.0, f"for fine-tuning: {QLORA}"
    yield "optimizer.beta2", 0.999, "for fine-tuning: Adam's own (arXiv:1412.6980)"
    if get("schedule.name") not in ("constant",):
        yield "schedule.warmup_steps", 0.03, f"for fine-tuning, a share of the steps: {QLORA}"
    yield "precision.dtype", "auto", "for fine-tuning: 16 bits where the device has units for them"
