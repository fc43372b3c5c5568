"""How each key reaches a program of kind hf: read off the tables of fields, and why the others do not."""

from __future__ import annotations

from trainkit.frameworks.deepspeed.fields import FILE as DEEPSPEED
from trainkit.frameworks.deepspeed.fields import STRATEGY_KEYS
from trainkit.frameworks.hf_trainer.fields import FIELDS
from trainkit.frameworks.hf_trainer.fsdp_config import CONFIG, TORCH, XLA
from trainkit.plan.support import LAUNCHED, Reach, Table, no_way

_LOSS = no_way(
    "the loss is computed by the script's model or Trainer",
    "leave it out, and give Trainer the function in the script, as compute_loss_func",
)
# Sections and keys that no field stands for.
REFUSED: Table = {
    "model": no_way("the script makes its own model", "pass what it takes in program.args, as model_name_or_path"),
    "data": no_way("the script reads its own data", "pass what it takes in program.args, as task_name"),
    "peft": no_way("the script makes its own adapters", "pass what the script takes in program.args"),
    "train.loss": _LOSS,
    "train.loss_reduction": _LOSS,
    "predict": no_way("Trainer writes no predictions by itself", "leave predict out"),
    "batch.memory_mib": no_way(
        "only the built-in trainer tries what fits", "set batch.micro to a number, and leave this out"
    ),
    "profile": no_way("only the built-in trainer profiles its steps", "profile in the script, and leave profile out"),
    "sample": no_way("Trainer generates no sample", "leave sample out"),
    "precision.weights": no_way(
        "the script loads its own weights, in the format that it chooses",
        "leave precision.weights out, or pass the script's own setting, as torch_dtype",
    ),
    "efficiency.attention": no_way(
        "the script makes its own model", "pass the script's own setting in program.args, as attn_implementation"
    ),
    "efficiency.compile.dynamic": no_way("Trainer lets torch find out", "leave it out", None),
    "efficiency.compile.scope": no_way("Trainer compiles the model as a whole", "leave it out", "auto", "model"),
    "efficiency.gradient_checkpointing.selective": no_way(
        "transformers recomputes whole blocks", "leave it out", False
    ),
    "eval.batches": no_way(
        "Trainer evaluates on the whole data set",
        "pass the script's own limit in program.args, as max_eval_samples",
    ),
    "eval.patience": no_way(
        "stopping early is a callback, which the script adds",
        "add EarlyStoppingCallback in the script, and leave eval.patience out",
        0,
    ),
    "checkpoint.asynchronous": no_way("Trainer waits for its checkpoints", "leave it out", False),
}

REACH: Table = {
    **REFUSED,
    **LAUNCHED,
    **{key: Reach(CONFIG) for field in (*TORCH, *XLA) for key in field.keys if key.startswith("strategy.")},
    **dict.fromkeys((*STRATEGY_KEYS, "strategy.config"), Reach(DEEPSPEED)),
    # fields of one key last: what a key is known by
    **{
        key: Reach(f"--{field.name}")
        for field in sorted(FIELDS, key=lambda field: -len(field.keys))
        for key in field.keys
        if not any(key == top or key.startswith(f"{top}.") for top in LAUNCHED)
    },
    "strategy.bucket_mb": Reach(f"--ddp_bucket_cap_mb, {DEEPSPEED}"),
}
