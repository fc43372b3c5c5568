"""A trace without torch: a recipe's model is walked through on shapes, operator by operator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainkit.foresight.architectures import ALIASES, DEFAULTS, MAKERS, Gpt
from trainkit.foresight.trace import Trace, Wanted

# Settings that name an activation function, and those that operators.py knows.
ACTIVATION_NAMES = ("hidden_act", "hidden_activation", "activation_function")
ACTIVATIONS = {"relu", "silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", None}


def formula(wanted: Wanted, model: Mapping[str, Any]) -> Trace | None:
    """The trace of a recipe's micro step; None where this knows no formula for it.

    model: the settings of the model's folder (config.json), where it has one.
    """
    recipe = wanted.recipe
    asked, efficiency = recipe["model"], recipe["efficiency"]
    if recipe.get("train") or efficiency["attention"] not in ("auto", "sdpa") or recipe["peft"].get("dora"):
        return None
    if asked["kind"] == "gpt":
        return Gpt(wanted, asked).trace()
    name = str(asked.get("architecture") or model.get("model_type"))
    maker = MAKERS.get(name)
    if asked["kind"] != "hf" or maker is None or asked["task"] not in maker.tasks:
        return None
    alias = ALIASES.get(name, {})
    given = {alias.get(key, key): value for key, value in {**model, **asked["config"]}.items()}
    if "id2label" in given:
        given.setdefault("num_labels", len(given["id2label"]))
    settings = {**DEFAULTS[name], **given, "model_type": name}
    if not {settings[key] for key in ACTIVATION_NAMES if key in settings} <= ACTIVATIONS:
        return None
    return maker(wanted, settings).trace()
