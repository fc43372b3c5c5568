"""How each key reaches a program of kind accelerate, and why most do not: the script's loop is its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trainkit.errors import Diagnostic
from trainkit.frameworks.accelerate.fields import SETTINGS
from trainkit.frameworks.accelerate.setting import given
from trainkit.frameworks.base.fields import setting
from trainkit.frameworks.base.fsdp_settings import CHECKPOINTING, of_first_version
from trainkit.frameworks.deepspeed.fields import FILE as DEEPSPEED
from trainkit.frameworks.deepspeed.fields import STRATEGY_KEYS
from trainkit.plan.context import Context
from trainkit.plan.support import LAUNCHED, OWN_CHECKPOINT, Reach, Table
from trainkit.recipe.layers.merge import value_at
from trainkit.recipe.schema import Ddp, Fsdp

ENVIRONMENT = Reach("the environment of Accelerator()")
# Keys whose values are variables of Accelerator(); the kind of strategy is decided before.
VARIABLES = {key for each in SETTINGS if each.variable for key in each.keys} - LAUNCHED.keys()


def _own(what: str, example: str) -> Reach:
    return Reach(why=f"the script {what}", instead=f"pass what the script takes in program.args, as {example}")


_KWARGS = "Accelerator() takes it from a DistributedDataParallelKwargs that the script hands it"
_PLUGIN = "accelerate reads no such setting outside of the script"

REACH: Table = {
    **LAUNCHED,
    "model": _own("makes its own model", "model_name_or_path"),
    "data": _own("makes its own DataLoader", "num_workers"),
    # which the preset for CPUs says, where it makes no difference
    "data.pin_memory": replace(_own("makes its own DataLoader", "pin_memory"), anyway=(False,)),
    "peft": _own("makes its own adapters", "lora_rank"),
    "optimizer": _own("makes its own optimizer", "learning_rate"),
    "schedule": _own("makes its own schedule", "lr_scheduler_type"),
    "train": _own("has its own loop", "num_train_epochs, max_train_steps or seed"),
    "train.max_grad_norm": Reach(DEEPSPEED),
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
    "precision.eval": Reach(
        why="Accelerator() evaluates in the format of the training",
        instead="leave precision.eval out",
        anyway=("same",),
    ),
    "precision.tf32": Reach(
        why="accelerate reads no such setting",
        instead="set torch.backends.cuda.matmul.allow_tf32 in the script, and leave precision.tf32 out",
        anyway=(None,),
    ),
    "efficiency.attention": _own("makes its own model", "attn_implementation"),
    "efficiency.gradient_checkpointing.selective": Reach(
        why="accelerate recomputes whole units", instead="leave it out", anyway=(False,)
    ),
    "strategy.find_unused_parameters": Reach(why=_KWARGS, instead="give it there", anyway=(False,)),
    "strategy.limit_all_gathers": Reach(why=_PLUGIN, instead="leave it out", anyway=(True, None)),
    "strategy.prefetch": Reach(why=_PLUGIN, instead="leave it out", anyway=(1,)),
    "strategy.reduce_dtype": Reach(
        why="Accelerator() sums gradients in the format of the computation",
        instead="leave it out, or write same",
        anyway=("same",),
    ),
    **dict.fromkeys((*STRATEGY_KEYS, "strategy.config"), Reach(DEEPSPEED)),
}

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
FREE = ("FSDP_IGNORED_MODULES", "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES")


def problems(context: Context) -> Iterator[Diagnostic]:
    """Every given value that would be dropped, though others of the same key reach the program."""
    for find in (_by_strategy, _compilation, _sharding, _whole_batch, _variables):
        yield from find(context)


def _by_strategy(context: Context) -> Iterator[Diagnostic]:
    strategy, every = context.recipe.strategy, context.recipe.efficiency.gradient_checkpointing.every
    if given(context, "train.max_grad_norm") and not context.zero:
        why = "only DeepSpeed clips by itself; otherwise the script calls clip_grad_norm_"
        yield _error(context, "train.max_grad_norm", why, "pass what the script takes in program.args")
    if given(context, "data.pin_memory") and context.topology.device == "cuda":
        why = "the script makes its own DataLoader"
        yield _error(context, "data.pin_memory", why, "pass what the script takes in program.args")
    if given(context, "strategy.bucket_mb") and isinstance(strategy, Ddp):
        yield _error(context, "strategy.bucket_mb", _KWARGS, "give it there, as bucket_cap_mb")
    if every and not isinstance(strategy, Fsdp):
        why = "accelerate recomputes activations under fsdp only"
        yield _error(
            context, CHECKPOINTING, why, "switch it on in the script, as model.gradient_checkpointing_enable()"
        )
    elif every and every is not True:
        why = "accelerate recomputes every wrapped unit or none"
        yield _error(context, CHECKPOINTING, why, f"set {CHECKPOINTING} to true")


def _compilation(context: Context) -> Iterator[Diagnostic]:
    chosen, key = context.recipe.efficiency.compile, "efficiency.compile"
    if chosen.enabled and chosen.backend.lower() not in BACKENDS:
        why = f"accelerate takes {', '.join(BACKENDS)}"
        yield _error(context, f"{key}.backend", why, "choose one of these, or compile in the script")
    if chosen.enabled and chosen.dynamic is None and given(context, f"{key}.dynamic"):
        why = "accelerate launch knows yes and no only, and takes no for nothing"
        yield _error(context, f"{key}.dynamic", why, "write true or false")


def _sharding(context: Context) -> Iterator[Diagnostic]:
    strategy = context.recipe.strategy
    if not isinstance(strategy, Fsdp):
        return
    for key in of_first_version(context):
        hint = f"leave {key} out, or set strategy.version to 1"
        yield _error(context, key, "version 2 has no such setting", hint)
    if strategy.version == 1 and strategy.cpu_ram_efficient_loading and strategy.sync_module_states is False:
        key = "strategy.cpu_ram_efficient_loading"
        why = "weights that rank 0 alone loads reach the others by sync_module_states, which is false"
        yield _error(context, key, why, "leave one of the two out")


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
    named = [(name, f"env.{name}") for name in context.recipe.env]
    named += [(name, "env_from") for name in context.recipe.env_from]
    for name, key in named:
        if name.startswith(DECIDED) and name not in FREE:
            what = f"{key.partition('.')[0]} names {name}, which the plan decides"
            hint = "use strategy, precision, efficiency or batch.accumulation"
            yield context.resolved.error(key, what, hint)


def _error(context: Context, key: str, why: str, hint: str) -> Diagnostic:
    what = f"{key} {setting(context, key)} cannot reach a program of kind accelerate"
    return context.resolved.error(key, what, hint, why=why)
