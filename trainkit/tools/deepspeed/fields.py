"""The table of DeepSpeed's file: its fields, and for each what becomes of it in the file of each kind of program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple

from trainkit.launch_plan.context import Context
from trainkit.optimizers import OPTIMIZERS, optimizer
from trainkit.recipe.merge import value_at
from trainkit.recipe.schema import GptModel
from trainkit.tools.base.fields import UNSET, Field, Settings, Unsupported, boolean, is_set, same, setting

OPTIMIZER_KEYS = tuple(f"optimizer.{name}" for name in ("name", "lr", "weight_decay", "beta1", "beta2", "eps"))
SCHEDULE_KEYS = tuple(f"schedule.{name}" for name in ("name", "warmup_steps", "min_lr_ratio"))

ProgramKind = Literal["builtin", "hf", "deepspeed", "accelerate"]  # kinds of programs


class Policy(NamedTuple):
    """What becomes of a field in the file of one kind of program.

    write: whether it is written if the user has no file.
        always   the recipe's value is written
        if_set   only if a layer of the recipe sets it
        auto     the value if a layer sets it, else the word "auto", which the program replaces
        never    nothing is written
    user_file: which value counts if the user's file has one.
        must_agree      the recipe's; another value in the file is an error
        set_must_agree  the same if a layer of the recipe sets it, else the file's
        wins            the file's
    auto: what happens to an "auto" in the user's file.
        fill          the recipe's value replaces it
        fill_set      the same if a layer sets it, else it is an error
        fill_or_keep  the same if a layer sets it, else it stays
        keep          it stays
        refuse        it is an error
    beside: like `write`, if the user has a file that does not set the field; empty: as `write` says.
    described: whether this holds only if layers describe a section that DeepSpeed builds; else the file decides.
    """

    write: Literal["always", "if_set", "auto", "never"]
    user_file: Literal["must_agree", "set_must_agree", "wins"]
    auto: Literal["fill", "fill_set", "fill_or_keep", "keep", "refuse"]
    beside: Literal["", "if_set", "never"] = ""
    described: bool = False

    @property
    def keeps_auto(self) -> bool:
        """Whether an "auto" may stay, for the program to replace."""
        return self.auto in ("keep", "fill_or_keep")


RECIPE = Policy("always", "must_agree", "fill")  # the recipe decides it
COMPARED = Policy("never", "must_agree", "fill")  # the trainer does it by itself
DEFAULT = Policy("always", "set_must_agree", "fill")  # the file may say otherwise where no layer of the recipe speaks
TUNED = Policy("always", "wins", "fill")  # it decides speed alone
SET = Policy("if_set", "set_must_agree", "fill")
SET_ON_ENGINE = Policy("if_set", "set_must_agree", "fill_set")  # where nobody but the recipe replaces an "auto"
FILLED = Policy("if_set", "set_must_agree", "fill_or_keep")
AGREES = Policy("never", "set_must_agree", "keep")  # the program is told by itself
FILE_S = Policy("never", "wins", "refuse")  # the user's file alone says it
LEFT = Policy("never", "wins", "keep")


class Policies(NamedTuple):
    """The policy for each kind of program that reads the file: each fills and compares other keys by itself."""

    builtin: Policy
    hf: Policy  # transformers, integrations/deepspeed.py: HfTrainerDeepSpeedConfig
    deepspeed: Policy  # a script that calls deepspeed.initialize
    accelerate: Policy  # accelerate, accelerator.py: _prepare_deepspeed


EVERYWHERE: Final = Policies(RECIPE, RECIPE, RECIPE, RECIPE)
_ASKED = FILLED._replace(write="auto", beside="if_set")
_TOLD = AGREES._replace(write="auto", beside="never")
_SIZE = _ASKED._replace(auto="keep")
# With Accelerator() the batch is that of the script's DataLoader. On the engine itself nobody else says its sizes.
BATCH_POLICY: Final = Policies(RECIPE, _SIZE, SET._replace(write="always", beside="if_set"), _SIZE)
CLIPPING: Final = Policies(RECIPE, _TOLD, SET_ON_ENGINE, _ASKED)
FORMAT: Final = Policies(RECIPE, _TOLD, SET_ON_ENGINE, FILLED)
# accelerate's own where there is no file (utils/dataclasses.py: set_mixed_precision)
CASTING: Final = Policies(FILE_S, TUNED, FILE_S, TUNED)
_OURS = SET._replace(write="always", beside="if_set")
BUCKET: Final = Policies(_OURS, FILLED, SET_ON_ENGINE, FILLED)
OVERLAP: Final = Policies(_OURS, SET, SET_ON_ENGINE, SET)
OFFLOAD: Final = Policies(RECIPE, SET, SET_ON_ENGINE, SET)
GATHERING: Final = Policies(DEFAULT, FILLED, SET_ON_ENGINE, FILLED)
WIDTH: Final = Policies(TUNED, LEFT, FILE_S, LEFT)
# What is set to suit the built-in trainer; another program has DeepSpeed's default.
BUILTIN: Final = Policies(TUNED, FILE_S, FILE_S, FILE_S)
REQUIRED: Final = Policies(RECIPE, FILE_S, FILE_S, FILE_S)
UNTESTED: Final = Policies(TUNED, FILE_S, SET_ON_ENGINE, FILE_S)
ENGINE: Final = Policies(FILE_S, FILE_S, SET_ON_ENGINE, FILE_S)
# The built-in trainer and a script on Accelerator() make optimizer and schedule themselves; Trainer takes what the file
# describes in place of its own.
_MADE_OPTIMIZER, _MADE_SCHEDULE = DEFAULT._replace(described=True), RECIPE._replace(described=True)
TYPE: Final = Policies(COMPARED, FILE_S, _MADE_OPTIMIZER, FILE_S)
ARGUMENT: Final = Policies(COMPARED, AGREES, SET_ON_ENGINE, LEFT)
MOMENTS: Final = Policies(COMPARED, AGREES, SET_ON_ENGINE, FILE_S)
MOMENTUM: Final = Policies(COMPARED, FILE_S, SET_ON_ENGINE, FILE_S)
SWITCH: Final = Policies(COMPARED, FILE_S, SET_ON_ENGINE, FILE_S)
UNUSED: Final = Policies(COMPARED, FILE_S, FILE_S, FILE_S)
SCHEDULE: Final = Policies(COMPARED, FILE_S, _MADE_SCHEDULE, FILE_S)
LENGTH: Final = Policies(COMPARED, AGREES, _MADE_SCHEDULE, LEFT)
START: Final = Policies(COMPARED, LEFT, _MADE_SCHEDULE, LEFT)


@dataclass(frozen=True, slots=True)
class DeepSpeedField(Field):
    """A field of DeepSpeed's file.

    policies: what becomes of it, for each program. stages: of ZeRO, at which DeepSpeed has it.
    written: where it says no, the value is only compared with that of the user's file, or put in place of an "auto".
    """

    policies: Policies = EVERYWHERE
    stages: tuple[int, ...] = (1, 2, 3)
    written: Callable[[Context], bool] = lambda context: True


def same_value_field(name: str, key: str, policies: Policies, **more: Any) -> DeepSpeedField:
    """A field whose value is that of a setting."""
    encode, decode = same(key)
    return DeepSpeedField(name, (key,), encode, decode, policies=policies, **more)


def policy_of(row: DeepSpeedField, reader: ProgramKind, context: Context, *, whole: bool = False) -> Policy:
    """The policy for a program. whole: for a file that says what the recipe's defaults mean too, as an export does."""
    policy: Policy = getattr(row.policies, reader)
    own = row.policies.builtin
    if policy.described:
        return policy if is_made(context, row.name.partition(".")[0]) and row.written(context) else FILE_S
    if whole and policy.user_file == "set_must_agree" and policy.auto in ("fill", "fill_set"):
        return own._replace(beside="") if own.write == "always" and own.user_file != "wins" else policy
    return policy


def is_made(context: Context, section: str) -> bool:
    """Whether layers describe the section's object, for DeepSpeed to make; a constant rate needs no schedule."""
    if section == "optimizer":
        return is_set(context, *OPTIMIZER_KEYS)
    return is_set(context, *SCHEDULE_KEYS) and context.recipe.schedule.name != "constant"


ZERO = "zero_optimization"
OFFLOADS = ("offload_optimizer", "offload_param")


def offload(name: str, stages: tuple[int, ...], *aliases: str) -> tuple[DeepSpeedField, ...]:
    """Where a part lives, and its folder on a disk."""

    def device(context: Context) -> Any:
        return getattr(context.recipe.strategy, name, "none")

    return (
        DeepSpeedField(
            f"{ZERO}.{name}.device",
            (f"strategy.{name}",),
            device,
            same(f"strategy.{name}")[1],
            default="none",
            aliases=tuple(f"{ZERO}.{each}" for each in aliases),
            policies=OFFLOAD,
            stages=stages,
            written=lambda context: device(context) != "none",
        ),
        DeepSpeedField(
            f"{ZERO}.{name}.nvme_path",
            ("strategy.nvme_path",),
            lambda context: setting(context, "strategy.nvme_path") if _on_disk(context, name) else UNSET,
            same("strategy.nvme_path")[1],
            policies=OFFLOAD,
            stages=stages,
        ),
    )


def pinned(name: str, stages: tuple[int, ...]) -> DeepSpeedField:
    """Whether what lives in main memory is page-locked there: without it each copy to or from a GPU is made twice."""

    def encode(context: Context) -> Any:
        offloaded = getattr(context.recipe.strategy, name, "none") == "cpu"
        return True if offloaded and context.topology.device == "cuda" else UNSET

    keys = (f"strategy.{name}", "devices.type")
    return DeepSpeedField(f"{ZERO}.{name}.pin_memory", keys, encode, default=False, policies=BUILTIN, stages=stages)


def _on_disk(context: Context, *parts: str) -> bool:
    strategy = context.recipe.strategy
    swapped = any(getattr(strategy, part, "") == "nvme" for part in parts)
    return swapped and getattr(strategy, "nvme_path", None) is not None


def _of_swapping(name: str, value: Any, default: Any, *parts: str) -> DeepSpeedField:
    """How swapping to a disk is done: what would otherwise leave most models in memory, or the disk idle."""

    def encode(context: Context) -> Any:
        return value if _on_disk(context, *parts) else UNSET

    keys = tuple(f"strategy.{part}" for part in parts)
    return DeepSpeedField(name, keys, encode, default=default, policies=BUILTIN)


def _buffers(context: Context) -> int:
    """For weights, gradients and two moments; a class of the user's own, or an argument, may ask for one more."""
    chosen = context.recipe.optimizer
    # zero/offload_config.py: as many as there are states for each parameter
    return 5 if chosen.args or ":" in chosen.name else 4


SWAPPING = (
    DeepSpeedField(
        f"{ZERO}.offload_optimizer.buffer_count",
        ("optimizer.name",),
        lambda context: _buffers(context) if _on_disk(context, "offload_optimizer") else UNSET,
        default=4,
        policies=BUILTIN,
    ),
    # Otherwise the first 10^9 parameters of a rank would stay in memory, which is all of most models.
    _of_swapping(f"{ZERO}.offload_param.max_in_cpu", 0, 10**9, "offload_param"),
    # What is in memory at a time; DeepSpeed's 10^9 would be, again, all of most models.
    _of_swapping(f"{ZERO}.sub_group_size", 10**8, 10**9, *OFFLOADS),
    # A drive that is read in parallel is fast only with many requests at once; the others are written out to be seen.
    _of_swapping("aio.block_size", 2**20, 2**20, *OFFLOADS),
    _of_swapping("aio.queue_depth", 32, 8, *OFFLOADS),
    _of_swapping("aio.intra_op_parallelism", 1, 1, *OFFLOADS),
    _of_swapping("aio.single_submit", False, False, *OFFLOADS),
    _of_swapping("aio.overlap_events", True, True, *OFFLOADS),
)


TYPES: Mapping[str, str] = {
    **{known.deepspeed: name for name, known in OPTIMIZERS.items() if known.deepspeed},
    "Adam": "adamw_torch",  # which decouples weight decay too, unless adam_w_mode is false
}
SCHEDULERS: Mapping[str, str] = {
    "cosine": "WarmupCosineLR",
    "linear": "WarmupDecayLR",
    "constant": "WarmupLR",
    "constant_with_warmup": "WarmupLR",
}


def has_schedule(context: Context) -> bool:
    """Whether DeepSpeed has this schedule: of a known length, and a line only down to 0."""
    schedule = context.recipe.schedule
    if schedule.name not in SCHEDULERS:
        return False
    endless = schedule.name in ("linear", "cosine") and context.recipe.train.steps is None
    return not endless and not (schedule.name == "linear" and schedule.min_lr_ratio)


def _type(context: Context) -> str:
    name = context.recipe.optimizer.name
    return optimizer(name).deepspeed or ("AdamW" if "betas" in optimizer(name).arguments else name)


def _class(names: Mapping[str, str], key: str) -> Callable[[Any], Settings | Unsupported]:
    """A decoder of names of classes."""

    def decode(value: Any) -> Settings | Unsupported:
        known = isinstance(value, str) and value in names
        return {key: names[value]} if known else Unsupported("", f"use {', '.join(names)}")

    return decode


def _argument(name: str, key: str, policies: Policies, kind: str = "", **default: float) -> DeepSpeedField:
    """A number that the optimizer's class takes. kind: the only type that does; default: by type."""
    encode, decode = same(f"optimizer.{key}")
    return DeepSpeedField(
        f"optimizer.params.{name}",
        (f"optimizer.{key}",),
        lambda context: encode(context) if kind in ("", _type(context)) else UNSET,
        decode,
        default,
        policies=policies,
    )


def _betas(context: Context) -> Any:
    chosen = context.recipe.optimizer
    return [chosen.beta1, chosen.beta2] if _type(context) == "AdamW" else UNSET


def _two_moments(value: Any) -> Settings | Unsupported:
    if not isinstance(value, list) or len(value) != 2:
        return Unsupported("two numbers are expected", "write [0.9, 0.999]")
    return dict(zip(("optimizer.beta1", "optimizer.beta2"), value, strict=True))


def _adam_switch(name: str, policies: Policies, default: bool) -> DeepSpeedField:
    def of_adam(context: Context) -> Any:
        return True if _type(context) == "AdamW" else UNSET

    return DeepSpeedField(
        f"optimizer.params.{name}", ("optimizer.name",), of_adam, lambda value: {}, default, policies=policies
    )


def _constant(name: str, value: Any, default: Any, policies: Policies, *schedules: str) -> DeepSpeedField:
    """What all schedules of the recipe, or these, have in common."""
    return DeepSpeedField(
        f"scheduler.params.{name}",
        ("schedule.name",),
        lambda context: value if context.recipe.schedule.name in (schedules or SCHEDULERS) else UNSET,
        lambda found: {} if found == value else Unsupported(f"the recipe's warm-up has {name} {value}"),
        default,
        policies=policies,
    )


OPTIMIZER = (
    DeepSpeedField("optimizer.type", ("optimizer.name",), _type, _class(TYPES, "optimizer.name"), policies=TYPE),
    # FusedAdam and DeepSpeedCPUAdam decay nothing by default; torch_adam makes it torch.optim.AdamW
    _argument("lr", "lr", ARGUMENT, AdamW=1e-3, SGD=1e-3, torch=1e-3),
    _argument("weight_decay", "weight_decay", ARGUMENT, AdamW=0.0, SGD=0.0, torch=0.01),
    DeepSpeedField(
        "optimizer.params.betas",
        ("optimizer.beta1", "optimizer.beta2"),
        _betas,
        _two_moments,
        {"AdamW": [0.9, 0.999], "torch": [0.9, 0.999]},
        policies=MOMENTS,
    ),
    _argument("eps", "eps", MOMENTS, "AdamW", AdamW=1e-8, torch=1e-8),
    _adam_switch("torch_adam", SWITCH, default=False),
    _adam_switch("adam_w_mode", UNUSED, default=True),
    _argument("momentum", "beta1", MOMENTUM, "SGD", SGD=0.0),
)
SCHEDULER = (
    DeepSpeedField(
        "scheduler.type",
        ("schedule.name",),
        lambda context: SCHEDULERS.get(context.recipe.schedule.name, UNSET),
        _class({kind: name for name, kind in SCHEDULERS.items()}, "schedule.name"),
        policies=SCHEDULE,
    ),
    # DeepSpeed warms up along a logarithm, the recipe along a line
    _constant("warmup_type", "linear", "log", SCHEDULE),
    same_value_field("scheduler.params.warmup_num_steps", "schedule.warmup_steps", LENGTH, default=1000),
    same_value_field(
        "scheduler.params.total_num_steps",
        "train.steps",
        LENGTH,
        written=lambda context: context.recipe.schedule.name in ("linear", "cosine"),
    ),
    _constant("warmup_min_ratio", 0.0, 0.0, SCHEDULE, "cosine"),
    DeepSpeedField(
        "scheduler.params.cos_min_ratio",
        ("schedule.min_lr_ratio",),
        lambda context: context.recipe.schedule.min_lr_ratio if context.recipe.schedule.name == "cosine" else UNSET,
        same("schedule.min_lr_ratio")[1],
        1e-4,
        policies=SCHEDULE,
    ),
    _constant("warmup_min_lr", 0.0, 0.0, START, "linear", "constant", "constant_with_warmup"),
    same_value_field(
        "scheduler.params.warmup_max_lr",
        "optimizer.lr",
        LENGTH,
        # else DeepSpeed takes the optimizer's
        written=lambda context: context.recipe.schedule.name != "cosine" and is_set(context, "optimizer.lr"),
    ),
)


FILE = "deepspeed.json"  # in the run directory, and as an export
# Whether scripts that ask accelerate's plugin build models of stage 3 in shards (DeepSpeedPlugin.__post_init__).
ZERO3_INIT = "ACCELERATE_DEEPSPEED_ZERO3_INIT"
AUTO = "auto"  # in files for transformers and accelerate: take it from the training settings
STAGE = f"{ZERO}.stage"
STAGES: Mapping[str, int] = {"zero0": 0, "zero1": 1, "zero2": 2, "zero3": 3}
KINDS: Mapping[int, str] = {stage: kind for kind, stage in STAGES.items()}
SILENT = 10**6  # steps: files say such numbers where DeepSpeed is to print nothing


def elements(mebibytes: float, dtype: str) -> int:
    """The size of a bucket as DeepSpeed counts it, for values in this format."""
    return int(mebibytes * 2**20) // (4 if dtype == "fp32" else 2)


def mebibytes(elements: float, dtype: str) -> float:
    """The size of a bucket as a recipe counts it."""
    return elements * (4 if dtype == "fp32" else 2) / 2**20


def _switch(name: str, key: str, policies: Policies, **more: Any) -> DeepSpeedField:
    """A field that is true or false; other values, as "auto", are left where they are."""
    return replace(same_value_field(name, key, policies, **more), decode=boolean(key))


def _format(dtype: str, *aliases: str) -> DeepSpeedField:
    def is_chosen(context: Context) -> bool:
        return context.dtype == dtype

    decode = boolean("precision.dtype", dtype, UNSET)
    columns: dict[str, Any] = {"default": False, "aliases": aliases, "policies": FORMAT, "written": is_chosen}
    return DeepSpeedField(f"{dtype}.enabled", ("precision.dtype",), is_chosen, decode, **columns)


def kind_of(value: Any) -> Settings | Unsupported:
    """The strategy of a stage of ZeRO."""
    if type(value) is not int or value not in KINDS:
        return Unsupported("", "write 0, 1, 2 or 3")
    return {"strategy.kind": KINDS[value]}


def _has_file(context: Context) -> bool:
    return "strategy.config" in context.resolved.attachments


def _bucket(name: str, policies: Policies, stages: tuple[int, ...]) -> DeepSpeedField:
    """The decoder needs the number format: see `mebibytes`."""
    return DeepSpeedField(
        f"{ZERO}.{name}",
        ("strategy.bucket_mb",),
        lambda context: (
            elements(setting(context, "strategy.bucket_mb"), context.dtype)
            if STAGES[context.recipe.strategy.kind]
            else UNSET
        ),
        default=500_000_000,
        policies=policies,
        stages=stages,
        written=lambda context: STAGES[context.recipe.strategy.kind] in stages,
    )


def _of_width(name: str, encode: Callable[[int], int], default: int) -> DeepSpeedField:
    """What transformers puts in place of an "auto" at stage 3 (integrations/deepspeed.py)."""

    def of_model(context: Context) -> Any:
        model = context.recipe.model  # the width of others is in a configuration that no plan reads
        return encode(model.hidden_size) if isinstance(model, GptModel) else UNSET

    keys = ("model.hidden_size",)
    return DeepSpeedField(
        f"{ZERO}.{name}", keys, of_model, default=default, policies=WIDTH, written=lambda context: False
    )


def _steps(value: Any) -> Settings:
    # JSON has no infinity; Python writes and reads it as a bare word, other tools as a text.
    silent = value in ("inf", "Infinity") or (isinstance(value, int | float) and value >= SILENT)
    return {} if silent else _whole("logging.every_steps")(value)


def _whole(key: str) -> Callable[[Any], Settings]:
    """The decoder of a number of things, which a file may write as 1e5."""
    return lambda value: {key: int(value) if isinstance(value, float) and value.is_integer() else value}


def _side(name: str) -> Callable[[Context], Any]:
    """A side of the batch; one that nobody gave is the script's own."""

    def encode(context: Context) -> Any:
        size = getattr(context.batch, "global_" if name == "global" else name)
        return UNSET if size is None else size

    return encode


BATCH = tuple(
    DeepSpeedField(name, (f"batch.{side}",), _side(side), _whole(f"batch.{side}"), default, policies=BATCH_POLICY)
    for name, side, default in (
        ("train_batch_size", "global", UNSET),
        ("train_micro_batch_size_per_gpu", "micro", UNSET),
        # Trainer and Accelerator() take 1 (accelerate, utils/dataclasses.py), DeepSpeed what follows from the others.
        ("gradient_accumulation_steps", "accumulation", 1),
    )
)
FORMATS = (_format("bf16", "bfloat16.enabled"), _format("fp16"))
BUCKETS = (
    _bucket("reduce_bucket_size", BUCKET, (1, 2, 3)),
    _bucket("allgather_bucket_size", OVERLAP, (1, 2)),
)
_ZERO = (
    DeepSpeedField(
        STAGE,
        ("strategy.kind",),
        lambda context: STAGES[context.recipe.strategy.kind],
        kind_of,
        default=0,
        stages=(0, 1, 2, 3),
        # a file that says nothing of ZeRO has DeepSpeed's default
        written=lambda context: context.recipe.strategy.kind != "zero0" or not _has_file(context),
    ),
    *BUCKETS,
    # DeepSpeed's default is true at stage 3
    _switch(f"{ZERO}.overlap_comm", "strategy.overlap_comm", OVERLAP, default=None),
    *offload("offload_optimizer", (1, 2, 3), "cpu_offload"),
    pinned("offload_optimizer", (1, 2, 3)),
    # The optimizer stays the one that the recipe names; DeepSpeed's own is not forced on it.
    DeepSpeedField(
        "zero_force_ds_cpu_optimizer",
        ("optimizer.name", "strategy.offload_optimizer"),
        lambda context: False if setting(context, "strategy.offload_optimizer") not in ("none", UNSET) else UNSET,
        default=True,
        policies=REQUIRED,
    ),
    *offload("offload_param", (3,), "cpu_offload_param", "cpu_offload_params"),
    pinned("offload_param", (3,)),
    _switch(
        f"{ZERO}.stage3_gather_16bit_weights_on_model_save",
        "strategy.gather_16bit",
        GATHERING,
        default=False,
        stages=(3,),
        written=lambda context: setting(context, "strategy.gather_16bit") is True,
    ),
)
# In the order in which a file is written.
FIELDS: tuple[DeepSpeedField, ...] = (
    *BATCH,
    # 0 before DeepSpeed 0.19.3
    same_value_field("gradient_clipping", "train.max_grad_norm", CLIPPING, default=1.0),
    *FORMATS,
    DeepSpeedField(
        "fp16.auto_cast",
        encode=lambda context: context.dtype == "fp16" or UNSET,
        default=False,
        policies=CASTING,
        written=lambda context: not _has_file(context),
    ),
    # Micro steps add up in fp32 under every strategy of the built-in trainer.
    DeepSpeedField(
        "data_types.grad_accum_dtype",
        ("precision.dtype",),
        lambda context: "fp32",
        default=None,
        policies=BUILTIN,
        written=lambda context: context.dtype != "fp32",
    ),
    *_ZERO,
    *SWAPPING,
    _of_width("stage3_prefetch_bucket_size", lambda width: int(0.9 * width * width), 50_000_000),
    _of_width("stage3_param_persistence_threshold", lambda width: 10 * width, 100_000),
    # DeepSpeed's list has torch's AdamW only.
    DeepSpeedField(
        "zero_allow_untested_optimizer",
        ("optimizer.name",),
        lambda context: True,
        default=False,
        policies=UNTESTED,
        written=lambda context: not context.recipe.optimizer.name.startswith("adamw_torch"),
    ),
    *OPTIMIZER,
    DeepSpeedField(
        "steps_per_print",
        ("logging.every_steps",),
        lambda context: context.recipe.logging.every_steps,
        _steps,
        policies=ENGINE,
    ),
    *SCHEDULER,
    # Elsewhere the trainer writes the metrics.
    DeepSpeedField("steps_per_print", ("logging.every_steps",), lambda context: 2**31 - 1, _steps, policies=BUILTIN),
    # It waits for the device twice in each micro step (deepspeed/utils/timer.py: ThroughputTimer).
    DeepSpeedField("timers.throughput.enabled", (), lambda context: False, default=True, policies=BUILTIN),
)
ROWS: Mapping[str, DeepSpeedField] = {name: row for row in reversed(FIELDS) for name in (*row.aliases, row.name)}
# Names of DeepSpeed's first versions, which it refuses beside today's -> what to write.
OUTDATED: Mapping[str, str] = {
    **{old.removesuffix(".enabled"): row.name.removesuffix(".enabled") for row in FIELDS for old in row.aliases},
    f"{ZERO}.cpu_offload_use_pin_memory": "pin_memory in the section of what is offloaded",
}
# Beside the new name, which accelerate adds to every file, DeepSpeed reads no old one (precision_config.py).
NEW_NAMES_ONLY: Mapping[str, str] = {"bfloat16": "bf16"}
# Settings that reach a script on DeepSpeed's own engine.
CARRIED: frozenset[str] = frozenset(
    key
    for row in FIELDS
    if row.policies.deepspeed.write != "never"
    for key in row.keys
    if not key.startswith("strategy.")
)
# Settings of a strategy that the file carries, apart from its kind.
STRATEGY_KEYS = tuple(dict.fromkeys(key for row in FIELDS for key in row.keys if key.startswith("strategy.")))[1:]


def faults(tree: Any) -> Iterator[tuple[str, str, str]]:
    """Key by key, what a recipe has no setting for: what is wrong, and what to write."""
    swapped = [f"{ZERO}.{name}.nvme_path" for name in OFFLOADS if value_at(tree, f"{ZERO}.{name}.device") == "nvme"]
    if len({str(path) for key in swapped if (path := value_at(tree, key)) is not None}) > 1:
        what = "optimizer state and parameters are swapped to different folders"
        yield swapped[0], what, "write one path; each run swaps to folders of its own below it"


def formats(tree: Any) -> tuple[str, ...]:
    """The 16-bit formats that the file enables."""
    rows = {row.name.partition(".")[0]: (row.name, *row.aliases) for row in FORMATS}
    return tuple(name for name, keys in rows.items() if any(value_at(tree, key) is True for key in keys))


def leaves_open(tree: Any) -> bool:
    """Whether the number format is taken from the program's own settings: an auto, or nothing that says it."""
    said = [value_at(tree, name) for row in FORMATS for name in (row.name, *row.aliases)]
    return AUTO in said or all(each is None for each in said)


def data_parallel_ranks(tree: Any, ranks: int) -> int:
    """How many ranks have data of their own: those of a sequence share theirs (deepspeed/runtime/config.py)."""
    size = value_at(tree, "sequence_parallel_size")
    return max(ranks // size, 1) if type(size) is int and size > 0 else ranks


def sharding(tree: Any, stage: int) -> Iterator[tuple[str, str, Any]]:
    """What the file says and a strategy of this stage has a setting for, apart from sizes: setting, key and value."""
    seen = {"strategy.kind"}  # of two folders for one setting, the second is a disagreement with the file
    for row in FIELDS:
        section, _, last = row.name.rpartition(".")
        unused = last == "nvme_path" and value_at(tree, f"{section}.device") != "nvme"
        value = value_at(tree, row.name)
        if value is None or unused or stage not in row.stages or not section.startswith(ZERO):
            continue
        found = row.decode(value)
        if isinstance(found, Unsupported) or seen >= found.keys():
            continue
        seen |= found.keys()
        yield from ((name, row.name, each) for name, each in found.items())
