"""`hf`: scripts on transformers' Trainer; what the recipe sets reaches them as flags and files of TrainingArguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trainkit.distribution import install
from trainkit.errors import Diagnostic, blocker, note, warning
from trainkit.launch_plan.context import Context
from trainkit.launch_plan.model import Variable
from trainkit.launch_plan.provenance import (
    Source,
    SourcedFile,
    SourcedVariable,
    Token,
    chosen_at_start,
    resume_word,
    token,
)
from trainkit.launch_plan.rules import InputRule, PlanRule, incompatible, unsupported_optimizers
from trainkit.lazy import call
from trainkit.machine.facts import at_least
from trainkit.optimizers import ON_DEEPSPEED, OTHER_NAMES
from trainkit.tools import compile_backends
from trainkit.tools.base import own_scripts
from trainkit.tools.base.fields import is_set, keys_set_below
from trainkit.tools.base.fsdp_settings import wrapping_notices
from trainkit.tools.base.interface import Detection
from trainkit.tools.deepspeed.fields import FILE as DEEPSPEED
from trainkit.tools.hf import deepspeed, fsdp_config
from trainkit.tools.hf import removed_arguments as gone
from trainkit.tools.hf.argv_reader import MARKS, SHARED_MARKS, FileValue, own_flags, rendered, says, written
from trainkit.tools.hf.fields import FIELDS, OUTPUT, PUSH, Argument
from trainkit.tools.hf.fsdp_config import BEYOND, OLDEST, UNTIL, can, version
from trainkit.tools.hf.support import SUPPORT, given_fields, problems, resumes
from trainkit.tools.torch_xla import is_spmd, on_xla

__all__ = ["SUPPORT"]

REQUIRES: Mapping[str, str] = {"transformers": OLDEST, "torch": "2.6", "accelerate": "1.9"}
STRATEGY_BY = "done by Trainer, which is told: "
wrapper = own_scripts.wrapper
read = call("trainkit.tools.hf.importer:read_program")
deepspeed_file = call("trainkit.tools.deepspeed.config:config_file")
DETECTION = Detection(
    "transformers' Trainer",
    frozenset({"transformers.*Trainer", "transformers.*TrainingArguments", "trl.*Trainer"}),
    frozenset({"HfArgumentParser", "TrlParser"}),  # which make TrainingArguments of a command line
    MARKS,
    SHARED_MARKS,
    frozenset({"parse_json_file", "parse_yaml_file", "parse_dict"}),
    frozenset({"parse_args_into_dataclasses", "parse_args_and_config"}),
)
# What --hub_strategy pushes with the optimizer's state.
RESUMABLE = ("checkpoint", "all_checkpoints")
TRL_RESUMES = "1.15"  # its scripts before call train() without the checkpoint (1.10 to 1.14 were looked at)
# Fields that TrainingArguments do not keep as they were given, or that show in what is in force.
REWRITTEN = frozenset({"use_cpu", "fsdp", "report_to", "lr_scheduler_kwargs", "resume_from_checkpoint"})
IMPLIED = "the plan decides it, so the program is given it"
XLA_OPTIMIZER = "an optimizer for torch_xla's FSDP"
INCOMPATIBLE: tuple[PlanRule, ...] = (
    incompatible(
        "batch.global",
        lambda c: c.launcher == "python" and c.sees_several and c.recipe.batch.global_ != "auto",
        "in one process that sees several GPUs Trainer multiplies the batch by their number, unless the script "
        "has laid the model over them (device_map): the sum cannot be promised",
        "batch.micro and batch.accumulation instead, strategy.kind: ddp, or devices.select: 1",
    ),
    incompatible(
        "strategy.kind",
        lambda c: c.strategy == "fsdp" and c.device == "cpu",
        "on a CPU Trainer takes --fsdp and silently trains with DDP",
        "strategy.kind: ddp, or zero3, which shards on a CPU too",
    ),
    incompatible(
        "precision.dtype",
        lambda c: c.strategy in ("single", "ddp", "fsdp") and c.device == "cpu" and c.dtype == "fp16",
        "on a CPU Trainer takes --fp16 and silently computes in fp32",
        "precision.dtype: bf16 or fp32",
    ),
    incompatible(
        "precision.eval",
        lambda c: c.strategy in ON_DEEPSPEED and c.eval_dtype != c.dtype,
        "DeepSpeed has one format for training and evaluation",
        "precision.eval: same",
    ),
    *unsupported_optimizers("hf"),
)
INPUT_RULES: tuple[InputRule, ...] = ()


def reason(context: Context) -> str:
    return f"{own_scripts.own_program_line(context)}, on the Trainer of transformers {version(context)}"


def argv(context: Context) -> tuple[Token, ...]:
    """Interpreter, script, the user's arguments and then the plan's: argparse lets the last of two count."""
    return own_scripts.argv(context, tuple(_flags(context)), gone.own_words(context))


def files(context: Context) -> tuple[SourcedFile, ...]:
    if context.zero:
        return (deepspeed_file(context, "hf"),)
    return (fsdp_config.file(context),) if fsdp_config.is_chosen(context) else ()


def environment(context: Context) -> tuple[SourcedVariable, ...]:
    return (*own_scripts.verbosity(context), *fsdp_config.environment(context))


def notices(context: Context) -> Iterator[Diagnostic]:
    """What transformers lacks, and arguments of the program's own that do less than they seem to."""
    installed, own = version(context), own_flags(context.resolved)
    if at_least(installed, BEYOND):  # one that is missing or too old is a missing package
        what = f"transformers {installed} is newer than trainkit knows: its settings may have other names"
        yield blocker(what, install(context.facts.executable, "transformers"))
    yield from gone.notices(context)
    if (named := own.get("optim")) and named.values == ("adamw_hf",) and not can("--optim adamw_hf", context):
        yield blocker(f"{says(named)}: {OTHER_NAMES['adamw_hf'][0]}", OTHER_NAMES["adamw_hf"][1])
    yield from _pushing(context)
    yield from own_scripts.made_strategy(context)
    if folder := own.get("output_dir"):
        what = f"{says(folder)}: the program's files lie there and not in the run directory"
        yield note(what, "checkpoint.resume auto does not look there")
    if context.resume.path is not None and own_scripts.of_trl(context):
        if not at_least(trl := context.facts.packages.get("trl", TRL_RESUMES), TRL_RESUMES):
            what = f"the scripts of trl {trl} begin anew, whatever --resume_from_checkpoint says"
            yield blocker(what, install(context.facts.executable, "trl"))
    elif context.resume.path is not None:  # TrainingArguments only hold the path, as their documentation says
        what = "Trainer leaves --resume_from_checkpoint to the script, which has to hand it to train()"
        lacks = "" if resumes(context.resolved.script) else f": {context.recipe.program.script} names it nowhere"
        yield (warning if lacks else note)(f"{what}{lacks}", "the run ends where its first step is another")
    for field, _ in given_fields(context):
        if isinstance(replaced := own.get(field.name), FileValue):
            keys = " and ".join(_keys(context, field)) or "the plan"
            yield note(f"{says(replaced)}, and {keys} counts instead: the script gets it as a flag")
    if (
        context.topology.device == "cpu"
        and context.topology.world_size > 1
        and "use_cpu" not in own
        and not context.zero
    ):
        what = "the script gets --use_cpu True: without it Trainer trains a copy in each process that sees no GPU"
        yield note(what)
    yield from _abbreviated(context)
    yield from deepspeed.notices(context)
    if on_xla(context) and fsdp_config.is_chosen(context):
        yield from _of_xla(context)


def backend_is_gone(context: Context) -> Iterator[Diagnostic]:
    """The script's own arguments name a backend of torch.compile that PyTorch no longer has."""
    if named := own_flags(context.resolved).get("torch_compile_backend"):
        yield from compile_backends.gone(next(iter(named.values), ""), says(named))


RULES: tuple[PlanRule, ...] = (problems, backend_is_gone, notices)


def _pushing(context: Context) -> Iterator[Diagnostic]:
    """What goes to the Hub cannot be resumed from by default."""
    own, asked = own_flags(context.resolved), context.recipe.checkpoint.push_to_hub
    push, pushed = own.get("push_to_hub"), own.get("hub_strategy")
    by_recipe = asked.repo is not None
    chosen = pushed.values[0] if pushed and pushed.values else "every_save"
    if by_recipe and is_set(context, f"{PUSH}.strategy"):
        chosen = asked.strategy if asked.strategy != "all" else "all_checkpoints"
    if (by_recipe or (push and push.switch is not False)) and chosen not in RESUMABLE:
        what = f"hub_strategy {chosen} pushes no optimizer state: training cannot be resumed from the hub"
        where = f"{PUSH}.strategy" if by_recipe else "hub_strategy"
        place = "" if by_recipe else " in program.args"
        yield warning(what, f"set {where} to checkpoint{place} to push a last-checkpoint too")


def _of_xla(context: Context) -> Iterator[Diagnostic]:
    """What torch_xla's FSDP asks of the model, and what it does on one chip."""
    if not can(XLA_OPTIMIZER, context):
        what = f"transformers {version(context)} lacks {XLA_OPTIMIZER}; Trainer fails before step 1"
        yield blocker(what, install(context.facts.executable, f"transformers<{UNTIL[XLA_OPTIMIZER]}"))
    if is_spmd(context):
        what = (
            "Trainer shards the output of a causal language model, or a tensor or tuple of three dimensions; with "
            "other outputs it ends with an error"
        )
        yield note(what)
    else:
        yield note("FSDP's version 1 shards over processes, and one process keeps every shard")
    yield from wrapping_notices(context)


def _abbreviated(context: Context) -> Iterator[Diagnostic]:
    """argparse takes a beginning of a flag for the flag, and the plan's own flags come last."""
    ours = {field.name for field in FIELDS if field.is_given(context)}
    for name, flag in own_flags(context.resolved).items():
        short = () if isinstance(flag, FileValue) else ours
        meant = sorted(field for field in short if field.startswith(name) and field != name)
        if meant and name not in ours:
            what = (
                f"{written(flag)} may be read as short for --{meant[0]}; the plan gives that too, and its value counts"
            )
            yield warning(what, "write the flag in full, unless the script has one of this very name")


def promised(context: Context) -> Iterator[tuple[str, object, Source]]:
    """What TrainingArguments must be seen to hold: field, value and what made it."""
    for field, value in given_fields(context):
        if field.name not in REWRITTEN:
            yield field.name_in(version(context)), value, Source(_keys(context, field) or field.keys[:1])


def _keys(context: Context, field: Argument) -> tuple[str, ...]:
    return tuple(each for key in field.keys for each in keys_set_below(context, key))


def _flags(context: Context) -> Iterator[Token]:
    own = own_flags(context.resolved)
    for field, value in given_fields(context):
        keys = _keys(context, field)
        for word in (f"--{field.name_in(version(context))}", *rendered(value)):
            yield token(word, keys=keys, rule="" if keys else IMPLIED)
    if chosen_at_start(context) and "resume_from_checkpoint" not in own:
        yield from resume_word(context, "--resume_from_checkpoint")
    # What only DeepSpeed's file says goes last, and only where no one else says it.
    ours = {field.name for field in FIELDS if field.is_given(context)} | own.keys()
    for name, number in deepspeed.implied(context).items():
        if name not in ours:
            yield from (token(word, keys=("strategy.config",)) for word in (f"--{name}", *rendered(number)))
    sharded = {"fsdp_config": fsdp_config.CONFIG} if fsdp_config.is_chosen(context) else {}
    for name, path in {"output_dir": OUTPUT, **sharded, **({"deepspeed": DEEPSPEED} if context.zero else {})}.items():
        if name not in own or (isinstance(own[name], FileValue) and name != "output_dir"):
            yield token(f"--{name}", rule=IMPLIED)
            yield token(Variable.RUN_DIR, f"/{path}", rule=IMPLIED)
