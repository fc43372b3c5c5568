"""What cannot be handed to Trainer: settings without a counterpart, and words of the program's own against the plan."""

from __future__ import annotations

from collections.abc import Iterator

from trainkit.errors import Diagnostic
from trainkit.frameworks.hf_trainer import deepspeed, fsdp
from trainkit.frameworks.hf_trainer.argv_reader import FALSE, Spoken, spoken_fields
from trainkit.frameworks.hf_trainer.fields import DEEPSPEED, ROWS, spoken
from trainkit.frameworks.hf_trainer.row import Row, Unfit, Value, given, setting
from trainkit.frameworks.torch_xla import on_xla
from trainkit.plan.context import Context

# Settings of FSDP's first version, and what the second does without being told.
FOLLOWED = {
    "backward_prefetch": "backward_pre",
    "forward_prefetch": False,
    "limit_all_gathers": True,
    "use_orig_params": True,
    "sync_module_states": True,
}
# Fields that name files of the plan's.
FILES = {"fsdp_config": fsdp.CONFIG, "deepspeed": DEEPSPEED}


def unfit(context: Context) -> Iterator[Diagnostic]:
    """Settings whose value Trainer cannot take."""
    for row in ROWS:
        value = row.value(context) if given(context, *row.keys) else None
        if isinstance(value, Unfit):
            key = next(key for key in row.keys if given(context, key))
            what = f"{key} {setting(context, key)} cannot reach a program of kind hf"
            yield _error(context, what, key, value.why, value.instead)


def contradictions(context: Context) -> Iterator[Diagnostic]:
    """Words of program.args that say something else than the recipe, or that the plan has to know of."""
    own = spoken_fields(context.recipe.program.args)
    for row in ROWS:
        said = own.get(row.field)
        if said is None or not (row.owned or spoken(context, row)):
            continue
        value = row.value(context)
        if not isinstance(value, Unfit) and not said.agrees(value) and not (value is None and _off(said)):
            yield _contradiction(context, row, said, value)
    for field, value in deepspeed.implied(context).items():
        if field in own and not own[field].agrees(value):
            yield _file_says(context, own[field], value)
    for field, file in FILES.items():
        if field in own:
            yield _file(context, own[field], file)


def own_argv(context: Context) -> Iterator[Diagnostic]:
    """Words of program.args that contradict one another or the strategy."""
    args, strategy = context.recipe.program.args, context.recipe.strategy
    own = spoken_fields(args)
    if fsdp.chosen(context) and "predict_with_generate" in own and not _off(own["predict_with_generate"]):
        said = own["predict_with_generate"]
        yield _error(
            context,
            "strategy fsdp and predict_with_generate cannot be run together",
            said.key,
            "generate() calls the model outside the forward pass that gathers its shards.",
            "Leave predict_with_generate out, or choose strategy.kind: ddp.",
        )
    for name, anyway in FOLLOWED.items():
        key = f"strategy.{name}"
        second = getattr(strategy, "version", 1) == 2 and not on_xla(context)
        if second and setting(context, key) not in (None, anyway):
            what = f"{key} {setting(context, key)} is of FSDP's version 1, and strategy.version is 2"
            why = "Version 2 has no such setting."
            yield _error(context, what, key, why, f"Leave {key} out, or set strategy.version to 1.")
    if context.recipe.precision.tf32 and context.topology.device != "cuda":
        key, hint = "precision.tf32", "Leave precision.tf32 out."
        what = f"precision.tf32 is for CUDA cards, and the run uses {context.topology.device}"
        yield _error(context, what, key, "Trainer ends with an error there.", hint)
    prefetch = own.get("dataloader_prefetch_factor")
    workers = own.get("dataloader_num_workers")
    if prefetch and not (context.recipe.data.workers or (workers and workers.words not in ((), ("0",)))):
        what = f"{prefetch.written} is for loader processes, and there are none"
        yield _error(context, what, prefetch.key, "", "Set data.workers, or leave it out.")
    if isinstance(args, list) and len(args) == 1 and args[0].endswith((".json", ".yaml", ".yml")):
        yield _error(
            context,
            f"program.args is one file, {args[0]}",
            "program.args",
            "HF's scripts read such a file only where nothing else is given, and the plan gives more.",
            "Write its settings in the recipe, or in program.args one by one.",
        )


def _contradiction(context: Context, row: Row, said: Spoken, value: Value) -> Diagnostic:
    key = row.keys[0]
    origin = context.resolved.given(key)
    place = f"set at {origin.place}" if origin else "decided by the plan"
    planned = "nothing" if value is None else value
    shown = " ".join((said.written, *said.words))
    return _error(
        context,
        f"program.args say {shown}, and the recipe's {key} makes it {planned}",
        said.key,
        f"{key} is {place}.",
        f"Say it once: set {key} in the recipe, and leave {said.written} out of program.args.",
    )


def _file_says(context: Context, said: Spoken, value: Value) -> Diagnostic:
    shown, key = " ".join((said.written, *said.words)), "strategy.config"
    what = f"program.args say {shown}, and the DeepSpeed file says {value}"
    place = context.resolved.origin(key)
    why = f"The file is named at {place.place}." if place else ""
    return _error(context, what, said.key, why, f"Leave {said.written} out, or bring the file into line with it.")


def _file(context: Context, said: Spoken, file: str) -> Diagnostic:
    hint = {
        "fsdp_config": "Take the file over with --fsdp_config FILE on trainkit's own command line, or set strategy.",
        "deepspeed": "Set strategy.kind to the file's ZeRO stage, and strategy.config to the file.",
    }[said.field]
    what = f"program.args name {said.written}, and the plan writes this file itself"
    why = f"{file} in the run directory is made from the recipe."
    return _error(context, what, said.key, why, hint)


def _off(said: Spoken) -> bool:
    return bool(said.words) and said.words[0].lower() in FALSE


def _error(context: Context, what: str, key: str, why: str, hint: str) -> Diagnostic:
    return Diagnostic("error", what, key=key, origin=context.resolved.origin(key), why=why, hint=hint)
