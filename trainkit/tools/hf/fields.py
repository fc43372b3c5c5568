"""The table of TrainingArguments: each argument, what sets it in a recipe, and the way back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from trainkit.launch_plan.context import Context
from trainkit.launch_plan.provenance import chosen_at_start
from trainkit.machine.facts import at_least
from trainkit.metrics import lower_is_better
from trainkit.optimizers import OPTIMIZERS, optimizer
from trainkit.recipe.merge import value_at
from trainkit.recipe.short_flags import HF_VALUES
from trainkit.recipe.yaml_reader import compose
from trainkit.tools.base import fsdp_settings as sharding
from trainkit.tools.base.fields import UNSET, Field, Settings, Unsupported, by_name, chosen, is_set
from trainkit.tools.deepspeed.fields import BATCH, formats
from trainkit.tools.hf import fsdp_config
from trainkit.tools.hf.fsdp_config import can, version
from trainkit.tools.torch_xla import on_xla

FLAT = ("constant", "constant_with_warmup")  # schedules that never fall
WSD = "warmup_stable_decay"  # Trainer's name of the recipe's wsd
DECAYS = {"linear": "linear", "cosine": "cosine", "sqrt": "1-sqrt"}  # the recipe's schedule.decay_type -> Trainer's
SCHEDULE_KEYS = ("schedule.name", "schedule.min_lr_ratio", "schedule.decay_steps", "schedule.decay_type")
FLOORED = {"cosine": "cosine_with_min_lr", "linear": "polynomial"}  # what Trainer calls them where they end above 0


def encode_name(context: Context) -> Any:
    """`optim`: an optimizer that Trainer has under the recipe's name."""
    name = context.recipe.optimizer.name
    if name not in OPTIMIZERS:
        known = ", ".join(name for name, each in OPTIMIZERS.items() if each.hf_unsupported is None)
        hint = f"set optimizer.name to one of {known}, or make the optimizer in your script"
        return Unsupported("Trainer makes optimizers by name only", hint)
    refused, until = OPTIMIZERS[name].hf_unsupported, OPTIMIZERS[name].hf_until
    return Unsupported(*refused) if refused and (not until or at_least(version(context), until)) else name


def has_moment(name: str, which: str) -> bool:
    """Whether Trainer hands an optimizer a setting of AdamW's."""
    known = optimizer(name)
    return which in known.hf or bool(known.hf_unsupported)


def encode_moment(context: Context, which: str) -> Any:
    """`adam_beta1` and its like, for the optimizers that Trainer hands them to."""
    known = optimizer(context.recipe.optimizer.name)
    if not has_moment(context.recipe.optimizer.name, which):
        what = f"Trainer's {context.recipe.optimizer.name} has no such setting"
        return Unsupported(what, f"leave optimizer.{which} out")
    return UNSET if which in known.hf_args else chosen(context, f"optimizer.{which}")


def encode_arguments(context: Context) -> Any:
    """`optim_args`: `name=value,…` for the optimizers that read it."""
    name, args = context.recipe.optimizer.name, context.recipe.optimizer.args
    by_args = optimizer(name).hf_args
    if args and not by_args:
        return Unsupported(f"Trainer's {name} takes no further arguments", "leave optimizer.args out")
    found: dict[str, Any] = {
        theirs: chosen(context, f"optimizer.{ours}")
        for ours, theirs in by_args.items()
        if is_set(context, f"optimizer.{ours}")
    }
    found |= args
    if found and not can("optim_args reach torch's optimizers", context):
        what = f"transformers {version(context)} gives {name} no further arguments"
        return Unsupported(what, f"leave {', '.join(found)} out, or install a newer transformers")
    if any(isinstance(each, list) or "," in str(each) or "=" in str(each) for each in found.values()):
        why = "Trainer splits these arguments at commas and equals signs"
        return Unsupported(why, "make the optimizer in your script")
    return ",".join(f"{name}={each}" for name, each in found.items()) or UNSET


def decode_arguments(value: Any, name: str) -> Settings | Unsupported:
    """The arguments of an optimizer; those that the recipe has a key for by that key."""
    ours = {theirs: key for key, theirs in OPTIMIZERS[name].hf_args.items()} if name in OPTIMIZERS else {}
    found: dict[str, Any] = {}
    for part in str(value).split(","):
        argument, equals, text = (word.strip() for word in part.partition("="))
        document = compose(text)
        if not ours or not equals or not argument.isidentifier() or argument in found or document.errors:
            return Unsupported(f"{part!r} is not an argument of {name}", "write it as name=value,name=value")
        found[argument] = document.tree
    return {f"optimizer.{ours.get(each, f'args.{each}')}": value for each, value in found.items()}


def _floor(context: Context) -> float:
    """What the recipe asks for; its default is the built-in trainer's, not the script's."""
    return context.recipe.schedule.min_lr_ratio if is_set(context, "schedule.min_lr_ratio") else 0.0


def encode_schedule(context: Context) -> Any:
    """`lr_scheduler_type`: one that ends above 0 has a name of its own in Trainer."""
    name = context.recipe.schedule.name
    if name == "wsd":
        return WSD
    return FLOORED[name] if _floor(context) and name not in FLAT else name


def encode_schedule_settings(context: Context) -> Any:
    """`lr_scheduler_kwargs`: the cosine's floor as a share, the line's as a polynomial's last rate, and wsd's decay."""
    name, floor = context.recipe.schedule.name, _floor(context)
    if name == "wsd":
        return _encode_decay(context)
    if not floor:
        return UNSET
    if name in FLAT:
        return Unsupported(f"{name} never falls", "leave schedule.min_lr_ratio out")
    if name == "cosine":
        return {"min_lr_rate": floor}
    if not is_set(context, "optimizer.lr"):
        return Unsupported("Trainer takes the end of the line as a rate, not as a share", "set optimizer.lr too")
    return {"lr_end": context.recipe.optimizer.lr * floor, "power": 1.0}


def _encode_decay(context: Context) -> Any:
    """What Trainer's warm-up, stable, decay takes besides the warm-up and the length, which it is given."""
    decay, steps = context.recipe.schedule.decay_steps, context.recipe.train.steps
    if decay < 1 and steps is None:
        hint = "set train.steps, or schedule.decay_steps to a number of steps"
        return Unsupported("Trainer takes the decay in steps, not as a share", hint)
    return {
        "num_decay_steps": int(decay) if decay >= 1 else math.ceil((steps or 0) * decay),
        "decay_type": DECAYS[context.recipe.schedule.decay_type],
        "min_lr_ratio": _floor(context),
    }


def _decode_decay(settings: Mapping[str, Any]) -> Settings:
    """The way back, with Trainer's defaults (optimization.py: get_wsd_schedule).

    `num_stable_steps` is left to Trainer: only with the other lengths does it say how long the run decays.
    """
    asked = {"decay_type": "cosine", "min_lr_ratio": 0.0, "warmup_type": "linear", "num_cycles": 0.5, **settings}
    known = {"num_decay_steps", "decay_type", "min_lr_ratio", "warmup_type", "num_cycles"}
    shapes = {theirs: ours for ours, theirs in DECAYS.items()}
    same = (asked["warmup_type"], asked["num_cycles"]) == ("linear", 0.5) and asked["decay_type"] in shapes
    if asked.keys() != known or not same:
        return {}
    return {
        "schedule.name": "wsd",
        "schedule.decay_steps": asked["num_decay_steps"],
        "schedule.decay_type": shapes[asked["decay_type"]],
        "schedule.min_lr_ratio": asked["min_lr_ratio"],
    }


def decode_schedule(name: str, settings: Mapping[str, Any], peak: float | None) -> Settings:
    """Schedule and floor out of both fields; nothing where they say something that a recipe cannot."""
    ratio: Any = None
    if name == WSD:
        return _decode_decay(settings)
    if name == FLOORED["cosine"] and settings.keys() == {"min_lr_rate"}:
        ratio = settings["min_lr_rate"]
    elif name == FLOORED["cosine"] and settings.keys() == {"min_lr"}:
        ratio = _share(settings["min_lr"], peak)
    elif name == FLOORED["linear"] and settings.keys() == {"lr_end", "power"} and settings["power"] == 1:
        ratio = _share(settings["lr_end"], peak)
    if not isinstance(ratio, int | float):
        return {}
    shape = next(ours for ours, theirs in FLOORED.items() if theirs == name)
    return {"schedule.name": shape, "schedule.min_lr_ratio": ratio}


def _share(rate: Any, peak: float | None) -> float | None:
    """A rate over the peak, without the last digits that the division of two decimal fractions adds."""
    return float(f"{rate / peak:.12g}") if peak and isinstance(rate, int | float) else None


OUTPUT = "output"  # folder in the run directory
PUSH = "checkpoint.push_to_hub"


@dataclass(frozen=True, slots=True)
class Argument(Field):
    """One field of TrainingArguments, and with it one flag of the script's.

    switch: whether it takes yes or no. needed: where it is given though no layer says it. owned: where the program's
    own arguments may not say otherwise: `plan` anywhere, for the plan decides it in any case; else where a layer says
    it, of which an import must be able to read `recipe`.
    """

    switch: bool = False
    needed: Callable[[Context], bool] = lambda context: False
    owned: Literal["", "recipe", "plan"] = ""

    def is_given(self, context: Context) -> bool:
        """Whether the plan decides the field; its value may still be UNSET."""
        return self.needed(context) or is_set(context, *self.keys)

    def name_in(self, version: str) -> str:
        """What a version calls the field: before `since` by the name that it had."""
        return self.name if self.known_to(version) or not self.aliases else self.aliases[0]


def plain(name: str, keys: str | tuple[str, ...], default: Any = None, **columns: Any) -> Argument:
    """A field with the value of one key, the first, as it is; what HF's own values mean is known with its flag."""
    names = (keys,) if isinstance(keys, str) else keys
    decode = HF_VALUES.get(name, lambda value: {names[0]: value})
    codec = {"encode": lambda context: chosen(context, names[0]), "decode": decode}
    return Argument(name, names, default=default, **{**codec, **columns})


def switch(
    name: str, keys: str | tuple[str, ...], default: Any = False, *, means: Any = True, **columns: Any
) -> Argument:
    """A field that takes yes or no. means: the value of the key that yes stands for; no then says nothing."""
    key = keys if isinstance(keys, str) else keys[0]
    decode = (lambda on: {key: on}) if means is True else (lambda on: {key: means} if on else {})
    return plain(name, keys, default, **{"decode": decode, "switch": True, **columns})


def _on_cpu(context: Context) -> bool:
    return context.topology.device == "cpu"


def _micro(context: Context) -> Any:
    if context.recipe.batch.micro == "auto":
        return Unsupported("only the built-in trainer tries what fits", "write a number, or leave batch.micro out")
    return _side(context.batch.micro)


def _side(size: int | None) -> Any:
    """A size of the batch; one that nobody gave is the script's own."""
    return UNSET if size is None else size


def _sized_by_file(context: Context) -> bool:
    """Whether DeepSpeed's file of the user's says a size, with which Trainer compares its own."""
    return context.zero and any(type(value_at(_base(context), row.name)) is int for row in BATCH)


def _base(context: Context) -> Any:
    base = context.resolved.attachments.get("strategy.config")
    return base.tree if base else {}


def _format(dtype: str) -> Argument:
    """Where DeepSpeed's file of the user's enables a format, Trainer compares its own with it."""

    def needed(context: Context) -> bool:
        return context.zero and dtype in formats(_base(context))

    columns = {"encode": lambda context: context.dtype == dtype, "needed": needed, "owned": "recipe"}
    return switch(dtype, "precision.dtype", means=dtype, **columns)


def _eval_format(dtype: str) -> Argument:
    def encode(context: Context) -> Any:
        asked = context.recipe.precision.eval
        if asked == "fp32" and context.dtype != "fp32":
            why = "Trainer evaluates in the format of the training, or in 16 bits"
            return Unsupported(why, "set precision.eval to same or bf16")
        return True if asked == dtype else UNSET

    return switch(f"{dtype}_full_eval", "precision.eval", means=dtype, encode=encode)


def _bucket(context: Context) -> Any:
    size = chosen(context, "strategy.bucket_mb")
    if context.recipe.strategy.kind != "ddp":
        return UNSET
    return int(size) if size.is_integer() else Unsupported("Trainer takes whole MiB", "write a whole number")


def _recomputing(context: Context) -> Any:
    every = context.recipe.efficiency.gradient_checkpointing.every
    if every is not True and every:
        hint = f"set {sharding.CHECKPOINTING} to true"
        return Unsupported("transformers recomputes every block or none", hint)
    # Under FSDP its own switch does this (fsdp_config), and both together are an error of Trainer's.
    return UNSET if context.recipe.strategy.kind == "fsdp" and every else every


def _compiling(name: str) -> Argument:
    on, key = "efficiency.compile.enabled", f"efficiency.compile.{name}"
    encode = {"encode": lambda context: chosen(context, key) if chosen(context, on) else UNSET}
    return plain(f"torch_compile_{name}", key, **encode)


def _named_checkpoint(context: Context) -> Any:
    """UNSET for `auto`, whose checkpoint is chosen when the run starts: a word of its own."""
    resume = context.recipe.checkpoint.resume
    return UNSET if chosen_at_start(context) or resume == "never" else resume


def _steps(context: Context) -> Any:
    if context.recipe.train.steps == 0:
        hint = "leave train.steps out, and pass do_eval without do_train in program.args"
        return Unsupported("0 means no limit to Trainer", hint)
    return chosen(context, "train.steps")


def _every(name: str, key: str, default: Any) -> Argument:
    """Steps between two events; 0 is said by the strategy beside it."""
    return plain(name, key, default, encode=lambda context: chosen(context, key) or UNSET)


def _save_strategy(context: Context) -> Any:
    checkpoint = context.recipe.checkpoint
    if checkpoint.keep_best and checkpoint.every_steps:
        hint = "leave one of checkpoint.keep_best and checkpoint.every_steps out"
        return Unsupported("Trainer saves the best or every so many steps, not both", hint)
    return "best" if checkpoint.keep_best else "steps" if checkpoint.every_steps else "no"


def _push_strategy(context: Context) -> Any:
    asked = chosen(context, f"{PUSH}.strategy")
    return "all_checkpoints" if asked == "all" else asked


def _of_the_best(name: str, encode: Callable[[Context], Any]) -> Argument:
    """What says which checkpoint is the best, where one is kept."""
    key, best = f"eval.{'best_metric' if name == 'metric_for_best_model' else name}", "checkpoint.keep_best"

    def encoded(context: Context) -> Any:
        return encode(context) if chosen(context, best) or is_set(context, "eval.best_metric", key) else UNSET

    return plain(name, (key, best), encode=encoded)


def _greater_is_better(context: Context) -> bool:
    asked = context.recipe.eval
    return not lower_is_better(asked.best_metric, greater=asked.greater_is_better)


FIELDS: tuple[Argument, ...] = (
    switch(
        "use_cpu",
        ("devices.type", "devices.select"),
        means="cpu",
        encode=lambda context: True if _on_cpu(context) else UNSET,
        needed=_on_cpu,
        owned="plan",
        aliases=("no_cuda",),
    ),
    plain(
        "per_device_train_batch_size",
        ("batch.micro", "batch.global"),
        8,
        encode=_micro,
        needed=_sized_by_file,
        owned="recipe",
        aliases=("per_gpu_train_batch_size",),
    ),
    plain(
        "gradient_accumulation_steps",
        ("batch.accumulation", "batch.global"),
        1,
        encode=lambda context: _side(context.batch.accumulation),
        needed=_sized_by_file,
        owned="recipe",
    ),
    plain(
        "per_device_eval_batch_size",
        "batch.eval_micro",
        8,
        encode=lambda context: _side(context.batch.eval_micro),
        aliases=("per_gpu_eval_batch_size",),
    ),
    _format("bf16"),
    _format("fp16"),
    switch("tf32", "precision.tf32", None, owned="recipe"),
    _eval_format("bf16"),
    _eval_format("fp16"),
    plain("fsdp", "strategy.kind", encode=fsdp_config.encode_switch, needed=fsdp_config.is_chosen, owned="plan"),
    plain("ddp_timeout", "hang.collective_seconds", 1800),
    switch("ddp_find_unused_parameters", "strategy.find_unused_parameters", None),
    plain(
        "ddp_bucket_cap_mb",
        "strategy.bucket_mb",
        encode=_bucket,
        decode=lambda value: {"strategy.bucket_mb": float(value)} if type(value) is int and value else Unsupported(""),
    ),
    switch(
        "activation_checkpointing",
        sharding.CHECKPOINTING,
        None,
        encode=_recomputing,
        since="5.23",
        aliases=("gradient_checkpointing",),
    ),
    switch("torch_compile", "efficiency.compile.enabled"),
    _compiling("backend"),
    _compiling("mode"),
    plain(
        "optim",
        "optimizer.name",
        "adamw_torch_fused",
        encode=encode_name,
        needed=on_xla,  # where the default has no step
    ),
    plain("learning_rate", "optimizer.lr", 5e-5),
    plain("weight_decay", "optimizer.weight_decay", 0.0),
    plain("adam_beta1", "optimizer.beta1", 0.9, encode=partial(encode_moment, which="beta1")),
    plain("adam_beta2", "optimizer.beta2", 0.999, encode=partial(encode_moment, which="beta2")),
    plain("adam_epsilon", "optimizer.eps", 1e-8, encode=partial(encode_moment, which="eps")),
    plain("optim_args", ("optimizer.args", "optimizer.beta1", "optimizer.eps"), encode=encode_arguments),
    plain("lr_scheduler_type", ("schedule.name", "schedule.min_lr_ratio"), "linear", encode=encode_schedule),
    plain("lr_scheduler_kwargs", SCHEDULE_KEYS, encode=encode_schedule_settings),
    plain("warmup_steps", "schedule.warmup_steps", 0),
    plain("max_steps", "train.steps", -1, encode=_steps),
    plain("num_train_epochs", "train.epochs", 3.0),
    plain("seed", "train.seed", 42),
    switch("full_determinism", "train.deterministic"),
    plain("max_grad_norm", "train.max_grad_norm", 1.0),
    plain(
        "eval_strategy",
        "eval.every_steps",
        "no",
        encode=lambda context: "steps" if chosen(context, "eval.every_steps") else "no",
        aliases=("evaluation_strategy",),
    ),
    _every("eval_steps", "eval.every_steps", None),
    plain("save_strategy", ("checkpoint.every_steps", "checkpoint.keep_best"), "steps", encode=_save_strategy),
    _every("save_steps", "checkpoint.every_steps", 500),
    plain("save_total_limit", "checkpoint.keep"),
    _of_the_best("metric_for_best_model", lambda context: chosen(context, "eval.best_metric")),
    _of_the_best("greater_is_better", _greater_is_better),
    plain(
        "resume_from_checkpoint",
        "checkpoint.resume",
        encode=_named_checkpoint,
        owned="plan",
    ),
    switch(
        "push_to_hub",
        f"{PUSH}.repo",
        encode=lambda c: True if chosen(c, f"{PUSH}.repo") else UNSET,
        decode=lambda on: Unsupported("which repository is not said"),
    ),
    plain("hub_model_id", f"{PUSH}.repo"),
    plain("hub_strategy", f"{PUSH}.strategy", "every_save", encode=_push_strategy),
    switch("hub_private_repo", f"{PUSH}.private", None),
    plain("dataloader_num_workers", "data.workers", 0),
    switch("dataloader_persistent_workers", "data.persistent_workers"),
    switch("dataloader_pin_memory", "data.pin_memory", True),
    plain("dataloader_prefetch_factor", "data.prefetch_factor"),
    plain("log_level", "logging.level", "passive"),
    plain("log_level_replica", "logging.replica_level", "warning"),
    switch("log_on_each_node", "logging.each_node", True),
    plain("logging_strategy", "logging.every_steps", "steps", encode=lambda context: "steps"),
    plain("logging_steps", "logging.every_steps", 500),
    plain(
        "report_to",
        "logging.report_to",
        "none",
        encode=lambda context: list(context.recipe.logging.report_to) or "none",
    ),
)
BY_NAME = by_name(FIELDS)  # older names included
