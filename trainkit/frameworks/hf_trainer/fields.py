"""Recipe key -> field of TrainingArguments, as one table. What is not here reaches no program of kind hf."""

from __future__ import annotations

from trainkit.frameworks.hf_trainer import fsdp
from trainkit.frameworks.hf_trainer.optimizer import OPTIMIZER
from trainkit.frameworks.hf_trainer.row import Row, Unfit, Value, given, plain, setting
from trainkit.plan.context import Context

DEEPSPEED = "deepspeed.json"
OUTPUT = "output"  # folder in the run directory


def _always(context: Context) -> bool:
    return True


def _on_cpu(context: Context) -> bool:
    return context.topology.device == "cpu"


def _zero(context: Context) -> bool:
    return context.zero


def _use_cpu(context: Context) -> Value:
    return True if _on_cpu(context) else None


def _micro(context: Context) -> Value | Unfit:
    if context.recipe.batch.micro == "auto":
        return Unfit("Only the built-in trainer tries what fits", "Write a number, or leave batch.micro out.")
    return context.batch.micro


def _full_eval(dtype: str) -> Row:
    def value(context: Context) -> Value | Unfit:
        wanted = context.recipe.precision.eval
        if wanted == "fp32" and context.dtype != "fp32":
            return Unfit(
                "Trainer evaluates in the format of the training, or in 16 bits", "Set precision.eval to same, or bf16."
            )
        return True if wanted == dtype else None

    return Row(f"{dtype}_full_eval", ("precision.eval",), value)


def _max_steps(context: Context) -> Value | Unfit:
    steps = context.recipe.train.steps
    if steps == 0:
        what = "0 means no limit to Trainer"
        return Unfit(what, "Leave train.steps out, and pass do_eval without do_train in program.args.")
    return steps


def _every(key: str) -> Row:
    """`eval_strategy`, `save_strategy`: whether there are steps at all."""

    def value(context: Context) -> Value | Unfit:
        if key == "checkpoint" and context.recipe.checkpoint.keep_best:
            if context.recipe.checkpoint.every_steps:
                what = "Trainer saves the best or every so many steps, not both"
                return Unfit(what, "Leave one of checkpoint.keep_best and checkpoint.every_steps out.")
            return "best"
        return "steps" if setting(context, f"{key}.every_steps") else "no"

    keys = (f"{key}.every_steps", *(("checkpoint.keep_best",) if key == "checkpoint" else ()))
    return Row({"eval": "eval_strategy", "checkpoint": "save_strategy"}[key], keys, value)


def _positive(field: str, key: str) -> Row:
    return Row(field, (key,), lambda context: setting(context, key) or None)


def _best(context: Context, value: Value) -> Value:
    return value if context.recipe.checkpoint.keep_best else None


def _resume(context: Context) -> Value:
    return context.resume.path


def _gradient_checkpointing(context: Context) -> Value | Unfit:
    wanted = context.recipe.efficiency.gradient_checkpointing
    if wanted.every is not True and wanted.every:
        return Unfit(
            "transformers recomputes every block or none", "Set efficiency.gradient_checkpointing.every to true."
        )
    # Under FSDP its own switch does this (fsdp_config), and both together are an error of Trainer's.
    return None if context.recipe.strategy.kind == "fsdp" and wanted.every else wanted.every


def _compile(field: str) -> Row:
    """Naming a backend or a mode switches compilation on in Trainer."""

    def value(context: Context) -> Value:
        return setting(context, f"efficiency.compile.{field}") if context.recipe.efficiency.compile.enabled else None

    return Row(f"torch_compile_{field}", (f"efficiency.compile.{field}",), value)


def _bucket(context: Context) -> Value | Unfit:
    size = setting(context, "strategy.bucket_mb")
    if not isinstance(size, float):
        return None
    return int(size) if size.is_integer() else Unfit("Trainer takes whole MiB", "Write a whole number.")


def _report_to(context: Context) -> Value:
    return list(context.recipe.logging.report_to) or "none"


def _dtype(dtype: str) -> Row:
    return Row(dtype, ("precision.dtype",), lambda context: context.dtype == dtype, always=_zero, owned=True)


ROWS: tuple[Row, ...] = (
    Row("use_cpu", ("devices.type", "devices.select"), _use_cpu, always=_on_cpu, owned=True),
    Row(
        "per_device_train_batch_size",
        ("batch.micro", "batch.global"),
        _micro,
        always=_always,
        owned=True,
    ),
    Row(
        "gradient_accumulation_steps",
        ("batch.accumulation", "batch.global"),
        lambda context: context.batch.accumulation,
        always=_always,
        owned=True,
    ),
    Row("per_device_eval_batch_size", ("batch.eval_micro",), lambda context: context.batch.eval_micro),
    _dtype("bf16"),
    _dtype("fp16"),
    plain("tf32", "precision.tf32", owned=True),
    _full_eval("bf16"),
    _full_eval("fp16"),
    Row("fsdp", ("strategy.kind",), fsdp.switch, always=fsdp.chosen, owned=True),
    plain("ddp_find_unused_parameters", "strategy.find_unused_parameters"),
    Row(
        "ddp_bucket_cap_mb", ("strategy.bucket_mb",), lambda c: _bucket(c) if c.recipe.strategy.kind == "ddp" else None
    ),
    Row(
        "activation_checkpointing",
        ("efficiency.gradient_checkpointing.every",),
        _gradient_checkpointing,
        owned=True,
    ),
    plain("torch_compile", "efficiency.compile.enabled"),
    _compile("backend"),
    _compile("mode"),
    *OPTIMIZER,
    Row("max_steps", ("train.steps",), _max_steps),
    plain("num_train_epochs", "train.epochs"),
    plain("seed", "train.seed"),
    plain("full_determinism", "train.deterministic"),
    plain("max_grad_norm", "train.max_grad_norm"),
    _every("eval"),
    _positive("eval_steps", "eval.every_steps"),
    _every("checkpoint"),
    _positive("save_steps", "checkpoint.every_steps"),
    plain("save_total_limit", "checkpoint.keep"),
    Row("metric_for_best_model", ("checkpoint.keep_best",), lambda context: _best(context, "loss")),
    Row("greater_is_better", ("checkpoint.keep_best",), lambda context: _best(context, False)),
    Row("resume_from_checkpoint", ("checkpoint.resume",), _resume, owned=True),
    plain("dataloader_num_workers", "data.workers"),
    plain("dataloader_persistent_workers", "data.persistent_workers"),
    plain("dataloader_pin_memory", "data.pin_memory"),
    plain("dataloader_prefetch_factor", "data.prefetch_factor"),
    plain("log_level", "logging.level"),
    plain("log_level_replica", "logging.replica_level"),
    plain("log_on_each_node", "logging.each_node"),
    Row("logging_strategy", ("logging.every_steps",), lambda context: "steps"),
    plain("logging_steps", "logging.every_steps"),
    Row("report_to", ("logging.report_to",), _report_to),
)


def spoken(context: Context, row: Row) -> bool:
    """Whether the row's field is given to the program."""
    return row.always(context) or given(context, *row.keys)
