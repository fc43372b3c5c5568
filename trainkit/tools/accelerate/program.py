"""`accelerate`: scripts on `Accelerator()`, which reads its settings from the environment, whoever launches it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from trainkit.errors import Diagnostic, note, warning
from trainkit.launch_plan.context import Context
from trainkit.launch_plan.provenance import SourcedFile, SourcedVariable, variable
from trainkit.launch_plan.rules import (
    LAUNCHED,
    OWN_CHECKPOINT,
    InputRule,
    PlanRule,
    Support,
    Table,
    incompatible,
    unsupported,
)
from trainkit.recipe.merge import value_at
from trainkit.recipe.schema import Ddp, Fsdp
from trainkit.tools.accelerate import importer
from trainkit.tools.accelerate.fields import SETTINGS
from trainkit.tools.base import own_scripts
from trainkit.tools.base.fields import UNSET, setting
from trainkit.tools.base.fsdp_settings import CHECKPOINTING, MESH, of_first_version, wrapping_notices
from trainkit.tools.base.interface import Detection, all_own
from trainkit.tools.deepspeed.config import config_file
from trainkit.tools.deepspeed.fields import FILE as DEEPSPEED
from trainkit.tools.deepspeed.fields import STRATEGY_KEYS, ZERO3_INIT

REQUIRES: Mapping[str, str] = {"torch": "2.6", "accelerate": "1.9"}
STRATEGY_BY = "done by Accelerator(), which is told: "
DETECTION = Detection("Accelerator()", frozenset({"accelerate.Accelerator"}))
reason, argv, read = own_scripts.reason, own_scripts.argv, all_own

READ = "Accelerator() reads it"
LOGS = (*own_scripts.LIBRARIES, "ACCELERATE_LOG_LEVEL")
wrapper = partial(own_scripts.wrapper, names=LOGS)

ENVIRONMENT = Support("the environment of Accelerator()")
# Keys whose values are variables of Accelerator(); the kind of strategy is decided before.
VARIABLES = {key for each in SETTINGS if each.variable for key in each.keys} - LAUNCHED.keys()


def _own(what: str, example: str, *accepted: object) -> Support:
    return unsupported(f"the script {what}", f"pass what the script takes in program.args, as {example}", *accepted)


_KWARGS = "Accelerator() takes it from a DistributedDataParallelKwargs that the script hands it"
_PLUGIN = "accelerate reads no such setting outside of the script"

SUPPORT: Table = {
    **LAUNCHED,
    "model": _own("makes its own model", "model_name_or_path"),
    "data": _own("makes its own DataLoader", "num_workers"),
    # which the preset for CPUs says, where it makes no difference
    "data.pin_memory": _own("makes its own DataLoader", "pin_memory", False),
    "peft": _own("makes its own adapters", "lora_rank"),
    "optimizer": _own("makes its own optimizer", "learning_rate"),
    "schedule": _own("makes its own schedule", "lr_scheduler_type"),
    "train": _own("has its own loop", "num_train_epochs, max_train_steps or seed"),
    "train.max_grad_norm": Support(DEEPSPEED),
    "eval": _own("evaluates by itself", "eval_steps"),
    "predict": _own("predicts by itself", "do_predict"),
    "sample": _own("generates by itself", "prompt"),
    "profile": _own("is not watched by the plan", "profile"),
    "checkpoint": _own("saves by itself", "checkpointing_steps"),
    "checkpoint.resume": OWN_CHECKPOINT,
    "logging": _own("writes its own metrics", "report_to"),
    **dict.fromkeys(("logging.level", "logging.replica_level", "logging.each_node", *VARIABLES), ENVIRONMENT),
    "efficiency.compile": ENVIRONMENT,
    "batch": _own("makes its own DataLoader", "per_device_train_batch_size"),
    "precision.weights": _own("loads its own weights", "torch_dtype"),
    "precision.eval": unsupported(
        "Accelerator() evaluates in the format of the training", "leave precision.eval out", "same"
    ),
    "precision.tf32": unsupported(
        "accelerate reads no such setting",
        "set torch.backends.cuda.matmul.allow_tf32 in the script, and leave precision.tf32 out",
        None,
    ),
    "hang.collective_seconds": unsupported(
        "Accelerator() takes it from an InitProcessGroupKwargs that the script hands it",
        "give it there, as timeout, and leave hang.collective_seconds out",
    ),
    "efficiency.attention": _own("makes its own model", "attn_implementation"),
    "efficiency.offload_activations": unsupported(
        "the script runs its own forward pass", "use torch.autograd.graph.save_on_cpu in it, or leave it out", False
    ),
    "efficiency.gradient_checkpointing.selective": unsupported(
        "accelerate recomputes whole units", "leave it out", False
    ),
    "strategy.find_unused_parameters": unsupported(_KWARGS, "give it there", False),
    "strategy.limit_all_gathers": unsupported(_PLUGIN, "leave it out", True, None),
    **dict.fromkeys(("strategy.replicate", "strategy.tensor", "strategy.context"), MESH),
    "strategy.prefetch": unsupported(_PLUGIN, "leave it out", 1),
    "strategy.reduce_gradients": unsupported(
        "accelerator.accumulate() reduces once", "leave it out, or write once", "once"
    ),
    "strategy.reduce_dtype": Support("Accelerator()"),  # what it does anyway
    **dict.fromkeys((*STRATEGY_KEYS, "strategy.config"), Support(DEEPSPEED)),
}

INCOMPATIBLE: tuple[PlanRule, ...] = (
    incompatible(
        "strategy.kind",
        lambda c: c.device == "xla" and c.strategy == "fsdp",
        "under XLA accelerate takes its FSDP settings and silently shards nothing",
        "strategy.kind: single, or program.kind: hf, whose Trainer shards with torch_xla",
    ),
    incompatible(
        "strategy.kind",
        lambda c: c.strategy == "fsdp" and c.device == "cpu",
        "on a CPU accelerate silently trains with DDP, or with copies that never talk to one another",
        "strategy.kind: ddp, or zero3, which shards on a CPU too",
    ),
    incompatible(
        "precision.dtype",
        lambda c: c.strategy in ("single", "ddp") and c.device == "cpu" and c.dtype == "fp16",
        "on a CPU accelerate takes fp16 and silently computes in fp32",
        "precision.dtype: bf16 or fp32",
    ),
)
INPUT_RULES: tuple[InputRule, ...] = ()

# accelerate, utils/dataclasses.py: DynamoBackend
BACKENDS = (
    *("eager", "aot_eager", "inductor", "aot_ts_nvfuser", "nvprims_nvfuser", "cudagraphs", "ofi", "fx2trt", "onnxrt"),
    *("tensorrt", "aot_torchxla_trace_once", "torchxla_trace_once", "tvm", "hpu_backend", "neuron"),
)
# Variables that the plan sets, or accelerate launch from its file; and those of such names that both leave alone.
DECIDED = (
    *(f"ACCELERATE_{name}_" for name in ("USE", "MIXED", "GRADIENT", "DYNAMO", "DEEPSPEED")),
    "FSDP_",
)
FREE = ("FSDP_IGNORED_MODULES", "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES", ZERO3_INIT, importer.SWITCH)


def is_decided(name: str) -> bool:
    """Whether a variable of accelerate's is one that the plan decides."""
    return name.startswith(DECIDED) and name not in FREE


def is_free(name: str) -> bool:
    """Whether a variable is one of accelerate's that a recipe may set beside what the plan decides."""
    return name.startswith(("ACCELERATE_", "FSDP_", importer.START)) and not is_decided(name)


def files(context: Context) -> tuple[SourcedFile, ...]:
    """DeepSpeed's file for the zero strategies, from the recipe or with the user's as base."""
    return (config_file(context, "accelerate"),) if context.zero else ()


def environment(context: Context) -> tuple[SourcedVariable, ...]:
    """The settings of Accelerator(). accelerate launch writes the same from its file, which has the same values."""
    variables = list(own_scripts.verbosity(context, LOGS))
    for each in SETTINGS:
        value = each.encode(context) if each.variable else UNSET
        if value is UNSET:
            continue
        parts = value if isinstance(value, tuple) else (each.text(value),)
        source = each.made_by(context)
        keys = tuple(key for key in source.keys if context.resolved.given(key))
        variables.append(variable(each.variable, *parts, keys=keys, rule=source.rule or ("" if keys else READ)))
    return tuple(variables)


def notices(context: Context) -> Iterator[Diagnostic]:
    """What stays the script's own, and what accelerate does by itself."""
    what = "model, data, optimizer and the loop are the script's own; its DataLoader decides the micro batch"
    yield note(what, "pass the script's own settings in program.args")
    yield from wrapping_notices(context)
    if context.zero:
        yield from _zero_notices(context)
    chosen = context.recipe.efficiency.compile
    if chosen.enabled and chosen.dynamic is None:
        what = "accelerate compiles for the sizes that it sees (dynamic=False): other sizes are compiled again"
        yield note(what, "set efficiency.compile.dynamic to true where sizes change")


def _zero_notices(context: Context) -> Iterator[Diagnostic]:
    if not context.resolved.given("train.max_grad_norm"):
        base = context.resolved.attachments.get("strategy.config")
        found = value_at(base.tree, "gradient_clipping") if base else "auto"
        norm = {None: "1 by default (none before 0.19.3)", "auto": "1, which accelerate fills in"}.get(
            found, f"{found}, as its file says"
        )
        what = f"DeepSpeed scales gradients down to a norm of {norm}: clip_grad_norm_ does nothing then"
        yield note(what, "set train.max_grad_norm to the script's own")
    if context.topology.device == "cpu" and context.topology.world_size > 1:
        what = (
            "on a CPU, Accelerator() counts one process under DeepSpeed unless it is given the backend: the run would "
            "end with `Check batch related parameters`"
        )
        hint = 'write Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")]) in the script'
        yield warning(what, hint)


def problems(context: Context) -> Iterator[Diagnostic]:
    """Every given value that would be dropped, though others of the same key reach the program."""
    for key, why, hint in _dropped(context):
        what = f"{key} {setting(context, key)} cannot reach a program of kind accelerate"
        yield context.resolved.error(key, what, hint, why=why)
    yield from _whole_batch(context)
    yield from importer.mesh_problems(context)
    yield from _variables(context)


def _dropped(context: Context) -> Iterator[tuple[str, str, str]]:
    """The key, why its value is dropped, and what to do."""
    strategy, efficiency = context.recipe.strategy, context.recipe.efficiency
    every, compiles, key = efficiency.gradient_checkpointing.every, efficiency.compile, "efficiency.compile"
    if context.resolved.given("train.max_grad_norm") and not context.zero:
        why = "only DeepSpeed clips by itself; otherwise the script calls clip_grad_norm_"
        yield "train.max_grad_norm", why, "pass what the script takes in program.args"
    if context.resolved.given("data.pin_memory") and context.topology.device == "cuda":
        yield "data.pin_memory", "the script makes its own DataLoader", "pass what the script takes in program.args"
    if context.resolved.given("strategy.bucket_mb") and isinstance(strategy, Ddp):
        yield "strategy.bucket_mb", _KWARGS, "give it there, as bucket_cap_mb"
    sums = getattr(strategy, "reduce_dtype", "") if context.resolved.given("strategy.reduce_dtype") else ""
    if isinstance(strategy, Fsdp) and sums == "fp32":
        why = "Accelerator() sums gradients in the format of the computation"
        yield "strategy.reduce_dtype", why, "leave it out, or write same"
    if isinstance(strategy, Ddp) and sums == "same":
        yield "strategy.reduce_dtype", _KWARGS, "give it there, as comm_hook"
    if every and not isinstance(strategy, Fsdp):
        hint = "switch it on in the script, as model.gradient_checkpointing_enable()"
        yield CHECKPOINTING, "accelerate recomputes activations under fsdp only", hint
    elif every and every is not True:
        yield CHECKPOINTING, "accelerate recomputes every wrapped unit or none", f"set {CHECKPOINTING} to true"
    if compiles.enabled and compiles.backend.lower() not in BACKENDS:
        hint = "choose one of these, or compile in the script"
        yield f"{key}.backend", f"accelerate takes {', '.join(BACKENDS)}", hint
    if compiles.enabled and compiles.dynamic is None and context.resolved.given(f"{key}.dynamic"):
        why = "accelerate launch knows yes and no only, and takes no for nothing"
        yield f"{key}.dynamic", why, "write true or false"
    for name in of_first_version(context):
        yield name, "version 2 has no such setting", f"leave {name} out, or set strategy.version to 1"
    loads_once = isinstance(strategy, Fsdp) and strategy.version == 1 and strategy.cpu_ram_efficient_loading
    if loads_once and setting(context, "strategy.sync_module_states") is False:
        why = "weights that rank 0 alone loads reach the others by sync_module_states, which is false"
        yield "strategy.cpu_ram_efficient_loading", why, "leave one of the two out"


def _whole_batch(context: Context) -> Iterator[Diagnostic]:
    """On a CPU accelerate may count one process; where it fills in the whole batch, DeepSpeed notices."""
    base, key = context.resolved.attachments.get("strategy.config"), "train_batch_size"
    size = value_at(base.tree, key) if base and context.topology.device == "cpu" and context.zero else None
    if base and size not in (None, "auto"):
        what = f'{key} in the DeepSpeed file is {size}, and on a CPU it has to be "auto"'
        why = "Accelerator() may take each rank for the only one there, and only the sum of the batch would show it"
        hint = 'write "auto", or remove it'
        yield context.resolved.error("strategy.config", what, hint, why=why, at=base.origins.get(key))


def _variables(context: Context) -> Iterator[Diagnostic]:
    """Variables of the recipe that would contradict the plan."""
    for name, key in context.resolved.named_variables():
        if is_decided(name):
            what = f"{key.partition('.')[0]} names {name}, which the plan decides"
            hint = "use strategy, precision, efficiency or batch.accumulation"
            yield context.resolved.error(key, what, hint)


RULES: tuple[PlanRule, ...] = (problems, notices)
