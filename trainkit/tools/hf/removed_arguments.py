"""Names that TrainingArguments no longer has: what a recipe has for them, and how later versions say the same."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from trainkit.errors import Diagnostic, note, warning
from trainkit.launch_plan.context import Context
from trainkit.launch_plan.provenance import Token, token
from trainkit.tools.base import fsdp_settings as sharding
from trainkit.tools.base import own_scripts
from trainkit.tools.base.fields import by_name
from trainkit.tools.base.launcher_flags import ScriptFlag, script_flags
from trainkit.tools.hf.argv_reader import FileValue, own_flags, says, shown, written
from trainkit.tools.hf.fields import Argument, switch
from trainkit.tools.hf.fsdp_config import version

Words = tuple[str, ...]
NewWords = Callable[[ScriptFlag, Context], Words | None]  # None: it has no words there, and stays as it is
_SHARDING = by_name(sharding.FIELDS)


def _nothing(flag: ScriptFlag, context: Context) -> Words | None:
    return None


def _left_out(flag: ScriptFlag, context: Context) -> Words | None:
    return ()


def _as(name: str) -> NewWords:
    """The same values by another name."""
    return lambda flag, context: (f"--{name}", *flag.values)


def _if_on(*words: str) -> NewWords:
    """Other words for yes, and none for no."""
    return lambda flag, context: None if flag.switch is None else words if flag.switch else ()


def _unless(*values: str) -> NewWords:
    """Left out with these values, which say what is done anyway."""
    return lambda flag, context: () if " ".join(flag.values).lower() in values else None


def _warmup(flag: ScriptFlag, context: Context) -> Words | None:
    """A share of the steps, as a number of steps below 1; a number of steps counted more (get_warmup_steps)."""
    steps = own_flags(context.resolved).get("warmup_steps")
    if context.resolved.given("schedule.warmup_steps") or (steps and steps.values not in ((), ("0",))):
        return ()
    with suppress(ValueError):
        return ("--warmup_steps", *flag.values) if 0 <= float(" ".join(flag.values)) < 1 else None
    return None


@dataclass(frozen=True, slots=True)
class RemovedArgument(Argument):
    """A name that is gone. help: what to write instead. spoken: what says the same to the versions without it."""

    spoken: NewWords = _nothing


def _gone(until: str, name: str, instead: str, spoken: NewWords = _nothing) -> RemovedArgument:
    return RemovedArgument(name, until=until, help=instead, spoken=spoken)


def _with_key(argument: Argument, spoken: NewWords) -> RemovedArgument:
    """One that a recipe has a key for."""
    columns = {name: getattr(argument, name) for name in ("keys", "encode", "decode", "default", "until", "help")}
    return RemovedArgument(argument.name, switch=argument.switch, owned=argument.owned, spoken=spoken, **columns)


# Those that are an older name of a field are read as that field.
GONE: tuple[RemovedArgument, ...] = (
    _gone("4.53", "evaluation_strategy", "eval_strategy, or eval.every_steps in the recipe", _as("eval_strategy")),
    _gone("5.0", "no_cuda", "devices.type: cpu in the recipe", _as("use_cpu")),
    _with_key(
        switch("use_mps_device", "devices.type", means="mps", until="5.0", help="devices.type: mps in the recipe"),
        _left_out,  # where there is MPS, it is used
    ),
    _gone("5.0", "overwrite_output_dir", "nothing: every run has a folder of its own", _left_out),
    _gone("5.0", "per_gpu_train_batch_size", "batch.micro in the recipe", _as("per_device_train_batch_size")),
    _gone("5.0", "per_gpu_eval_batch_size", "batch.eval_micro in the recipe", _as("per_device_eval_batch_size")),
    *(
        _gone("5.0", name, "precision: fp16 in the recipe", _unless("auto", "cuda_amp"))
        for name in ("fp16_backend", "half_precision_backend")
    ),
    _gone("5.0", "fp16_opt_level", "precision: fp16 in the recipe", _left_out),  # of apex alone
    RemovedArgument(
        "fsdp_min_num_params",
        ("strategy.min_params", "strategy.auto_wrap"),
        decode=_SHARDING["min_num_params"].decode,
        owned="plan",
        until="5.0",
        help="strategy.auto_wrap: size with strategy.min_params in the recipe",
    ),
    RemovedArgument(
        "fsdp_transformer_layer_cls_to_wrap",
        ("strategy.wrap_classes", "strategy.auto_wrap"),
        # as a flag, with commas, spaces or both between the names
        decode=lambda value: _SHARDING["transformer_layer_cls_to_wrap"].decode(str(value).replace(",", " ").split()),
        owned="plan",
        until="5.0",
        help="strategy.wrap_classes in the recipe",
    ),
    _with_key(
        switch(
            "adafactor",
            "optimizer.name",
            means="adafactor",
            until="5.0",
            help="optimizer.name: adafactor in the recipe",
        ),
        _if_on("--optim", "adafactor"),
    ),
    _gone("5.0", "torchdynamo", "efficiency.compile in the recipe", _as("torch_compile_backend")),
    _gone("5.0", "save_safetensors", "nothing: weights are always saved so", _unless("", "true")),
    _gone("5.0", "push_to_hub_model_id", "hub_model_id"),
    _gone("5.0", "push_to_hub_organization", "hub_model_id, with the organization before a slash"),
    _gone("5.0", "push_to_hub_token", "hub_token"),
    _gone(
        "5.0",
        "include_inputs_for_metrics",
        "include_for_metrics: [inputs]",
        _if_on("--include_for_metrics", "inputs"),
    ),
    _gone(
        "5.5",
        "group_by_length",
        "train_sampling_strategy: group_by_length",
        _if_on("--train_sampling_strategy", "group_by_length"),
    ),
    _gone("5.18", "warmup_ratio", "warmup_steps: a number below 1 is a share of the steps", _warmup),
    _gone("5.0", "tpu_num_cores", "nothing: one process has every chip", _left_out),
    _gone("5.0", "tpu_metrics_debug", "debug: tpu_metrics_debug", _if_on("--debug", "tpu_metrics_debug")),
    _gone("5.0", "use_ipex", "nothing: PyTorch's own kernels are used"),
    _gone("5.0", "jit_mode_eval", "torch_compile: true, where evaluation is to be compiled"),
    _gone("4.50", "xpu_backend", "ddp_backend", _as("ddp_backend")),
    _gone("5.18", "logging_dir", "nothing: TENSORBOARD_LOGGING_DIR under env says where TensorBoard's files go"),
)
BY_GONE_NAME = by_name(GONE)


def remark(old: RemovedArgument) -> str:
    """For an import, which does not know what is installed."""
    what = f"transformers {old.until} and later have no --{old.name}"
    if old.spoken is _nothing:
        return f"{what}: write {old.help}."
    return f"{what}: for newer versions the plan uses the new argument, or drops it if there is none."


def own_words(context: Context) -> tuple[Token, ...]:
    """program.args as the installed version takes them, each with the recipe key that made it."""
    given = own_scripts.arguments(context.recipe.program.args)
    found, start = list[Token](), 0
    for flag in script_flags([word for word, _ in given]):
        keys = tuple(dict.fromkeys(key for _, key in given[start : start + len(flag.words)]))
        start += len(flag.words)
        spoken, rule = _spoken(flag, context), f"transformers {version(context)} says {shown(flag)} so"
        words = flag.words if spoken is None else spoken
        found += [token(word, keys=keys, rule="" if spoken is None else rule) for word in words]
    return tuple(found)


def _spoken(flag: ScriptFlag, context: Context) -> Words | None:
    """What the installed version is given in a flag's place; None for the flag itself."""
    old = BY_GONE_NAME.get(flag.name)
    if old is None or old.known_to(version(context)) or _is_declared(flag.name, context.resolved.script):
        return None
    return old.spoken(flag, context)


def _is_declared(name: str, script: str) -> bool:
    """Whether the script has a field or a flag of this very name itself."""
    return re.search(rf"^\s*{name}\s*:|[\"']--{name}[\"']", script, re.MULTILINE) is not None


def notices(context: Context) -> Iterator[Diagnostic]:
    """What became of words that the installed version does not have."""
    installed, own = f"transformers {version(context)}", context.recipe.program.args
    words = script_flags([word for word, _ in own_scripts.arguments(own)])
    in_file = (each for each in own_flags(context.resolved).values() if isinstance(each, FileValue))
    for flag in (*words, *in_file):
        old = BY_GONE_NAME.get(written(flag).removeprefix("--").replace("-", "_"))
        if old is None or old.known_to(version(context)) or _is_declared(old.name, context.resolved.script):
            continue
        spoken = None if isinstance(flag, FileValue) else _spoken(flag, context)
        if spoken:
            yield note(f"{installed} has no {written(flag)}: {shown(flag)} reaches it as {' '.join(spoken)}")
        elif spoken == ():
            yield note(f"{installed} has no {written(flag)}: it is left out; instead of it, {old.help}")
        else:
            what = f"{says(flag)}, which TrainingArguments of {installed} no longer have"
            yield warning(what, f"unless the script declares it itself, write {old.help}")
