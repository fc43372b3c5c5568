"""Who reads DeepSpeed's file, and what each does with it by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Reader:
    """A program that reads the file.

    handed_over: sections that the program does itself; they are compared with the recipe and not passed on.
    fills: keys where the program replaces "auto", and whose value in a base file stands unless a layer says otherwise.
    asks: those of them that are written as "auto" where nothing says them, because DeepSpeed would leave them out.
    decides: keys of the table that are the base file's affair alone.
    keeps: keys that stay as the base file, or DeepSpeed, has them unless a layer says otherwise.
    uncalled: sections of what a program has to call DeepSpeed for, and this one does not -> what does it there.
    makes: whether DeepSpeed makes optimizer and schedule from the file, where the recipe describes them.
    """

    handed_over: tuple[str, ...] = ()
    fills: frozenset[str] = frozenset()
    asks: frozenset[str] = frozenset()
    decides: frozenset[str] = frozenset()
    keeps: frozenset[str] = frozenset()
    uncalled: Mapping[str, str] = field(default_factory=dict)
    makes: bool = False


ADAM_PARAMETERS = ("lr", "betas", "eps", "weight_decay", "momentum", "torch_adam", "adam_w_mode")
SCHEDULER_PARAMETERS = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")

# Where "auto" is a word of DeepSpeed's own: a key, or all that stands below one.
OWN_AUTO = ("data_types.keep_in_fp32_modules", "expert_parallel.", "pipeline.", "zero_optimization.zenflow.")

SHAPE = ("warmup_min_ratio", "cos_min_ratio", "warmup_type")

# The trainer brings its own optimizer and schedule.
BUILTIN = Reader(
    handed_over=("optimizer", "scheduler"),
    uncalled={
        "activation_checkpointing": "Set efficiency.gradient_checkpointing instead.",
        "compression_training": "Remove it.",
        "data_efficiency": "Remove it: the trainer's data is its own.",
        "expert_parallel": "Set model.moe instead.",
    },
)

# transformers, integrations/deepspeed.py: HfTrainerDeepSpeedConfig
TRAINER_OF_HF = Reader(
    fills=frozenset(
        {
            "gradient_clipping",
            *(f"optimizer.params.{name}" for name in ("lr", "betas", "eps", "weight_decay")),
            *(f"scheduler.params.{name}" for name in SCHEDULER_PARAMETERS),
            *(
                f"zero_optimization.{name}"
                for name in (
                    "reduce_bucket_size",
                    "stage3_prefetch_bucket_size",
                    "stage3_param_persistence_threshold",
                )
            ),
            *("optimizer.type", "scheduler.type"),
        }
    ),
    asks=frozenset({"gradient_clipping"}),
    decides=frozenset(
        {
            "optimizer.params.torch_adam",
            "optimizer.params.adam_w_mode",
            *(f"scheduler.params.{each}" for each in (*SHAPE, "warmup_min_lr")),
        }
    ),
)

# A script that calls deepspeed.initialize.
OWN_PROGRAM = Reader(
    keeps=frozenset(
        {
            "gradient_clipping",
            "bf16.enabled",
            "fp16.enabled",
            "steps_per_print",
            *(f"zero_optimization.{name}" for name in ("reduce_bucket_size", "allgather_bucket_size", "overlap_comm")),
        }
    ),
    decides=frozenset({"data_types.grad_accum_dtype"}),
    makes=True,
)

# accelerate, accelerator.py: _prepare_deepspeed; the batch is the DataLoader's, optimizer and schedule the script's own
ACCELERATOR = Reader(
    fills=frozenset(
        {
            *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
            *("bf16.enabled", "fp16.enabled"),
            *(
                f"zero_optimization.{name}"
                for name in (
                    "reduce_bucket_size",
                    "stage3_prefetch_bucket_size",
                    "stage3_param_persistence_threshold",
                    "stage3_gather_16bit_weights_on_model_save",
                )
            ),
            *(f"optimizer.params.{name}" for name in ("lr", "weight_decay")),
            *(f"scheduler.params.{name}" for name in SCHEDULER_PARAMETERS),
        }
    ),
    asks=frozenset(
        {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"}
    ),
    keeps=frozenset({"bf16.enabled", "fp16.enabled"}),
    decides=frozenset(
        {
            *(f"optimizer.{name}" for name in ("type", *(f"params.{each}" for each in ADAM_PARAMETERS))),
            *("scheduler.type", *(f"scheduler.params.{each}" for each in (*SCHEDULER_PARAMETERS, *SHAPE))),
        }
    ),
)
