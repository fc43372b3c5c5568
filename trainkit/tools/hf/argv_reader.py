"""The fields of TrainingArguments that a program's own arguments set, as flags or by a file in their place."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from trainkit.errors import Diagnostic, Origin
from trainkit.launch_plan.context import Context
from trainkit.recipe.paths import CONFIG, absolute
from trainkit.recipe.resolved import Resolved
from trainkit.recipe.schema.launching import program_argv
from trainkit.tools.base.fields import UNSET
from trainkit.tools.base.imported_recipe import ImportContext, ImportedRecipe
from trainkit.tools.base.launcher_flags import ScriptFlag, script_flags
from trainkit.tools.hf.fields import BY_NAME

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


@dataclass(frozen=True, slots=True)
class FileValue(ScriptFlag):
    """A field that the script's own file of settings sets. file: its path; place: of the value in it."""

    file: str = ""
    place: Origin | None = None


def own_flags(resolved: Resolved) -> dict[str, ScriptFlag]:
    """What program.args set, and their file of settings below them, by newest name.

    Where a field is set twice, the last counts, as in argparse.
    """
    flags = map(newest, script_flags(program_argv(resolved.recipe.program.args)))
    return {**_in_config(resolved), **{flag.name: flag for flag in flags if flag.name}}


def _in_config(resolved: Resolved) -> dict[str, ScriptFlag]:
    """Fields of the file that the script reads before its flags (trl: TrlParser.parse_args_and_config)."""
    config = resolved.attachments.get(CONFIG)
    if config is None or not isinstance(config.tree, Mapping):
        return {}
    shown_path = next((each.source for each in config.origins.values()), config.path)
    found = {}
    for name, value in config.tree.items():
        if value is None:  # says what the script would do anyway
            continue
        values = rendered(list(map(str, value)) if isinstance(value, list) else value)
        made = FileValue(str(name), values, (str(name), *values), shown_path, config.origins.get(str(name)))
        found[newest(made).name] = newest(made)
    return found


def own_batch(resolved: Resolved) -> dict[str, int]:
    """Sizes of the batch that the program's own words and file give, by what a recipe calls them."""
    own = own_flags(resolved)
    rows = {"micro": "per_device_train_batch_size", "accumulation": "gradient_accumulation_steps"}
    given = {side: " ".join(own[name].values) for side, name in rows.items() if name in own}
    return {side: int(text) for side, text in given.items() if text.isdecimal() and int(text) > 0}


def own_format(resolved: Resolved) -> Literal["bf16", "fp16"] | None:
    """The number format that the program's own words and file switch on."""
    own = own_flags(resolved)
    formats: tuple[Literal["bf16", "fp16"], ...] = ("bf16", "fp16")
    return next((name for name in formats if name in own and own[name].switch), None)


def own_error(context: Context, flag: ScriptFlag, what: str, hint: str, why: str = "") -> Diagnostic:
    """An error about one of the program's own flags, or a value of its file, at its place."""
    if isinstance(flag, FileValue):
        return context.resolved.error(CONFIG, what, hint, why=why, at=flag.place)
    args, name = context.recipe.program.args, written(flag).removeprefix("--")
    return context.resolved.error(
        f"program.args.{name}" if isinstance(args, Mapping) else "program.args", what, hint, why=why
    )


def says(flag: ScriptFlag) -> str:
    """Who says a flag, and what."""
    return f"{flag.file} says {shown(flag)}" if isinstance(flag, FileValue) else f"program.args say {shown(flag)}"


def source(flag: ScriptFlag) -> str:
    """Where a flag can be left out."""
    return flag.file if isinstance(flag, FileValue) else "program.args"


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


def fields_in_file(context: ImportContext, words: Sequence[str]) -> Mapping[str, Any]:
    """Where the arguments are one JSON file with fields of TrainingArguments, what it holds."""
    if len(words) != 1 or not words[0].endswith(".json"):
        return {}
    try:
        fields = json.loads(context.files.read(absolute(words[0], context.cwd)))
    except (OSError, ValueError):
        return {}  # an argument of the script's own
    return fields if isinstance(fields, dict) and MARKS & fields.keys() else {}


def as_flags(draft: ImportedRecipe, path: str, fields: Mapping[str, Any]) -> list[str]:
    """The flags that say what a file holds, for a script on Trainer that would read it in their place."""
    empty = ", ".join(name for name, each in fields.items() if each is None)
    left = f"; {empty}: null there, is left at its default" if empty else ""
    draft.remark(f"{path} is taken apart: its values stand here, and reach the script as flags{left}.")
    values = {name: rendered(list(map(str, each)) if isinstance(each, list) else each) for name, each in fields.items()}
    return [word for name, each in fields.items() if each is not None for word in (f"--{name}", *values[name])]
