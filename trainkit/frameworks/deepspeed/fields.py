"""Which key of DeepSpeed's JSON says the same as which setting of the recipe, as one table.

Keys: https://www.deepspeed.ai/docs/config-json/
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainkit.plan.model import BatchArithmetic
from trainkit.recipe.schema import GptModel, Optimizer, Recipe, Zero1, Zero2, Zero3

STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}
# Every other name is an AdamW, or refused; a class by import path is no type of DeepSpeed's.
OPTIMIZER_TYPES = {"sgd": "SGD"}
SCHEDULER_TYPES = {
    "cosine": "WarmupCosineLR",
    "linear": "WarmupDecayLR",
    "constant": "WarmupLR",
    "constant_with_warmup": "WarmupLR",
}


# Asynchronous reads and writes of what is swapped to NVMe. The queue is four times as deep as DeepSpeed's default:
# a drive that is read in parallel is fast only with many requests at once.
AIO: dict[str, Any] = {
    "block_size": 2**20,
    "queue_depth": 32,
    "intra_op_parallelism": 1,
    "single_submit": False,
    "overlap_events": True,
}


@dataclass(frozen=True, slots=True)
class Row:
    """One key, the value that the recipe gives it, and the recipe keys that decide the value.

    emit: whether the key is written when the base file lacks it; otherwise it is only compared, or filled where "auto".
    firm: whether a base file that says otherwise is an error. It is not where the setting affects speed alone and the
        recipe leaves it at its default.
    """

    key: str
    value: Any
    recipe_keys: tuple[str, ...]
    emit: bool = True
    firm: bool = True


def rows(recipe: Recipe, batch: BatchArithmetic, dtype: str) -> list[Row]:
    """The whole table for one recipe."""
    strategy = recipe.strategy
    assert isinstance(strategy, Zero1 | Zero2 | Zero3), "only the zero strategies have a DeepSpeed configuration"
    return [
        *_batch(batch),
        Row("gradient_clipping", recipe.train.max_grad_norm, ("train.max_grad_norm",)),
        *_formats(dtype),
        *_zero(strategy, dtype),
        *_nvme(strategy, recipe.optimizer),
        *_hf_auto(recipe, strategy.kind),
        *_optimizer(recipe),
        *_scheduler(recipe),
        *_engine(recipe),
    ]


def _batch(batch: BatchArithmetic) -> list[Row]:
    return [
        Row("train_batch_size", batch.global_, ("batch.global",)),
        Row("train_micro_batch_size_per_gpu", batch.micro, ("batch.micro",)),
        Row("gradient_accumulation_steps", batch.accumulation, ("batch.accumulation",)),
    ]


def _formats(dtype: str) -> list[Row]:
    low = dtype != "fp32"
    return [
        Row("bf16.enabled", dtype == "bf16", ("precision.dtype",), emit=dtype == "bf16"),
        Row("fp16.enabled", dtype == "fp16", ("precision.dtype",), emit=dtype == "fp16"),
        # Micro steps add up in fp32 under every strategy.
        Row("data_types.grad_accum_dtype", "fp32", ("precision.dtype",), emit=low, firm=False),
    ]


def _zero(strategy: Zero1 | Zero2 | Zero3, dtype: str) -> list[Row]:
    stage, given = STAGES[strategy.kind], strategy.model_fields_set
    bucket = int(strategy.bucket_mb * 2**20) // (4 if dtype == "fp32" else 2)  # DeepSpeed counts elements
    sized = "bucket_mb" in given
    offloads = strategy.offload_optimizer != "none"
    found = [
        Row("zero_optimization.stage", stage, ("strategy.kind",)),
        Row("zero_optimization.reduce_bucket_size", bucket, ("strategy.bucket_mb",), firm=sized),
        Row("zero_optimization.allgather_bucket_size", bucket, ("strategy.bucket_mb",), emit=stage < 3, firm=sized),
        Row(
            "zero_optimization.overlap_comm",
            strategy.overlap_comm,
            ("strategy.overlap_comm",),
            firm="overlap_comm" in given,
        ),
        Row(
            "zero_optimization.offload_optimizer.device",
            strategy.offload_optimizer,
            ("strategy.offload_optimizer",),
            emit=offloads,
        ),
        # The optimizer stays the one that the recipe names; DeepSpeed's own is not forced on it.
        Row("zero_force_ds_cpu_optimizer", False, ("optimizer.name", "strategy.offload_optimizer"), emit=offloads),
    ]
    parameters = strategy.offload_param if isinstance(strategy, Zero3) else "none"
    found.append(
        Row(
            "zero_optimization.offload_param.device",
            parameters,
            ("strategy.offload_param",) if stage == 3 else ("strategy.kind",),
            emit=parameters != "none",
        )
    )
    if isinstance(strategy, Zero3):
        key, gathers = "zero_optimization.stage3_gather_16bit_weights_on_model_save", strategy.gather_16bit
        found.append(Row(key, gathers, ("strategy.gather_16bit",), emit=gathers, firm="gather_16bit" in given))
    return found


def _nvme(strategy: Zero1 | Zero2 | Zero3, optimizer: Optimizer) -> list[Row]:
    """Where to swap, and how: what DeepSpeed would take by itself is written out to be seen, the rest is explained."""
    if not isinstance(strategy, Zero3) or strategy.nvme_path is None:
        return []
    section = "zero_optimization"
    chosen = [name for name in ("offload_optimizer", "offload_param") if getattr(strategy, name) == "nvme"]
    keys = tuple(f"strategy.{name}" for name in chosen)
    found = [Row(f"{section}.{name}.nvme_path", strategy.nvme_path, ("strategy.nvme_path",)) for name in chosen]
    if "offload_optimizer" in chosen:
        # Weights, gradients and two moments; a class of the user's own, or an argument, may ask for one more.
        buffers = 5 if optimizer.args or ":" in optimizer.name else 4
        found.append(Row(f"{section}.offload_optimizer.buffer_count", buffers, ("optimizer.name",), firm=False))
    if "offload_param" in chosen:
        # Without it the first 10^9 parameters of a rank would stay in memory, which is all of most models.
        found.append(Row(f"{section}.offload_param.max_in_cpu", 0, ("strategy.offload_param",), firm=False))
    # What is in memory at a time; DeepSpeed's 10^9 would be, again, all of most models.
    found.append(Row(f"{section}.sub_group_size", 10**8, keys, firm=False))
    return [*found, *(Row(f"aio.{name}", value, keys, firm=False) for name, value in AIO.items())]


def _hf_auto(recipe: Recipe, kind: str) -> list[Row]:
    """What HF's integration puts where a stage-3 file says "auto" (transformers, integrations/deepspeed.py)."""
    if not isinstance(recipe.model, GptModel):
        return []  # the width is in the model's own configuration, which no plan reads
    width, keys, section = recipe.model.hidden_size, ("model.hidden_size",), "zero_optimization"
    return [
        Row(f"{section}.stage3_prefetch_bucket_size", int(0.9 * width * width), keys, emit=False, firm=False),
        Row(f"{section}.stage3_param_persistence_threshold", 10 * width, keys, emit=False, firm=False),
    ]


def _optimizer(recipe: Recipe) -> list[Row]:
    optimizer = recipe.optimizer
    kind = OPTIMIZER_TYPES.get(optimizer.name, optimizer.name if ":" in optimizer.name else "AdamW")
    values: dict[str, tuple[Any, tuple[str, ...]]] = {
        "type": (kind, ("optimizer.name",)),
        "params.lr": (optimizer.lr, ("optimizer.lr",)),
        "params.weight_decay": (optimizer.weight_decay, ("optimizer.weight_decay",)),
    }
    if kind == "AdamW":
        values["params.betas"] = ([optimizer.beta1, optimizer.beta2], ("optimizer.beta1", "optimizer.beta2"))
        values["params.eps"] = (optimizer.eps, ("optimizer.eps",))
        values["params.torch_adam"] = (True, ("optimizer.name",))
        values["params.adam_w_mode"] = (True, ("optimizer.name",))
    elif kind == "SGD":
        values["params.momentum"] = (optimizer.beta1, ("optimizer.beta1",))
    return [Row(f"optimizer.{name}", value, keys, emit=False) for name, (value, keys) in values.items()]


def _scheduler(recipe: Recipe) -> list[Row]:
    schedule = recipe.schedule
    values: dict[str, tuple[Any, tuple[str, ...]]] = {
        "type": (SCHEDULER_TYPES[schedule.name], ("schedule.name",)),
        "params.warmup_num_steps": (schedule.warmup_steps, ("schedule.warmup_steps",)),
        "params.warmup_max_lr": (recipe.optimizer.lr, ("optimizer.lr",)),
    }
    if schedule.name == "cosine":
        values["params.warmup_min_ratio"] = (0, ("schedule.name",))
        values["params.cos_min_ratio"] = (schedule.min_lr_ratio, ("schedule.min_lr_ratio",))
    else:
        values["params.warmup_min_lr"] = (0, ("schedule.name",))
    values["params.warmup_type"] = ("linear", ("schedule.name",))
    if recipe.train.steps is not None:
        values["params.total_num_steps"] = (recipe.train.steps, ("train.steps",))
    return [Row(f"scheduler.{name}", value, keys, emit=False) for name, (value, keys) in values.items()]


def _engine(recipe: Recipe) -> list[Row]:
    """How the engine behaves inside the trainer."""
    return [
        # DeepSpeed's list has torch's AdamW only.
        Row(
            "zero_allow_untested_optimizer",
            True,
            ("optimizer.name",),
            emit=not recipe.optimizer.name.startswith("adamw_torch"),
            firm=False,
        ),
        # The trainer writes the metrics.
        Row("steps_per_print", 2**31 - 1, ("logging.every_steps",), firm=False),
    ]
