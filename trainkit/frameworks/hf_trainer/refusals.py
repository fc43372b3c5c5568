"""What cannot be handed to Trainer: settings without a counterpart, and program.args against the plan."""

from __future__ import annotations

from collections.abc import Iterator

from trainkit.errors import Diagnostic
from trainkit.frameworks.base.fields import UNSET, Unsupported, said, setting
from trainkit.frameworks.base.fsdp_settings import of_first_version
from trainkit.frameworks.deepspeed.fields import FILE as DEEPSPEED
from trainkit.frameworks.hf_trainer import deepspeed, fsdp_config
from trainkit.frameworks.hf_trainer.argv_reader import agrees, key_of, own_flags, shown, written
from trainkit.frameworks.hf_trainer.fields import FIELDS
from trainkit.frameworks.torch_xla import on_xla
from trainkit.plan.context import Context

# Fields that name files of the plan's: the file, and how to have the user's own taken over.
FILES = {
    "fsdp_config": (
        fsdp_config.CONFIG,
        "take the file over with --fsdp_config FILE on trainkit's own command line, or set strategy",
    ),
    "deepspeed": (DEEPSPEED, "set strategy.kind to the file's ZeRO stage, and strategy.config to the file"),
}
CONFIG_SUFFIXES = (".json", ".yaml", ".yml")


def problems(context: Context) -> Iterator[Diagnostic]:
    """Every error."""
    for find in (_unsupported, _contradictions, _against_files, _of_first_version, _own_argv):
        yield from find(context)


def error(context: Context, key: str, what: str, why: str, hint: str) -> Diagnostic:
    """An error at a key."""
    return context.resolved.error(key, what, hint, why=why)


def _unsupported(context: Context) -> Iterator[Diagnostic]:
    """Settings whose value Trainer cannot take."""
    for field in FIELDS:
        value = field.encode(context) if said(context, *field.keys) else UNSET
        if isinstance(value, Unsupported):
            key = next(key for key in field.keys if said(context, key))
            what = f"{key} {setting(context, key)} cannot reach a program of kind hf"
            yield error(context, key, what, value.why, value.instead)


def _contradictions(context: Context) -> Iterator[Diagnostic]:
    """Arguments of the program's own that say something else than the recipe."""
    own = own_flags(context)
    for field in FIELDS:
        flag = own.get(field.name)
        if flag is None or not (field.owned or field.is_given(context)):
            continue
        value, key = field.encode(context), field.keys[0]
        if isinstance(value, Unsupported) or agrees(flag, value) or (value is UNSET and flag.switch is False):
            continue
        origin = context.resolved.given(key)
        planned = "nothing" if value is UNSET else value
        yield error(
            context,
            key_of(context, flag),
            f"program.args say {shown(flag)}, and the recipe's {key} makes it {planned}",
            f"{key} is {f'set at {origin.place}' if origin else 'decided by the plan'}",
            f"set {key} in the recipe, and leave {written(flag)} out of program.args",
        )


def _against_files(context: Context) -> Iterator[Diagnostic]:
    """Arguments that say something else than DeepSpeed's file, or name files that the plan writes."""
    own, place = own_flags(context), context.resolved.origin("strategy.config")
    for field, value in deepspeed.implied(context).items():
        if field in own and not agrees(own[field], value):
            what = f"program.args say {shown(own[field])}, and the DeepSpeed file says {value}"
            why = f"the file is named at {place.place}" if place else ""
            hint = f"leave {written(own[field])} out, or bring the file into line with it"
            yield error(context, key_of(context, own[field]), what, why, hint)
    for field, (file, hint) in FILES.items():
        if field in own:
            what = f"program.args name {written(own[field])}, and the plan writes this file itself"
            why = f"{file} in the run directory is made from the recipe"
            yield error(context, key_of(context, own[field]), what, why, hint)


def _of_first_version(context: Context) -> Iterator[Diagnostic]:
    """Settings that FSDP's second version does not have."""
    for key in () if on_xla(context) else of_first_version(context):
        what = f"{key} {setting(context, key)} is of FSDP's version 1, and strategy.version is 2"
        hint = f"leave {key} out, or set strategy.version to 1"
        yield error(context, key, what, "version 2 has no such setting", hint)


def _own_argv(context: Context) -> Iterator[Diagnostic]:
    """Arguments, and one setting, that contradict the strategy, the device or one another."""
    own, args = own_flags(context), context.recipe.program.args
    generating = own.get("predict_with_generate")
    if fsdp_config.is_chosen(context) and generating and generating.switch is not False:
        what = "strategy fsdp and predict_with_generate cannot be run together"
        why = "generate() calls the model outside the forward pass that gathers its shards"
        hint = "leave predict_with_generate out, or set strategy.kind to ddp"
        yield error(context, key_of(context, generating), what, why, hint)
    if context.recipe.precision.tf32 and context.topology.device != "cuda":
        what = f"precision.tf32 is for CUDA cards, and the run uses {context.topology.device}"
        yield error(context, "precision.tf32", what, "Trainer ends with an error there", "leave precision.tf32 out")
    prefetch, workers = own.get("dataloader_prefetch_factor"), own.get("dataloader_num_workers")
    if prefetch and not (context.recipe.data.workers or (workers and workers.values not in ((), ("0",)))):
        what = f"{written(prefetch)} is for loader processes, and there are none"
        yield error(context, key_of(context, prefetch), what, "", "set data.workers, or leave it out")
    if isinstance(args, list) and len(args) == 1 and args[0].endswith(CONFIG_SUFFIXES):
        what = f"program.args is one file, {args[0]}"
        why = "HF's scripts read such a file only where nothing else is given, and the plan gives more"
        hint = "write its settings in the recipe, or in program.args one by one"
        yield error(context, "program.args", what, why, hint)
