"""The table of accelerate: each setting in its config file, in the environment of `Accelerator()`, as a flag."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainkit.launch_plan.context import Context
from trainkit.launch_plan.model import Variable
from trainkit.launch_plan.provenance import Source
from trainkit.recipe.schema import Fsdp
from trainkit.tools.base.fields import UNSET, Settings, Unsupported, by_name, setting
from trainkit.tools.base.fsdp_settings import FIELDS, FIRST_VERSION
from trainkit.tools.base.imported_recipe import card
from trainkit.tools.base.launcher_flags import LauncherFlag, fixed, rule, whole_number
from trainkit.tools.deepspeed.fields import FILE as DEEPSPEED
from trainkit.tools.deepspeed.fields import ZERO3_INIT, kind_of

Encoder = Callable[[Context], Any]


@dataclass(frozen=True, slots=True)
class AccelerateField(LauncherFlag):
    """A field of the config file: its name is the dotted key, and the last part of that is a flag of the launcher.

    variable: what the workers read, and text: the value as it is there. in_file: whether the plan's file has the key.
    flag: whether the launcher has such a flag. idle: for a key that is never applied from the file, the values that say
    nothing anyway.
    """

    variable: str = ""
    text: Callable[[Any], str] = str
    in_file: Callable[[Context], bool] = lambda context: True
    flag: bool = True
    idle: tuple[Any, ...] | None = None


def word(value: Any) -> str:
    """A value as accelerate launch writes most of them into the environment."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def on_accelerator(context: Context) -> bool:
    """Whether the program takes its settings from accelerate; otherwise accelerate only starts processes."""
    return context.recipe.program.kind == "accelerate"


def distributed_type(context: Context) -> str:
    """What accelerate's file calls the strategy. DDP of one process needs only the rank environment."""
    if on_accelerator(context):
        if context.topology.device == "xla":
            return "XLA"
        if context.recipe.strategy.kind == "fsdp":
            return "FSDP"
        if context.zero:
            return "DEEPSPEED"
    return "MULTI_GPU" if context.topology.world_size > 1 else "NO"


def through_torchrun(context: Context) -> bool:
    """Whether accelerate starts the ranks with torchrun: several, and one that it has to shard for."""
    return context.topology.world_size > 1 or distributed_type(context) != "NO"


def chooses_cpu(context: Context) -> bool:
    """Whether accelerate is to use no GPU. Trainer has a flag of its own for that, and would leave DeepSpeed out."""
    kind = context.recipe.program.kind
    return context.topology.device == "cpu" and kind != "hf" and not (kind == "accelerate" and context.zero)


def shards(context: Context) -> bool:
    """Whether Accelerator() shards with FSDP."""
    return on_accelerator(context) and isinstance(context.recipe.strategy, Fsdp)


def is_zero(context: Context) -> bool:
    """Whether Accelerator() hands the model to DeepSpeed."""
    return on_accelerator(context) and context.zero


def when(condition: Callable[[Context], bool], encode: Encoder) -> Encoder:
    """An encoder that says nothing unless the condition holds."""
    return lambda context: encode(context) if condition(context) else UNSET


def plain(key: str, *nothing: Any) -> Callable[[Any], Settings]:
    """The decoder of a value that one key has as it is. nothing: values that set nothing."""
    return lambda value: {} if value in nothing else {key: value}


def switched(key: str, means: Any) -> Callable[[Any], Settings]:
    """The decoder of a switch that sets a key to one value."""
    return lambda value: {key: means} if value is True else {}


def nothing_but(*accepted: Any) -> Callable[[Any], Settings | Unsupported]:
    """The decoder of a value that a recipe has no key for, though these values are as in any run."""
    return lambda value: {} if value in accepted else Unsupported("a recipe has no such key")


# Names of mixed precision, which computing in fp32 is not.
MIXED = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}
COMPILE = "efficiency.compile"
RANKS = ("nodes.count", "nodes.processes_per_node", "devices.select", "strategy.kind")
OFF = (None, False, "no", "NO")  # a backend that compiles nothing; YAML reads a bare NO as false
DEFAULT = rule("accelerate's default")


def _strategy_source(context: Context) -> Source:
    if on_accelerator(context):
        return Source(("strategy.kind",))
    return Source(rule="accelerate only starts processes; the program shards the model itself")


def _precision_source(context: Context) -> Source:
    if not on_accelerator(context):
        return Source(rule="the program sets its own precision")
    return Source(rule="DeepSpeed's file has the number format") if context.zero else Source(("precision.dtype",))


def _read_precision(value: Any) -> Settings | Unsupported:
    if value in (False, "no"):
        return {}
    if value == "fp8":
        why = "8-bit products are Transformer Engine's, MS-AMP's or torchao's, and a recipe has no settings for them"
        return Unsupported(why, 'write bf16, or let the script ask for it: Accelerator(mixed_precision="fp8")')
    return {"precision.dtype": value} if value in ("fp16", "bf16") else Unsupported("", "write no, fp16 or bf16")


def _read_cards(value: Any) -> Settings:
    chosen = [card(each.strip()) for each in str(value).split(",") if each.strip()]
    return {} if value == "all" else {"devices.select": chosen}


_LAUNCH: tuple[AccelerateField, ...] = (
    AccelerateField("compute_environment", (), fixed("LOCAL_MACHINE"), source=rule("not SageMaker"), flag=False),
    AccelerateField(
        "debug", (), fixed(False), switched("env.ACCELERATE_DEBUG_MODE", "true"), source=DEFAULT, switch=True
    ),
    AccelerateField("distributed_type", ("strategy.kind",), distributed_type, source=_strategy_source, flag=False),
    AccelerateField(
        "downcast_bf16", decode=switched("env.ACCELERATE_DOWNCAST_BF16", "true"), switch=True, idle=("no",)
    ),
    AccelerateField(
        "enable_cpu_affinity",
        encode=fixed(False),
        decode=switched("launcher.numa_binding", "node"),
        source=rule("threads are set by OMP_NUM_THREADS"),
        switch=True,
        idle=(),
    ),
    AccelerateField(
        "gpu_ids",
        ("devices.select", "devices.order"),
        fixed("all"),
        _read_cards,
        source=rule("the GPUs are chosen by CUDA_VISIBLE_DEVICES"),
    ),
    AccelerateField("machine_rank", (), fixed(0), nothing_but(0), source=rule("given as a flag on several nodes")),
    AccelerateField("main_training_function", (), fixed("main"), nothing_but("main"), source=DEFAULT),
    AccelerateField(
        "mixed_precision",
        ("precision.dtype",),
        lambda context: MIXED[context.dtype] if on_accelerator(context) and not context.zero else "no",
        _read_precision,
        "no",
        variable="ACCELERATE_MIXED_PRECISION",
        in_file=lambda context: not (on_accelerator(context) and context.zero),  # beside DeepSpeed's file an error
        source=_precision_source,
    ),
    AccelerateField(
        "num_machines", ("nodes.count",), lambda context: context.topology.nodes, whole_number("nodes.count")
    ),
    AccelerateField("num_processes", RANKS, lambda context: context.topology.world_size),
    AccelerateField(
        "rdzv_backend",
        encode=fixed("static"),
        source=rule("also given as a flag, because accelerate ignores it here"),
        idle=("static",),
    ),
    AccelerateField("same_network", encode=fixed(False), source=DEFAULT, switch=True, idle=(True,)),
    AccelerateField("use_cpu", ("devices.type",), chooses_cpu, switched("devices.type", "cpu"), flag=False),
    AccelerateField("use_mps_device", decode=switched("devices.type", "mps"), switch=True),
    AccelerateField("tpu_use_sudo", switch=True, idle=()),
    AccelerateField("main_process_ip", ("nodes.rendezvous",)),
    AccelerateField("main_process_port", ("nodes.rendezvous",)),
    AccelerateField("max_restarts", decode=whole_number("launcher.max_restarts")),
    # which accelerate hands to the ranks under this name (utils/launch.py)
    AccelerateField("num_cpu_threads_per_process", decode=plain("env.OMP_NUM_THREADS")),
    AccelerateField("fp16", decode=switched("precision.dtype", "fp16"), flag=False),
    AccelerateField(
        "cpu",
        ("devices.type",),
        when(chooses_cpu, fixed(True)),
        variable="ACCELERATE_USE_CPU",
        in_file=fixed(False),
        source=rule("accelerate's own --cpu would start one process only", ("devices.type",)),
        switch=True,
    ),
)

# ---- torch.compile


def _compiles(context: Context) -> bool:
    return on_accelerator(context) and context.recipe.efficiency.compile.enabled


def _by_blocks(context: Context) -> bool:
    return context.recipe.efficiency.compile.scope != "model"


def _dynamo(name: str, key: str, encode: Encoder, decode: Callable[[Any], Settings], **more: Any) -> AccelerateField:
    variable = f"ACCELERATE_DYNAMO_{name.upper()}"
    keys = (f"{COMPILE}.{key}",)
    return AccelerateField(
        f"dynamo_config.dynamo_{name}", keys, when(_compiles, encode), decode, variable=variable, **more
    )


_COMPILATION: tuple[AccelerateField, ...] = (
    _dynamo("backend", "backend", lambda context: context.recipe.efficiency.compile.backend.upper(),
            lambda value: {f"{COMPILE}.enabled": True, f"{COMPILE}.backend": str(value).lower()} if value not in OFF
            else {},
            default="NO", aliases=("dynamo_backend",)),
    _dynamo("mode", "mode", lambda context: context.recipe.efficiency.compile.mode, plain(f"{COMPILE}.mode"),
            default="default"),
    _dynamo("use_dynamic", "dynamic", lambda context: bool(context.recipe.efficiency.compile.dynamic),
            plain(f"{COMPILE}.dynamic"), default=False, switch=True),
    _dynamo("use_regional_compilation", "scope", _by_blocks,
            lambda value: {f"{COMPILE}.scope": "blocks" if value else "model"}, default=False, switch=True),
    AccelerateField("dynamo_config.dynamo_use_fullgraph", default=False, variable="ACCELERATE_DYNAMO_USE_FULLGRAPH",
            switch=True),
)  # fmt: skip

# ---- FSDP: what FullyShardedDataParallelPlugin reads (accelerate, utils/dataclasses.py)

LAUNCHED = "accelerate launch's own default, whatever the launcher"
_SHARED = by_name(FIELDS)


def _is_version(number: int) -> Callable[[Context], bool]:
    return lambda context: shards(context) and setting(context, "strategy.version") == number


def _wraps(policy: str) -> Callable[[Context], bool]:
    return lambda context: shards(context) and setting(context, "strategy.auto_wrap") == policy


def _fsdp(
    name: str, encode: Encoder | None = None, default: Any = UNSET, variable: str = "", **more: Any
) -> AccelerateField:
    """A key that transformers' file has too, and what accelerate makes of it."""
    shared = _SHARED[name]
    return AccelerateField(
        f"fsdp_config.fsdp_{name}",
        shared.keys,
        encode or when(shards, shared.encode),
        shared.decode,
        default,
        variable=f"FSDP_{variable or name.upper()}",
        text=word,
        **more,
    )


def _first(name: str) -> AccelerateField:
    """A switch of version 1; its default is accelerate launch's own, which a script under torchrun would not have."""
    key, default = f"strategy.{name}", FIRST_VERSION[name]

    def value(context: Context) -> Any:
        found = setting(context, key)
        return default if found is None else found

    return _fsdp(name, when(_is_version(1), value), default, source=_or_launched(key))


def _or_launched(key: str) -> Callable[[Context], Source]:
    return lambda context: Source((key,), "" if context.resolved.given(key) else LAUNCHED)


def _loads_once(context: Context) -> bool:
    """Whether rank 0 alone loads; the others get its weights only where module states are sent."""
    chosen = setting(context, "strategy.cpu_ram_efficient_loading")
    return setting(context, "strategy.sync_module_states") is not False if chosen is None else chosen


FSDP: tuple[AccelerateField, ...] = (
    AccelerateField("use_fsdp", ("strategy.kind",), when(shards, fixed(True)), variable="ACCELERATE_USE_FSDP",
            text=word, in_file=fixed(False), switch=True),
    _fsdp("version", default=1),
    _fsdp("sharding_strategy", when(_is_version(1), lambda context: setting(context, "strategy.sharding").upper()),
          "FULL_SHARD"),
    _fsdp("reshard_after_forward",
          when(_is_version(2), lambda context: setting(context, "strategy.sharding") == "full_shard"), True),
    _fsdp("offload_params", default=False),
    _fsdp("auto_wrap_policy"),
    _fsdp("min_num_params", when(_wraps("size"), lambda context: setting(context, "strategy.min_params")),
          100_000_000),
    _fsdp("transformer_layer_cls_to_wrap",
          when(_wraps("transformer"), lambda context: ",".join(setting(context, "strategy.wrap_classes")) or UNSET),
          variable="TRANSFORMER_CLS_TO_WRAP"),
    _fsdp("state_dict_type"),
    _fsdp("backward_prefetch",
          when(_is_version(1), lambda context: (setting(context, "strategy.backward_prefetch") or "").upper() or UNSET),
          aliases=("fsdp_config.fsdp_backward_prefetch_policy",)),
    *map(_first, ("forward_prefetch", "use_orig_params", "sync_module_states")),
    _fsdp("cpu_ram_efficient_loading", when(shards, _loads_once), True,
          source=_or_launched("strategy.cpu_ram_efficient_loading")),
    _fsdp("activation_checkpointing", default=False),
    AccelerateField("fsdp_config.fsdp_activation_checkpointing_offload", default=False, since="1.15",
            variable="FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", text=word),
)  # fmt: skip

# ---- DeepSpeed: the plan gives it one file, because accelerate's own keys lose the paths and are errors beside a file


def _built_in_shards(context: Context) -> bool:
    """Whether `deepspeed.zero.Init` is for scripts that ask the plugin; a recipe says otherwise by the variable."""
    said = context.recipe.env.get(ZERO3_INIT)
    return context.recipe.strategy.kind == "zero3" and (said is None or str(said).lower() != "false")


def _offload(place: str) -> tuple[AccelerateField, AccelerateField]:
    """Where a state is kept: the recipe's path is for both."""
    start = f"deepspeed_config.offload_{place}"
    return (
        AccelerateField(f"{start}_device", decode=plain(f"strategy.offload_{place}", "none")),
        AccelerateField(f"{start}_nvme_path", decode=plain("strategy.nvme_path")),
    )


_DEEPSPEED: tuple[AccelerateField, ...] = (
    AccelerateField("use_deepspeed", ("strategy.kind",), when(is_zero, fixed(True)),
            variable="ACCELERATE_USE_DEEPSPEED", text=word, in_file=fixed(False), switch=True),
    AccelerateField("deepspeed_config.deepspeed_config_file", ("strategy.kind",),
            when(is_zero, fixed((Variable.RUN_DIR, f"/{DEEPSPEED}"))), variable="ACCELERATE_DEEPSPEED_CONFIG_FILE",
            in_file=fixed(False)),
    AccelerateField("deepspeed_config.zero3_init_flag", ("strategy.kind",),
            when(is_zero, _built_in_shards), variable=ZERO3_INIT, text=word),
    AccelerateField("deepspeed_config.deepspeed_multinode_launcher", (),
            when(lambda context: is_zero(context) and context.topology.nodes > 1, fixed("standard")),
            nothing_but("standard", "pdsh"),
            source=rule("accelerate would start the ranks with pdsh; this is torchrun on each node")),
    # Accelerator() lets this variable win over the argument that the script gives it.
    AccelerateField("deepspeed_config.gradient_accumulation_steps", ("batch.accumulation",),
            when(lambda context: on_accelerator(context) and bool(context.resolved.given("batch.accumulation")),
                  lambda context: context.batch.accumulation),
            plain("batch.accumulation", "auto", "none"), variable="ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
            in_file=fixed(False)),
    AccelerateField("deepspeed_config.zero_stage",
            decode=lambda value: kind_of(int(value) if str(value).isdecimal() else value)),
    AccelerateField("deepspeed_config.gradient_clipping", decode=plain("train.max_grad_norm", "auto", "none")),
    AccelerateField("deepspeed_config.zero3_save_16bit_model", decode=plain("strategy.gather_16bit")),
    *_offload("optimizer"),
    *_offload("param"),
    *(AccelerateField(f"deepspeed_config.deepspeed_{name}")
      for name in ("hostfile", "exclusion_filter", "inclusion_filter", "moe_layer_cls_names")),
)  # fmt: skip
SETTINGS: tuple[AccelerateField, ...] = (*_LAUNCH, *_COMPILATION, *FSDP, *_DEEPSPEED)
