"""What a script on Trainer cannot take: from its source, how it makes TrainingArguments, and from the settings."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from trainkit.errors import Diagnostic
from trainkit.launch_plan.context import Context
from trainkit.launch_plan.rules import LAUNCHED, Support, Table, unsupported
from trainkit.recipe.schema import Fsdp
from trainkit.tools.base.fields import UNSET, Unsupported, is_set, setting
from trainkit.tools.base.fsdp_settings import CHECKPOINTING, MESH, of_first_version
from trainkit.tools.deepspeed.fields import FILE as DEEPSPEED
from trainkit.tools.deepspeed.fields import STRATEGY_KEYS
from trainkit.tools.hf import deepspeed
from trainkit.tools.hf.argv_reader import FileValue, agrees, own_error, own_flags, says, source, written
from trainkit.tools.hf.fields import FIELDS, Argument
from trainkit.tools.hf.fsdp_config import CONFIG, TORCH, XLA, is_chosen, version
from trainkit.tools.torch_xla import on_xla

# Names with which a script makes them of a command line or a file (transformers, trl, alignment-handbook).
PARSERS = ("HfArgumentParser", "TrlParser", "parse_args_into_dataclasses", "from_dict", "set_training")
RESUMING = ("resume_from_checkpoint", "get_last_checkpoint")
ARGUMENTS = "TrainingArguments"  # the end of the name, as of Seq2SeqTrainingArguments


@dataclass(frozen=True, slots=True)
class MadeArguments:
    """The one call in a script that makes them. fields: its keywords; later: attributes that the script sets."""

    name: str
    line: int
    fields: Mapping[str, ast.expr]
    later: frozenset[str]

    def without_flag(self, field: str) -> str | None:
        """What the call says of a field that no flag can be behind; None where one may be."""
        if field in self.later:
            return None
        if field not in self.fields:
            return f"leaves {field} at its default"
        value = self.fields[field]
        return f"says {field}={ast.unparse(value)}" if _is_constant(value) else None


@lru_cache(maxsize=4)
def made_in_script(source: str) -> MadeArguments | None:
    """How a script makes them; None where it reads a command line for them, or where that cannot be told."""
    if ARGUMENTS not in source or any(name in source for name in PARSERS):
        return None
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    calls = list(_calls(tree))
    if len(calls) != 1 or calls[0].args or any(each.arg is None for each in calls[0].keywords):
        return None
    (call,) = calls
    fields = {each.arg: each.value for each in call.keywords if each.arg}
    attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    later = (node.attr for node in attributes if isinstance(node.ctx, ast.Store))
    if any(isinstance(node, ast.Name) and node.id == "setattr" for node in ast.walk(tree)):
        return None
    return MadeArguments(_name(call.func), call.lineno, fields, frozenset(later))


def resumes(source: str) -> bool:
    """Whether a script may go on from a checkpoint; one that is not known may."""
    return not source or any(name in source for name in RESUMING)


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    """Where such arguments are made; a class of the script's own, below them, is one too."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call) and _name(node.func).endswith(ARGUMENTS))


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _is_constant(value: ast.expr) -> bool:
    """Whether it is written out: a number, a word, or a list of such."""
    return all(
        isinstance(node, ast.Constant | ast.UnaryOp | ast.USub | ast.List | ast.Tuple | ast.Dict | ast.Load)
        for node in ast.walk(value)
    )


_LOSS = unsupported(
    "the loss is computed by the script's model or Trainer",
    "leave it out, and give Trainer the function in the script, as compute_loss_func",
)
# Sections and keys that no field stands for.
REFUSED: Table = {
    "model": unsupported("the script makes its own model", "pass what it takes in program.args, as model_name_or_path"),
    "data": unsupported("the script reads its own data", "pass what it takes in program.args, as task_name"),
    "peft": unsupported("the script makes its own adapters", "pass what the script takes in program.args"),
    "train.loss": _LOSS,
    "train.loss_reduction": _LOSS,
    "predict": unsupported("Trainer writes no predictions by itself", "leave predict out"),
    "batch.memory_mib": unsupported(
        "only the built-in trainer tries what fits", "set batch.micro to a number, and leave this out"
    ),
    "profile": unsupported(
        "only the built-in trainer profiles its steps", "profile in the script, and leave profile out"
    ),
    "sample": unsupported("Trainer generates no sample", "leave sample out"),
    "precision.weights": unsupported(
        "the script loads its own weights, in the format that it chooses",
        "leave precision.weights out, or pass the script's own setting, as torch_dtype",
    ),
    "efficiency.attention": unsupported(
        "the script makes its own model", "pass the script's own setting in program.args, as attn_implementation"
    ),
    "efficiency.compile.dynamic": unsupported("Trainer lets torch find out", "leave it out", None),
    "efficiency.compile.scope": unsupported("Trainer compiles the model as a whole", "leave it out", "auto", "model"),
    "efficiency.offload_activations": unsupported(
        "Trainer keeps activations on the device", "set efficiency.gradient_checkpointing, or leave it out", False
    ),
    "efficiency.gradient_checkpointing.selective": unsupported(
        "transformers recomputes whole blocks", "leave it out", False
    ),
    "schedule.from_zero": unsupported("Trainer's schedules count from 0", "leave it out", True),
    "eval.batches": unsupported(
        "Trainer evaluates on the whole data set",
        "pass the script's own limit in program.args, as max_eval_samples",
    ),
    **dict.fromkeys(
        ("eval.metrics", "eval.tokens"),
        unsupported(
            "the script computes its metrics (compute_metrics)", "leave it out, and compute them in the script"
        ),
    ),
    "eval.patience": unsupported(
        "stopping early is a callback, which the script adds",
        "add EarlyStoppingCallback in the script, and leave eval.patience out",
        0,
    ),
    "checkpoint.at_end": unsupported("the script saves its model itself", "leave it out", True),
    "checkpoint.copy_to": unsupported(
        "Trainer's own checkpoints are not copied", "leave it out, or set push_to_hub", None
    ),
    "checkpoint.asynchronous": unsupported("Trainer waits for its checkpoints", "leave it out", False),
}

SUPPORT: Table = {
    **REFUSED,
    **LAUNCHED,
    **{key: Support(CONFIG) for field in (*TORCH, *XLA) for key in field.keys if key.startswith("strategy.")},
    **dict.fromkeys((*STRATEGY_KEYS, "strategy.config"), Support(DEEPSPEED)),
    # fields of one key last: what a key is known by
    **{
        key: Support(f"--{field.name}")
        for field in sorted(FIELDS, key=lambda field: -len(field.keys))
        for key in field.keys
        if not any(key == top or key.startswith(f"{top}.") for top in LAUNCHED)
    },
    "strategy.bucket_mb": Support(f"--ddp_bucket_cap_mb, {DEEPSPEED}"),
    "hang.collective_seconds": Support("--ddp_timeout"),
    **dict.fromkeys(("strategy.replicate", "strategy.tensor", "strategy.context"), MESH),
}

# Fields that name files of the plan's: the file, and how to have the user's own taken over.
FILES = {
    "fsdp_config": (
        CONFIG,
        "take the file over with --fsdp_config FILE on trainkit's own command line, or set strategy",
    ),
    "deepspeed": (DEEPSPEED, "set strategy.kind to the file's ZeRO stage, and strategy.config to the file"),
}
COUNTED = ("eval_steps", "save_steps")  # which Trainer ignores where the strategy beside them is not steps
LOW = ("bf16", "fp16")
CONFIG_SUFFIXES = (".json", ".yaml", ".yml")
# Keys of torch's FSDP that reach no other
NOT_ON_XLA = {field.keys[0] for field in TORCH if field.keys} - {key for field in XLA for key in field.keys}
XLA_SETTINGS = "strategy.xla_settings"
# Trainer looks these up in torch by name.
DTYPE_KEYS = ("compute_dtype", "buffer_dtype")
DTYPES = ("float32", "float", "bfloat16", "float16", "half", "float64", "double")
OWN = ("auto_wrap_policy", "auto_wrapper_callable")  # Trainer hands these over itself


def given_fields(context: Context) -> Iterator[tuple[Argument, object]]:
    """The fields that the program is given, with their values; those that its own arguments set are theirs.

    What its file of settings says too need not be said again.
    """
    own = own_flags(context.resolved)
    for field in FIELDS:
        flag = own.get(field.name)
        value = field.encode(context) if field.is_given(context) else UNSET
        if value is UNSET or isinstance(value, Unsupported):  # which `problems` reports
            continue
        implied = field.name in LOW and value is False and context.dtype in LOW  # Trainer takes one of the two
        if (flag is None and not implied) or (isinstance(flag, FileValue) and not agrees(flag, value)):
            yield field, value


def problems(context: Context) -> Iterator[Diagnostic]:
    error = context.resolved.error
    for field in FIELDS:
        value = field.encode(context) if is_set(context, *field.keys) else UNSET
        if isinstance(value, Unsupported):
            key = next(key for key in field.keys if is_set(context, key))
            what = f"{key} {setting(context, key)} cannot reach a program of kind hf"
            yield error(key, what, value.instead, why=value.why)
    yield from _contradictions(context)
    yield from _against_files(context)
    for key in () if on_xla(context) else of_first_version(context):
        what = f"{key} {setting(context, key)} is of FSDP's version 1, and strategy.version is 2"
        hint = f"leave {key} out, or set strategy.version to 1"
        yield error(key, what, hint, why="version 2 has no such setting")
    yield from _own_argv(context)
    yield from _unread(context)
    if on_xla(context) and isinstance(context.recipe.strategy, Fsdp):
        yield from _of_xla(context, context.recipe.strategy)


def _contradictions(context: Context) -> Iterator[Diagnostic]:
    """Arguments of the program's own, and values of its file, that say something else than the recipe."""
    own = own_flags(context.resolved)
    for field in FIELDS:
        flag, given = own.get(field.name), field.is_given(context)
        # What the plan gives as a flag counts more than a file of the script's.
        if flag is None or not (given or field.owned == "plan") or (given and isinstance(flag, FileValue)):
            continue
        value, key = field.encode(context), field.keys[0]
        idle = value is UNSET and (flag.switch is False or field.name in COUNTED)
        if isinstance(value, Unsupported) or agrees(flag, value) or idle:
            continue
        origin = context.resolved.given(key)
        planned = "nothing" if value is UNSET else value
        yield own_error(
            context,
            flag,
            f"{says(flag)}, and the recipe's {key} makes it {planned}",
            f"set {key} in the recipe, and leave {written(flag)} out of {source(flag)}",
            why=f"{key} is {f'set at {origin.place}' if origin else 'decided by the plan'}",
        )


def _against_files(context: Context) -> Iterator[Diagnostic]:
    """Arguments that say something else than DeepSpeed's file, or name files that the plan writes."""
    own, place = own_flags(context.resolved), context.resolved.origin("strategy.config")
    for field, value in deepspeed.implied(context).items():
        if field in own and not agrees(own[field], value):
            what = f"{says(own[field])}, and the DeepSpeed file says {value}"
            why = f"the file is named at {place.place}" if place else ""
            hint = f"leave {written(own[field])} out, or bring the file into line with it"
            yield own_error(context, own[field], what, hint, why=why)
    replaced = {"fsdp_config": is_chosen(context) or "fsdp" not in own, "deepspeed": context.zero}
    for field, (file, hint) in FILES.items():
        flag = own.get(field)
        if flag is None or (isinstance(flag, FileValue) and replaced[field]):
            continue
        what = f"{source(flag)} {'names' if isinstance(flag, FileValue) else 'name'} {written(flag)}"
        why = f"{file} in the run directory is made from the recipe"
        yield own_error(context, flag, f"{what}, and the plan writes this file itself", hint, why=why)


def _own_argv(context: Context) -> Iterator[Diagnostic]:
    """Arguments, and one setting, that contradict the strategy, the device or one another."""
    own, args, error = own_flags(context.resolved), context.recipe.program.args, context.resolved.error
    generating = own.get("predict_with_generate")
    if is_chosen(context) and generating and generating.switch is not False:
        what = "strategy fsdp and predict_with_generate cannot be run together"
        why = "generate() calls the model outside the forward pass that gathers its shards"
        hint = "leave predict_with_generate out, or set strategy.kind to ddp"
        yield own_error(context, generating, what, hint, why=why)
    if context.topology.device != "cuda":
        what, why = f"is for CUDA GPUs, and the run uses {context.topology.device}", "Trainer ends with an error there"
        if context.recipe.precision.tf32:
            yield error("precision.tf32", f"precision.tf32 {what}", "leave precision.tf32 out", why=why)
        elif (tf32 := own.get("tf32")) and tf32.switch:
            yield own_error(context, tf32, f"{written(tf32)} {what}", f"leave {written(tf32)} out", why=why)
    prefetch, workers = own.get("dataloader_prefetch_factor"), own.get("dataloader_num_workers")
    if prefetch and not (context.recipe.data.workers or (workers and workers.values not in ((), ("0",)))):
        what = f"{written(prefetch)} is for loader processes, and there are none"
        yield own_error(context, prefetch, what, "set data.workers, or leave it out")
    adds = "output_dir" not in own or context.zero or is_chosen(context) or any(given_fields(context))
    if isinstance(args, list) and len(args) == 1 and args[0].endswith(CONFIG_SUFFIXES) and adds:
        what = f"program.args is one file, {args[0]}"
        why = "HF's scripts read such a file only where nothing else is given, and the plan gives more"
        hint = "write its settings in the recipe, or in program.args one by one"
        yield error("program.args", what, hint, why=why)


def _unread(context: Context) -> Iterator[Diagnostic]:
    """Settings for which the script's source shows that its TrainingArguments do not come from a command line."""
    made = made_in_script(context.resolved.script)
    if made is None:
        return
    script, sharded = context.recipe.program.script, {"deepspeed": "strategy.kind"} if context.zero else {}
    fields = {field.name_in(version(context)): field.keys for field, _ in given_fields(context)}
    for name, keys in {**fields, **{name: (key,) for name, key in sharded.items()}}.items():
        key = next((each for each in keys if context.resolved.given(each)), "")
        if not key or name == "use_cpu" or (says := made.without_flag(name)) is None:  # a device shows by itself
            continue
        what = f"{key} cannot reach {script}: it makes its {made.name} itself"
        hint = f"set {name} there, or make them with HfArgumentParser; program.kind: torch runs the script as it is"
        why = f"line {made.line} {says}, and nothing in the script reads --{name}"
        yield context.resolved.error(key, what, hint, why=why)


def _of_xla(context: Context, strategy: Fsdp) -> Iterator[Diagnostic]:
    """Settings that torch_xla's FSDP would not get."""

    def error(key: str, why: str, hint: str, value: object = None) -> Diagnostic:
        shown_value = setting(context, key) if value is None else value
        what = f"{key} {shown_value} cannot reach a program of kind hf on xla"
        return context.resolved.error(key, what, hint, why=why)

    for key in sorted(NOT_ON_XLA):
        if setting(context, key) != Fsdp.model_fields[key.removeprefix("strategy.")].default:
            yield error(key, "Trainer hands torch_xla's FSDP no such setting", f"leave {key} out")
    if strategy.xla_settings and strategy.version == 2:
        hint = f"leave {XLA_SETTINGS} out, or set strategy.version to 1, which is one chip"
        yield error(XLA_SETTINGS, "Trainer hands xla_fsdp_settings to version 1 alone", hint)
    for name, value in strategy.xla_settings.items():
        key = f"{XLA_SETTINGS}.{name}"
        if name in DTYPE_KEYS and value not in DTYPES:
            yield error(
                key, "Trainer looks it up among torch's number formats", f"write one of {', '.join(DTYPES)}", value
            )
        if name in OWN:
            yield error(key, "Trainer sets it itself", "use strategy.auto_wrap", value)
    if context.recipe.efficiency.gradient_checkpointing.every and strategy.auto_wrap == "none":
        why = "torch_xla recomputes wrapped units, and with strategy.auto_wrap none there are none"
        yield error(CHECKPOINTING, why, "set strategy.auto_wrap to transformer or size")
