"""Optimizer and schedule of a DeepSpeed file, as settings of the recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainkit.frameworks.base.draft import Draft, wrong_values
from trainkit.frameworks.base.foreign_file import ForeignFile
from trainkit.frameworks.deepspeed.config import AUTO
from trainkit.recipe.layers.assignment import Assignment
from trainkit.recipe.layers.merge import value_at

OPTIMIZERS = {"AdamW": "adamw_torch", "Adam": "adamw_torch", "SGD": "sgd"}
SCHEDULES = {"WarmupCosineLR": "cosine", "WarmupDecayLR": "linear", "WarmupLR": "constant_with_warmup"}
_OPTIMIZER = {"lr": "lr", "weight_decay": "weight_decay", "eps": "eps", "momentum": "beta1"}


@dataclass
class Entries:
    """The file's keys on their way into the draft.

    read: keys that need the file no more. contradicted: sections that its stage has no use for; unfit: that no trainer
    reads; with one of either the file cannot be the base.
    """

    draft: Draft
    source: ForeignFile
    kind: str
    read: set[str] = field(default_factory=set)
    contradicted: list[str] = field(default_factory=list)
    unfit: list[str] = field(default_factory=list)

    def get(self, key: str) -> Any:
        """The value at a dotted key, None where there is none."""
        return value_at(self.source.tree, key)

    def place(self, key: str) -> str:
        """`file:line:column` of a key."""
        return self.source.at(key).place

    @property
    def low(self) -> bool:
        """Whether values are exchanged in 16 bits."""
        return any(self.get(f"{name}.enabled") is True for name in ("bf16", "bfloat16", "fp16"))

    def put(self, key: str, setting: str, value: Any, reason: str = "") -> None:
        """Set what a key means, or note what is wrong with it."""
        assignment = Assignment(setting, value, self.source.at(key))
        self.read.add(key)
        problems = wrong_values([assignment], self.draft)
        self.draft.problems += problems
        if not problems:
            self.draft.put(assignment, reason)

    def named(self, key: str) -> str | None:
        """The class that a key names, if it names one itself; a problem where it is no text."""
        value = self.get(key)
        if value in (None, AUTO):
            return None
        if not isinstance(value, str):
            self.draft.fail(f"{key} must be the name of a class, not {value!r}", self.source.at(key), "put in its name")
            return None
        return value

    def take(self, key: str, setting: str) -> None:
        """Set a setting to the value of a key that means the same."""
        value = self.get(key)
        if value not in (None, AUTO):
            self.put(key, setting, value)


def _optimizer(entries: Entries) -> None:
    kind = entries.named("optimizer.type")
    if kind is None:
        return
    if kind not in OPTIMIZERS and entries.source.program:
        return  # DeepSpeed makes it from the file
    if kind not in OPTIMIZERS:
        where = entries.source.at("optimizer.type")
        entries.draft.fail(f"optimizer.type {kind} has no counterpart in the recipe", where, _HINT)
        return
    l2 = entries.get("optimizer.params.adam_w_mode") is False
    if kind == "Adam" and l2:
        where = entries.source.at("optimizer.params.adam_w_mode")
        entries.draft.fail("Adam with adam_w_mode false has no counterpart in the recipe", where, _HINT)
        return
    if kind == "SGD" and entries.get("zero_allow_untested_optimizer") is True:
        entries.read.add("zero_allow_untested_optimizer")  # which the plan says by itself
    reason = "DeepSpeed's Adam decouples weight decay, unless adam_w_mode is false" if kind == "Adam" else ""
    entries.put("optimizer.type", "optimizer.name", OPTIMIZERS[kind], reason)
    entries.read |= {"optimizer.params.adam_w_mode", "optimizer.params.torch_adam"}
    for name, setting in _OPTIMIZER.items():
        entries.take(f"optimizer.params.{name}", f"optimizer.{setting}")
    if not entries.source.program:  # a script's own engine keeps DeepSpeed's defaults
        _defaults(entries, kind)
    betas = entries.get("optimizer.params.betas")
    if isinstance(betas, list) and len(betas) == 2:
        for setting, value in zip(("beta1", "beta2"), betas, strict=True):
            entries.put("optimizer.params.betas", f"optimizer.{setting}", value)


_HINT = "use AdamW, Adam or SGD, or remove the section and choose optimizer.name in the recipe"
# What DeepSpeed's optimizers take where the file says nothing (torch.optim.AdamW and SGD), and the recipe's do not.
_DEFAULTS: Mapping[str, Mapping[str, tuple[str, float]]] = {
    "AdamW": {"betas": ("beta2", 0.999), "weight_decay": ("weight_decay", 0.01), "lr": ("lr", 1e-3)},
    "Adam": {"betas": ("beta2", 0.999), "weight_decay": ("weight_decay", 0.0), "lr": ("lr", 1e-3)},
    "SGD": {"momentum": ("beta1", 0.0), "weight_decay": ("weight_decay", 0.0), "lr": ("lr", 1e-3)},
}


def _defaults(entries: Entries, kind: str) -> None:
    missing = {
        setting: value
        for name, (setting, value) in _DEFAULTS[kind].items()
        if entries.get(f"optimizer.params.{name}") is None
    }
    reason = f"the file leaves {', '.join(missing)} to DeepSpeed's {kind}, whose defaults are not the recipe's"
    for setting, value in missing.items():
        entries.draft.set(f"optimizer.{setting}", value, entries.source.at("optimizer"), reason)


def _scheduler(entries: Entries) -> None:
    kind, params = entries.named("scheduler.type"), "scheduler.params"
    if kind is None:
        return
    if kind not in SCHEDULES and entries.source.program:
        return  # DeepSpeed makes it from the file
    if kind not in SCHEDULES:
        where, known = entries.source.at("scheduler.type"), ", ".join(SCHEDULES)
        hint = f"use {known}, or remove the section and choose schedule.name in the recipe"
        entries.draft.fail(f"scheduler.type {kind} has no counterpart in the recipe", where, hint)
        return
    logarithm = kind != "WarmupCosineLR" and entries.get(f"{params}.warmup_type") in (None, "log")
    if logarithm and entries.source.program:
        return  # which the recipe has not: the file keeps the schedule
    entries.put("scheduler.type", "schedule.name", SCHEDULES[kind])
    entries.take(f"{params}.warmup_num_steps", "schedule.warmup_steps")
    entries.take(f"{params}.total_num_steps", "train.steps")
    entries.take(f"{params}.cos_min_ratio", "schedule.min_lr_ratio")
    if kind == "WarmupDecayLR":
        entries.put("scheduler.type", "schedule.min_lr_ratio", 0.0, "WarmupDecayLR ends at 0")
    peak = entries.get(f"{params}.warmup_max_lr")
    if peak not in (None, AUTO):
        entries.put(f"{params}.warmup_max_lr", "optimizer.lr", peak)
    if entries.get(f"{params}.warmup_min_lr") in (0, AUTO) or entries.get(f"{params}.warmup_min_ratio") == 0:
        entries.read |= {f"{params}.warmup_min_lr", f"{params}.warmup_min_ratio"}
    if entries.get(f"{params}.warmup_type") == "linear":
        entries.read.add(f"{params}.warmup_type")
    elif logarithm:
        entries.read.add(f"{params}.warmup_type")
        entries.draft.remark(f"{kind} warms up along a logarithm by default; the recipe's warm-up is a line.")


MADE: tuple[Callable[[Entries], None], ...] = (_optimizer, _scheduler)
