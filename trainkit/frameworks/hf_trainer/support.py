"""How each key reaches a program of kind hf: read off the table of rows, and why the others do not."""

from __future__ import annotations

from trainkit.frameworks.hf_trainer.fields import DEEPSPEED, ROWS
from trainkit.frameworks.hf_trainer.fsdp import CONFIG, FIRST_VERSION
from trainkit.plan.support import LAUNCHED, Reach, Table

_OWN_MODEL = Reach(
    why="The script makes its own model.", instead="Pass what the script takes in program.args, as model_name_or_path."
)
_OWN_DATA = Reach(
    why="The script reads its own data.", instead="Pass what the script takes in program.args, as task_name."
)
_FSDP = (
    *("version", "sharding", "offload", "auto_wrap", "wrap_classes", "min_params", *FIRST_VERSION),
    *("cpu_ram_efficient_loading", "state_dict_type", "xla_settings"),
)

# Sections of which some keys are in ROWS, and the rest is not to be had.
REFUSED: Table = {
    "model": _OWN_MODEL,
    "data": _OWN_DATA,
    "peft": Reach(
        why="The script makes its own adapters.",
        instead="Pass what the script takes in program.args.",
    ),
    **dict.fromkeys(
        ("train.loss", "train.loss_reduction"),
        Reach(
            why="The loss is computed by the script's model or Trainer.",
            instead="Leave it out, and give Trainer the function in the script, as compute_loss_func.",
        ),
    ),
    "predict": Reach(why="Trainer writes no predictions by itself.", instead="Leave predict out."),
    "batch.memory_mib": Reach(
        why="Only the built-in trainer tries what fits.", instead="Set batch.micro to a number, and leave this out."
    ),
    "profile": Reach(
        why="Only the built-in trainer profiles its steps.", instead="Profile in the script, and leave profile out."
    ),
    "sample": Reach(why="Trainer generates no sample.", instead="Leave sample out."),
    "precision.weights": Reach(
        why="The script loads its own weights, in the format that it chooses.",
        instead="Leave precision.weights out, or pass the script's own setting, as torch_dtype.",
    ),
    "efficiency.attention": Reach(
        why="The script makes its own model.",
        instead="Pass the script's own setting in program.args, as attn_implementation.",
    ),
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

REACH: Table = {
    **REFUSED,
    **LAUNCHED,
    **dict.fromkeys((f"strategy.{name}" for name in _FSDP), Reach(CONFIG)),
    **dict.fromkeys(
        (
            f"strategy.{name}"
            for name in ("offload_optimizer", "offload_param", "overlap_comm", "config", "nvme_path", "gather_16bit")
        ),
        Reach(DEEPSPEED),
    ),
    # rows of one key first: what a key is known by
    **{
        key: Reach(f"--{row.field}")
        for row in sorted(ROWS, key=lambda row: -len(row.keys))
        for key in row.keys
        if not any(key == top or key.startswith(f"{top}.") for top in LAUNCHED)
    },
    "strategy.bucket_mb": Reach(f"--ddp_bucket_cap_mb, {DEEPSPEED}"),
}
