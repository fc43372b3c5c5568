"""How each key reaches a program of kind accelerate, and why most do not: the script's loop is its own."""

from __future__ import annotations

from trainkit.frameworks.accelerate.deepspeed import CONFIG
from trainkit.plan.support import LAUNCHED, Reach, Table

ENVIRONMENT = Reach("the environment of Accelerator()")
FSDP = (
    *("version", "sharding", "offload", "auto_wrap", "wrap_classes", "min_params", "backward_prefetch"),
    *("forward_prefetch", "use_orig_params", "sync_module_states", "cpu_ram_efficient_loading", "state_dict_type"),
)
ZERO = ("offload_optimizer", "offload_param", "overlap_comm", "config", "nvme_path", "bucket_mb", "gather_16bit")


def _own(what: str, example: str) -> Reach:
    return Reach(why=f"The script {what}.", instead=f"Pass what the script takes in program.args, as {example}.")


_KWARGS = "Accelerator() takes it from a DistributedDataParallelKwargs that the script hands it"
_PLUGIN = "accelerate reads no such setting outside of the script."

REACH: Table = {
    **LAUNCHED,
    "model": _own("makes its own model", "model_name_or_path"),
    "data": _own("makes its own DataLoader", "num_workers"),
    # which the preset for CPUs says, where it makes no difference
    "data.pin_memory": Reach(
        why="The script makes its own DataLoader.",
        instead="Pass what the script takes in program.args.",
        anyway=(False,),
    ),
    "peft": _own("makes its own adapters", "lora_rank"),
    "optimizer": _own("makes its own optimizer", "learning_rate"),
    "schedule": _own("makes its own schedule", "lr_scheduler_type"),
    "train": _own("has its own loop", "num_train_epochs, max_train_steps or seed"),
    "train.max_grad_norm": Reach(CONFIG),
    "eval": _own("evaluates by itself", "eval_steps"),
    "predict": _own("predicts by itself", "do_predict"),
    "sample": _own("generates by itself", "prompt"),
    "profile": _own("is not watched by the plan", "profile"),
    "checkpoint": _own("saves by itself", "checkpointing_steps"),
    "checkpoint.resume": Reach(
        why="Which folder holds a checkpoint of the program's own is not known.",
        instead="Pass the checkpoint in program.args, as resume_from_checkpoint, and leave checkpoint.resume out.",
        anyway=("never",),
    ),
    "logging": _own("writes its own metrics", "report_to"),
    **dict.fromkeys(("logging.level", "logging.replica_level", "logging.each_node"), ENVIRONMENT),
    "batch": _own("makes its own DataLoader", "per_device_train_batch_size"),
    "batch.accumulation": ENVIRONMENT,
    "precision.dtype": ENVIRONMENT,
    "precision.weights": _own("loads its own weights", "torch_dtype"),
    "precision.eval": Reach(
        why="Accelerator() evaluates in the format of the training.",
        instead="Leave precision.eval out.",
        anyway=("same",),
    ),
    "precision.tf32": Reach(
        why="accelerate reads no such setting.",
        instead="Set torch.backends.cuda.matmul.allow_tf32 in the script, and leave precision.tf32 out.",
        anyway=(None,),
    ),
    "efficiency.attention": _own("makes its own model", "attn_implementation"),
    "efficiency.compile": ENVIRONMENT,
    "efficiency.gradient_checkpointing.every": ENVIRONMENT,
    "efficiency.gradient_checkpointing.selective": Reach(
        why="accelerate recomputes whole units.", instead="Leave it out.", anyway=(False,)
    ),
    "strategy.find_unused_parameters": Reach(why=f"{_KWARGS}.", instead="Give it there.", anyway=(False,)),
    **dict.fromkeys((f"strategy.{name}" for name in FSDP), ENVIRONMENT),
    "strategy.limit_all_gathers": Reach(why=_PLUGIN, instead="Leave it out.", anyway=(True, None)),
    "strategy.prefetch": Reach(why=_PLUGIN, instead="Leave it out.", anyway=(1,)),
    "strategy.reduce_dtype": Reach(
        why="Accelerator() sums gradients in the format of the computation.",
        instead="Leave it out, or write same.",
        anyway=("same",),
    ),
    **dict.fromkeys((f"strategy.{name}" for name in ZERO), Reach(CONFIG)),
}
