"""The flags of a script on transformers' Trainer: what they are in the recipe, by the table that makes flags of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trainkit.errors import Diagnostic
from trainkit.flags.registry import flags
from trainkit.frameworks.base.argv_reader import ScriptFlag, script_flags
from trainkit.frameworks.base.draft import Draft, FlagUse, ImportContext, read_flag
from trainkit.frameworks.hf_trainer.argv_reader import OLD
from trainkit.frameworks.hf_trainer.base_file import said_in_base
from trainkit.frameworks.hf_trainer.fields import ROWS
from trainkit.frameworks.hf_trainer.import_fsdp import FSDP_READERS
from trainkit.frameworks.hf_trainer.optimizer import BY_ARGS
from trainkit.frameworks.hf_trainer.versions import GONE, names_of
from trainkit.recipe.layers.assignment import Assignment

FILES = ("output_dir", "deepspeed")  # which the plan passes itself
_ROW = {name: row for row in ROWS for name in names_of(row.field)}
# Fields whose words must not stay with the program: the plan decides what they say.
_OWNED = frozenset({*FILES, "fsdp", *(name for name, row in _ROW.items() if row.owned)})


@dataclass
class Reading:
    """The flags on their way into the draft. said: by name, the last use of each; left: what stays with the program."""

    draft: Draft
    context: ImportContext
    said: dict[str, ScriptFlag]
    taken: set[str] = field(default_factory=set)

    def take(self, name: str, assignments: Sequence[Assignment], reason: str = "") -> None:
        """Set what a flag says; it leaves the program's words."""
        for each in assignments:
            self.draft.put(each, reason)
        self.taken.add(name)

    def value(self, name: str) -> str | None:
        """What follows a flag, None where it was not used."""
        return " ".join(self.said[name].values) if name in self.said else None


def read_program(draft: Draft, context: ImportContext, words: Sequence[str]) -> list[str]:
    """Settings out of the words of a script on Trainer; returns those that stay its own, in their order."""
    found = list(script_flags(words))
    reading = Reading(draft, context, {_newest(each.name): each for each in found if each.name})
    for name, reader in (dict.fromkeys(_known(), _by_flag) | dict(_SPECIAL) | dict(FSDP_READERS)).items():
        if name in reading.said and name not in reading.taken:
            reader(reading, name)
    for name, read in _STRATEGIES.items():
        read(reading, name)
    _best(reading)
    _plain_format(reading)
    said_in_base(draft, context)
    _gone(reading)
    return [word for each in found if _newest(each.name) not in reading.taken or not each.name for word in each.words]


def _plain_format(reading: Reading) -> None:
    """`--bf16 False` and `--fp16 False` say that neither is used."""
    denied = [name for name in ("bf16", "fp16") if name in reading.said and reading.said[name].switch is False]
    if denied and reading.draft.get("precision.dtype") is None:
        reading.draft.set("precision.dtype", "fp32", reading.said[denied[0]].origin)


def _newest(name: str) -> str:
    return OLD.get(name, name)


def _known() -> list[str]:
    """Fields that trainkit's own command line reads under the same name, in the order of the table."""
    return [name for name in (*_ROW, *FILES) if name in flags()]


def _by_flag(reading: Reading, name: str) -> None:
    phrase, value = reading.said[name], reading.value(name)
    if flags()[name].takes == "switch":
        if phrase.switch is None:
            _unread(reading, name, [])
            return
        value = "true" if phrase.switch else "false"
    elif not value:
        _unread(reading, name, [])
        return
    assignments, problems = read_flag(
        reading.draft, reading.context, FlagUse(name, value, phrase.origin), frozenset(reading.said)
    )
    if problems:
        _unread(reading, name, problems)
    else:
        reading.take(name, assignments)


def _unread(reading: Reading, name: str, problems: Sequence[Diagnostic]) -> None:
    """What the recipe cannot say stays with the program, unless the plan has to know it."""
    phrase = reading.said[name]
    shown = " ".join(phrase.words)
    if name not in _OWNED:
        reading.draft.remark(f"{shown} stays the program's own word: the recipe has no such value.")
    elif problems:
        reading.draft.problems += problems
    else:
        reading.draft.fail(f"{shown} cannot be read", phrase.origin, "write what transformers documents for it")


def _deepspeed(reading: Reading, name: str) -> None:
    """Trainer also takes the file's content in the place of its name, and a recipe names a file."""
    if (reading.value(name) or "").lstrip().startswith("{"):
        hint = "write these settings to a file, and name that"
        reading.draft.fail("--deepspeed holds settings, where a recipe names a file", reading.said[name].origin, hint)
    else:
        _by_flag(reading, name)


def _one(key: str, value: object, reason: str = "") -> Callable[[Reading, str], None]:
    """A switch that means one value of a key, and nothing when it is off."""

    def read(reading: Reading, name: str) -> None:
        phrase = reading.said[name]
        if phrase.switch is None:
            _unread(reading, name, [])
        else:
            reading.take(name, [Assignment(key, value, phrase.origin)] if phrase.switch else [], reason)

    return read


def _checkpointing(reading: Reading, name: str) -> None:
    """Its newest name; trainkit's flag has the older one."""
    phrase = reading.said[name]
    if phrase.switch is None:
        _unread(reading, name, [])
        return
    key = "efficiency.gradient_checkpointing.every"
    reading.take(name, [Assignment(key, phrase.switch, phrase.origin)])


def _bucket(reading: Reading, name: str) -> None:
    phrase, value = reading.said[name], reading.value(name) or ""
    if value.isdecimal() and int(value) and _replicated(reading):
        reading.take(name, [Assignment("strategy.bucket_mb", float(value), phrase.origin)])


def _unused(reading: Reading, name: str) -> None:
    phrase = reading.said[name]
    if phrase.switch is not None and _replicated(reading):
        reading.take(name, [Assignment("strategy.find_unused_parameters", phrase.switch, phrase.origin)])


def _replicated(reading: Reading) -> bool:
    """Whether the strategy is, or will be, a replica on each rank."""
    return (reading.draft.get("strategy.kind") or ("ddp" if reading.draft.replicas else "")) == "ddp"


def _optim_args(reading: Reading, name: str) -> None:
    """Arguments of torch's optimizers; those of others go with the name that the recipe has not."""
    optimizer = reading.draft.get("optimizer.name")
    if optimizer not in BY_ARGS:
        _unread(reading, name, [])
        return
    _by_flag(reading, name)
    for ours, theirs in BY_ARGS[optimizer].items():
        found = reading.draft.settings.pop(f"optimizer.args.{theirs}", None)
        if found is not None:
            reading.draft.put(replace(found, key=f"optimizer.{ours}"))


def _schedule(reading: Reading, name: str) -> None:
    """A schedule that ends above 0 has a name of its own in Trainer, and its floor stands in another flag."""
    shape, kwargs = reading.value(name) or "", _kwargs(reading.value("lr_scheduler_kwargs") or "")
    peak = reading.draft.get("optimizer.lr")
    ratio: object = None
    if shape == "cosine_with_min_lr" and kwargs.keys() == {"min_lr_rate"}:
        ratio = kwargs["min_lr_rate"]
    elif peak and (
        (shape == "cosine_with_min_lr" and kwargs.keys() == {"min_lr"})
        or (shape == "polynomial" and kwargs.keys() == {"lr_end", "power"} and kwargs["power"] == 1)
    ):
        ratio = _share(kwargs.get("min_lr", kwargs.get("lr_end")), peak)
    if not isinstance(ratio, int | float):
        _by_flag(reading, name)
        return
    origin = reading.said[name].origin
    known = {"cosine_with_min_lr": "cosine", "polynomial": "linear"}[shape]
    reading.take(name, [Assignment("schedule.name", known, origin)])
    origin = reading.said["lr_scheduler_kwargs"].origin
    reading.take("lr_scheduler_kwargs", [Assignment("schedule.min_lr_ratio", ratio, origin)])


def _kwargs(text: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _share(rate: object, peak: float) -> float | None:
    """A rate over the peak, without the last digits that the division of two decimal fractions adds."""
    return float(f"{rate / peak:.12g}") if isinstance(rate, int | float) else None


def _best(reading: Reading) -> None:
    """`--save_strategy best` by the loss, which is what the recipe calls the best."""
    metric = reading.value("metric_for_best_model")
    greater = reading.said.get("greater_is_better")
    if reading.value("save_strategy") != "best" or metric not in ("loss", "eval_loss"):
        return
    if greater is not None and greater.switch is not False:
        return
    origin = reading.said["save_strategy"].origin
    reading.take("save_strategy", [Assignment("checkpoint.keep_best", True, origin)])
    reading.taken |= {"metric_for_best_model", "greater_is_better"}


_SPECIAL: Mapping[str, Callable[[Reading, str], None]] = {
    "deepspeed": _deepspeed,
    "use_cpu": _one("devices.type", "cpu"),
    "use_mps_device": _one("devices.type", "mps"),
    "bf16_full_eval": _one("precision.eval", "bf16"),
    "fp16_full_eval": _one("precision.eval", "fp16"),
    "activation_checkpointing": _checkpointing,
    "adafactor": _one("optimizer.name", "adafactor"),
    "ddp_bucket_cap_mb": _bucket,
    "ddp_find_unused_parameters": _unused,
    "optim_args": _optim_args,
    "lr_scheduler_type": _schedule,
}


def _every(what: str, key: str, default: str) -> Callable[[Reading, str], None]:
    """`eval_strategy` and its like decide whether `eval_steps` counts at all."""

    def read(reading: Reading, name: str) -> None:
        draft, steps = reading.draft, f"{what}_steps"
        strategy, said = reading.value(name), reading.said.get(steps)
        effective = strategy or default
        if effective == "steps" and said is not None and draft.get(key) is not None:
            reading.taken.add(name)
        elif said is not None and effective != "steps":
            draft.settings.pop(key, None)
            reading.taken.discard(steps)
            if effective != "best":
                draft.remark(f"Trainer ignores {' '.join(said.words)}: --{name} is {effective}.")
        if strategy == "no" and what != "logging":
            draft.set(key, 0, reading.said[name].origin)
            reading.taken |= {name, steps}
        elif strategy == "steps" and what == "eval" and said is None and "logging_steps" in reading.said:
            every = reading.value("logging_steps") or ""
            if every.isdecimal() and int(every):
                reason = "Trainer evaluates as often as it logs where --eval_steps is missing"
                draft.set(key, int(every), reading.said[name].origin, reason)
                reading.taken.add(name)

    return read


_STRATEGIES: Mapping[str, Callable[[Reading, str], None]] = {
    "eval_strategy": _every("eval", "eval.every_steps", "no"),
    "save_strategy": _every("save", "checkpoint.every_steps", "steps"),
    "logging_strategy": _every("logging", "logging.every_steps", "steps"),
}


def _gone(reading: Reading) -> None:
    for name, phrase in reading.said.items():
        since, instead = GONE.get(phrase.name, ("", ""))
        if since and name not in reading.taken:
            reading.draft.remark(f"transformers {since} and later have no --{phrase.name}: write {instead}.")
