"""Digests: one of the whole recipe, and one of what decides the course of training."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from trainkit.launch_plan.model import BatchArithmetic
from trainkit.recipe.schema import Recipe
from trainkit.recipe.schema.launching import OWN_DEFAULTS

# What makes two runs the same training, so that one may resume from the other's checkpoint. Left out on purpose:
# strategy, launcher, devices and ranks (how the work is spread), micro batch and accumulation (the global batch stands
# for them), train.steps and epochs (a run may be made longer), evaluation, checkpoints, logging, output, loader
# processes and caches (they change no weight), compilation, attention kernel and activation checkpointing (the same
# mathematics).
TRAINING: dict[str, tuple[str, ...]] = {
    "program": ("kind", "script", "module", "args"),
    "model": ("*",),
    "data": ("*",),
    "peft": ("*",),
    "optimizer": ("*",),
    "schedule": ("*",),
    "train": ("seed", "max_grad_norm", "loss", "loss_reduction"),
    "precision": ("tf32", "weights"),
}
_LEFT_OUT = frozenset(
    {"data.workers", "data.prefetch_factor", "data.pin_memory", "data.persistent_workers", "data.cache"}
)
# Settings that checkpoints of before them know nothing of: as long as they say nothing, they are no part of it.
_LATER: dict[str, tuple[str, ...]] = {
    "model": ("quantize", "revision"),
    "peft": ("revision",),
    "schedule": ("from_zero", "decay_steps", "decay_type"),
    "data": (
        *("revision", "tokenizer_revision", "streaming", "mix", "shuffle_buffer", "shuffle_files", "validation_rows"),
        *("prompt_prefix", "target_length", "padding", "subset", "skip_empty", "validation_path"),
        *("train_on_prompts", "max_rows"),
    ),
}


def recipe_digest(recipe: Recipe) -> str:
    """SHA-256 over every setting, defaults included."""
    return _sha256(recipe.model_dump(mode="json", by_alias=True))


def training_digest(recipe: Recipe, batch: BatchArithmetic, dtype: str) -> str:
    """SHA-256 over the settings of TRAINING, the global batch and the resolved number format."""
    given = recipe.program.kind in OWN_DEFAULTS  # a setting that is left out is the program's own
    settings = recipe.model_dump(mode="json", by_alias=True, exclude_unset=given)
    settings.get("model", {}).get("moe", {}).pop("parallel", None)  # how the work is spread
    chosen: dict[str, Any] = {"batch.global": batch.global_, "precision.dtype": dtype}
    if batch.global_ is None:  # what is known of it
        chosen |= {"batch.micro": batch.micro, "batch.accumulation": batch.accumulation, "batch.ranks": batch.ranks}
    for section, names in TRAINING.items():
        inside = settings.get(section, {})
        for name in inside if names == ("*",) else names:
            key = f"{section}.{name}"
            if key not in _LEFT_OUT and name in inside and not _says_nothing_new(recipe, section, name):
                chosen[key] = inside[name]
    return _sha256(chosen)


def _says_nothing_new(recipe: Recipe, section: str, name: str) -> bool:
    """Whether it is a setting of _LATER with its default."""
    settings = getattr(recipe, section)
    if name not in _LATER.get(section, ()):
        return False
    default = type(settings).model_fields[name].get_default(call_default_factory=True)
    return bool(getattr(settings, name) == default)


# What the memory of a step does not depend on.
_WEIGHTLESS = (
    *("version", "name", "program", "devices", "nodes", "launcher", "hang", "schedule", "train", "eval", "checkpoint"),
    *("logging", "predict", "profile", "sample", "env", "env_from", "cluster", "container", "output"),
)
# Settings of optimizers that change values only, not what is kept for each parameter.
_NUMBERS_OF_OPTIMIZERS = ("lr", "weight_decay", "beta2", "eps")  # not beta1: 0 is no momentum, whose state is not kept


def memory_digest(recipe: Recipe, batch: BatchArithmetic, dtype: str) -> str:
    """SHA-256 over what decides how much memory a step of the built-in trainer takes, and what may be chosen from."""
    chosen = recipe.model_dump(mode="json", by_alias=True)
    for section in _WEIGHTLESS:
        del chosen[section]
    for name in _NUMBERS_OF_OPTIMIZERS:
        del chosen["optimizer"][name]
    for key in _LEFT_OUT:
        chosen["data"].pop(key.partition(".")[2], None)
    chosen["resolved"] = [recipe.train.loss, batch.global_, batch.ranks, batch.search, dtype]
    return _sha256(chosen)


def _sha256(value: Any) -> str:
    return hashlib.sha256(
        json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()
    ).hexdigest()
