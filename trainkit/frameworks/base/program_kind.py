"""What kind of program a script is, as its source tells, or else the flags behind its name."""

from __future__ import annotations

from collections.abc import Sequence

from trainkit.frameworks.base.draft import Desk
from trainkit.frameworks.base.script_argv import phrases
from trainkit.frameworks.base.script_source import Built, built_on

FLAG = "deepspeed_config"
# Flags that only scripts on Trainer have: one of them tells the kind of the program.
MARKS = frozenset({
    "do_train", "do_eval", "do_predict", "fsdp_config", "fsdp_transformer_layer_cls_to_wrap", "eval_strategy",
    "evaluation_strategy", "save_strategy", "logging_strategy", "save_total_limit", "overwrite_output_dir",
    "per_device_train_batch_size", "predict_with_generate", "lr_scheduler_kwargs", "load_best_model_at_end",
    "torch_compile_backend", "ddp_find_unused_parameters", "group_by_length", "logging_first_step",
})  # fmt: skip
# Trainer's too, and common in scripts of other kinds: they tell nothing.
SHARED_MARKS = frozenset({
    "fsdp", "torch_compile", "gradient_checkpointing", "activation_checkpointing", "optim", "use_cpu", "no_cuda",
    "warmup_ratio",
})  # fmt: skip


def program_kind(desk: Desk, given: Sequence[str], otherwise: str = "torch", *, module: bool = False) -> Built:
    """What kind of program a script or module with these words is; `otherwise` where nothing tells."""
    source = Built() if module else built_on(desk, given[0])
    if source.kind:
        return source
    kind, flag = _told(given, otherwise)
    if kind:
        return Built(kind, f"--{flag}", "" if kind == "hf" else source.remark)
    return Built(otherwise, "", source.remark or _doubt(given[1:]))


def _told(given: Sequence[str], otherwise: str) -> tuple[str, str]:
    """The kind and the flag that tells; empty where none does."""
    target, *words = given
    said = {each.name: each for each in phrases(words) if each.name}
    marks = sorted(MARKS & said.keys())
    if marks and "no_trainer" not in target:
        return "hf", marks[0]
    if "deepspeed" in said and said["deepspeed"].values:  # Trainer's takes a file, DeepSpeed's own is a switch
        return "hf", "deepspeed"
    return ("deepspeed", FLAG) if FLAG in said else ("", "")


def _doubt(words: Sequence[str]) -> str:
    """A remark on a flag that Trainer has too; empty without one."""
    word = next((each.name for each in phrases(words) if each.name in SHARED_MARKS), "")
    return (
        word and f"--{word} is also a flag of transformers' Trainer: import with --kind hf where the script is on it."
    )
