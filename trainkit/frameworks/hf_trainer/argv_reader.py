"""The fields of TrainingArguments that a program's own arguments set, as flags or by a file in their place."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from trainkit.frameworks.base.argv_reader import ScriptFlag, script_flags
from trainkit.frameworks.base.draft import Draft, ImportContext
from trainkit.frameworks.base.fields import UNSET
from trainkit.frameworks.hf_trainer.fields import BY_NAME
from trainkit.plan.context import Context
from trainkit.recipe.layers.paths import absolute
from trainkit.recipe.schema.launching import program_argv

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


def newest(flag: ScriptFlag) -> ScriptFlag:
    """The flag by its newest name; `--no_NAME` is the complement of a switch that is on by default."""
    name, positive = flag.name, flag.name.removeprefix("no_")
    if name not in BY_NAME and positive in BY_NAME and BY_NAME[positive].switch and not flag.values:
        return replace(flag, name=positive, values=("false",))
    return replace(flag, name=BY_NAME[name].name) if name in BY_NAME else flag


def own_flags(context: Context) -> dict[str, ScriptFlag]:
    """What program.args set, by newest name; where a field is set twice, the last counts, as in argparse."""
    flags = map(newest, script_flags(program_argv(context.recipe.program.args)))
    return {flag.name: flag for flag in flags if flag.name}


def key_of(context: Context, flag: ScriptFlag) -> str:
    """The recipe key of one of the program's own flags."""
    args, name = context.recipe.program.args, written(flag).removeprefix("--")
    return f"program.args.{name}" if isinstance(args, Mapping) else "program.args"


def written(flag: ScriptFlag) -> str:
    """The flag's name as it was given."""
    return flag.words[0].partition("=")[0]


def shown(flag: ScriptFlag) -> str:
    """The flag and its values, as they were given."""
    return " ".join(flag.words)


def rendered(value: Any) -> tuple[str, ...]:
    """A value as HfArgumentParser reads it."""
    if isinstance(value, list):
        return tuple(value)
    return (json.dumps(value),) if isinstance(value, Mapping) else (str(value),)


def agrees(flag: ScriptFlag, value: Any) -> bool:
    """Whether a flag says the same as a value of the plan's."""
    if value is UNSET:
        return False
    if isinstance(value, bool):
        return flag.switch is value
    if isinstance(value, int | float):
        with suppress(ValueError):
            return len(flag.values) == 1 and float(flag.values[0]) == value
        return False
    return flag.values == rendered(value)


def flags_in_file(draft: Draft, context: ImportContext, argv: Sequence[str]) -> list[str]:
    """The arguments, or where they are one JSON file with fields of TrainingArguments, the flags that say the same."""
    if len(argv) != 1 or not argv[0].endswith(".json"):
        return list(argv)
    try:
        fields = json.loads(context.files.read(absolute(argv[0], context.cwd)))
    except (OSError, ValueError):
        return list(argv)  # an argument of the script's own
    if not isinstance(fields, dict) or not MARKS & fields.keys():
        return list(argv)
    draft.remark(f"{argv[0]} is taken apart: its values stand here, and reach the script as flags.")
    values = {name: rendered(list(map(str, each)) if isinstance(each, list) else each) for name, each in fields.items()}
    return [word for name, each in fields.items() if each is not None for word in (f"--{name}", *values[name])]
