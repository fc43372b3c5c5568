"""The fields of TrainingArguments as one table: what a recipe makes of each, and what its value means in a recipe.

What is not in it reaches no program of kind hf. Names and defaults are held against the installed library by a test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from trainkit.flags.special import HF_VALUES
from trainkit.frameworks.base import fsdp_settings as sharding
from trainkit.frameworks.base.fields import UNSET, Field, Unsupported, by_name, chosen, said
from trainkit.frameworks.deepspeed.fields import BATCH, formats
from trainkit.frameworks.hf_trainer import fsdp_config, optimizer
from trainkit.frameworks.torch_xla import on_xla
from trainkit.plan.context import Context
from trainkit.plan.provenance import chosen_at_start
from trainkit.recipe.layers.merge import value_at

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
        return self.needed(context) or said(context, *self.keys)

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


def _pushed(context: Context) -> Any:
    return True if chosen(context, f"{PUSH}.repo") else UNSET


def _push_strategy(context: Context) -> Any:
    asked = chosen(context, f"{PUSH}.strategy")
    return "all_checkpoints" if asked == "all" else asked


def _of_the_best(name: str, value: Any) -> Argument:
    key = "checkpoint.keep_best"
    return plain(name, key, encode=lambda context: value if chosen(context, key) else UNSET)


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
        encode=optimizer.encode_name,
        needed=on_xla,  # where the default has no step
    ),
    plain("learning_rate", "optimizer.lr", 5e-5),
    plain("weight_decay", "optimizer.weight_decay", 0.0),
    plain("adam_beta1", "optimizer.beta1", 0.9, encode=partial(optimizer.encode_moment, which="beta1")),
    plain("adam_beta2", "optimizer.beta2", 0.999, encode=partial(optimizer.encode_moment, which="beta2")),
    plain("adam_epsilon", "optimizer.eps", 1e-8, encode=partial(optimizer.encode_moment, which="eps")),
    plain("optim_args", ("optimizer.args", "optimizer.beta1", "optimizer.eps"), encode=optimizer.encode_arguments),
    plain("lr_scheduler_type", ("schedule.name", "schedule.min_lr_ratio"), "linear", encode=optimizer.encode_schedule),
    plain("lr_scheduler_kwargs", "schedule.min_lr_ratio", encode=optimizer.encode_schedule_settings),
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
    _of_the_best("metric_for_best_model", "loss"),
    _of_the_best("greater_is_better", False),
    plain(
        "resume_from_checkpoint",
        "checkpoint.resume",
        encode=_named_checkpoint,
        owned="plan",
    ),
    switch(
        "push_to_hub", f"{PUSH}.repo", encode=_pushed, decode=lambda on: Unsupported("which repository is not said")
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
