"""How each key reaches a program of kind hf: read off the tables of fields, and why the others do not."""

from __future__ import annotations

from trainkit.frameworks.hf_trainer.fields import DEEPSPEED, FIELDS
from trainkit.frameworks.hf_trainer.fsdp_config import CONFIG, TORCH, XLA
from trainkit.plan.support import LAUNCHED, Reach, Table

_ALONE = "Only the built-in trainer"


def _own(what: str, example: str) -> Reach:
    return Reach(why=f"The script {what}.", instead=f"Pass what the script takes in program.args{example}.")


# Sections and keys that no field stands for.
REFUSED: Table = {
    "model": _own("makes its own model", ", as model_name_or_path"),
    "data": _own("reads its own data", ", as task_name"),
    "peft": _own("makes its own adapters", ""),
    **dict.fromkeys(
        ("train.loss", "train.loss_reduction"),
        Reach(
            why="The loss is computed by the script's model or Trainer.",
            instead="Leave it out, and give Trainer the function in the script, as compute_loss_func.",
        ),
    ),
    "predict": Reach(why="Trainer writes no predictions by itself.", instead="Leave predict out."),
    "batch.memory_mib": Reach(
        why=f"{_ALONE} tries what fits.", instead="Set batch.micro to a number, and leave this out."
    ),
    "profile": Reach(why=f"{_ALONE} profiles its steps.", instead="Profile in the script, and leave profile out."),
    "sample": Reach(why="Trainer generates no sample.", instead="Leave sample out."),
    "precision.weights": Reach(
        why="The script loads its own weights, in the format that it chooses.",
        instead="Leave precision.weights out, or pass the script's own setting, as torch_dtype.",
    ),
    "efficiency.attention": _own("makes its own model", ", as attn_implementation"),
    "efficiency.compile.dynamic": Reach(why="Trainer lets torch find out.", instead="Leave it out.", anyway=(None,)),
    "efficiency.compile.scope": Reach(
        why="Trainer compiles the model as a whole.", instead="Leave it out.", anyway=("auto", "model")
    ),
    "efficiency.gradient_checkpointing.selective": Reach(
        why="transformers recomputes whole blocks.", instead="Leave it out.", anyway=(False,)
    ),
    "eval.batches": Reach(
        why="Trainer evaluates on the whole data set.",
        instead="Pass the script's own limit in program.args, as max_eval_samples.",
    ),
    "eval.patience": Reach(
        why="Stopping early is a callback, which the script adds.",
        instead="Add EarlyStoppingCallback in the script, and leave eval.patience out.",
        anyway=(0,),
    ),
    "checkpoint.asynchronous": Reach(
        why="Trainer waits for its checkpoints.", instead="Leave it out.", anyway=(False,)
    ),
}
_ZERO = ("offload_optimizer", "offload_param", "overlap_comm", "config", "nvme_path", "gather_16bit")

REACH: Table = {
    **REFUSED,
    **LAUNCHED,
    **{key: Reach(CONFIG) for field in (*TORCH, *XLA) for key in field.keys if key.startswith("strategy.")},
    **{f"strategy.{name}": Reach(DEEPSPEED) for name in _ZERO},
    # fields of one key last: what a key is known by
    **{
        key: Reach(f"--{field.name}")
        for field in sorted(FIELDS, key=lambda field: -len(field.keys))
        for key in field.keys
        if not any(key == top or key.startswith(f"{top}.") for top in LAUNCHED)
    },
    "strategy.bucket_mb": Reach(f"--ddp_bucket_cap_mb, {DEEPSPEED}"),
}
