"""DeepSpeed's configuration file as one table: which key says the same as which setting of the recipe.

Keys and defaults are those of DeepSpeed 0.19.8: deepspeed/runtime/config.py, precision_config.py, zero/config.py,
zero/offload_config.py, lr_schedules.py, and https://www.deepspeed.ai/docs/config-json/.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from trainkit.frameworks.base.fields import UNSET, Settings, Unsupported, boolean, setting
from trainkit.frameworks.deepspeed import readers
from trainkit.frameworks.deepspeed.offloading import OFFLOADS, SWAPPING, ZERO, offload, pinned
from trainkit.frameworks.deepspeed.optimizer import OPTIMIZER, SCHEDULER
from trainkit.frameworks.deepspeed.readers import REACHES, Row, Rules, same_row
from trainkit.plan.context import Context
from trainkit.recipe.layers.merge import value_at
from trainkit.recipe.schema import GptModel

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


def _switch(name: str, key: str, rules: Rules, **more: Any) -> Row:
    """A field that is true or false; other values, as "auto", are left where they are."""
    return replace(same_row(name, key, rules, **more), decode=boolean(key))


def _format(dtype: str, *aliases: str) -> Row:
    def is_chosen(context: Context) -> bool:
        return context.dtype == dtype

    decode = boolean("precision.dtype", dtype, UNSET)
    columns: dict[str, Any] = {"default": False, "aliases": aliases, "rules": readers.FORMAT, "written": is_chosen}
    return Row(f"{dtype}.enabled", ("precision.dtype",), is_chosen, decode, **columns)


def kind_of(value: Any) -> Settings | Unsupported:
    """The strategy of a stage of ZeRO."""
    if type(value) is not int or value not in KINDS:
        return Unsupported("", "write 0, 1, 2 or 3")
    return {"strategy.kind": KINDS[value]}


def _has_file(context: Context) -> bool:
    return "strategy.config" in context.resolved.attachments


def _bucket(name: str, rules: Rules, stages: tuple[int, ...]) -> Row:
    """The decoder needs the number format: see `mebibytes`."""
    return Row(
        f"{ZERO}.{name}",
        ("strategy.bucket_mb",),
        lambda context: (
            elements(setting(context, "strategy.bucket_mb"), context.dtype)
            if STAGES[context.recipe.strategy.kind]
            else UNSET
        ),
        default=500_000_000,
        rules=rules,
        stages=stages,
        written=lambda context: STAGES[context.recipe.strategy.kind] in stages,
    )


def _of_width(name: str, encode: Callable[[int], int], default: int) -> Row:
    """What transformers puts in place of an "auto" at stage 3 (integrations/deepspeed.py)."""

    def of_model(context: Context) -> Any:
        model = context.recipe.model  # the width of others is in a configuration that no plan reads
        return encode(model.hidden_size) if isinstance(model, GptModel) else UNSET

    keys = ("model.hidden_size",)
    return Row(f"{ZERO}.{name}", keys, of_model, default=default, rules=readers.WIDTH, written=lambda context: False)


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
    Row(name, (f"batch.{side}",), _side(side), _whole(f"batch.{side}"), default, rules=readers.BATCH)
    for name, side, default in (
        ("train_batch_size", "global", UNSET),
        ("train_micro_batch_size_per_gpu", "micro", UNSET),
        # Trainer and Accelerator() take 1 (accelerate, utils/dataclasses.py), DeepSpeed what follows from the others.
        ("gradient_accumulation_steps", "accumulation", 1),
    )
)
FORMATS = (_format("bf16", "bfloat16.enabled"), _format("fp16"))
BUCKETS = (
    _bucket("reduce_bucket_size", readers.BUCKET, (1, 2, 3)),
    _bucket("allgather_bucket_size", readers.OVERLAP, (1, 2)),
)
_ZERO = (
    Row(
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
    _switch(f"{ZERO}.overlap_comm", "strategy.overlap_comm", readers.OVERLAP, default=None),
    *offload("offload_optimizer", (1, 2, 3), "cpu_offload"),
    pinned("offload_optimizer", (1, 2, 3)),
    # The optimizer stays the one that the recipe names; DeepSpeed's own is not forced on it.
    Row(
        "zero_force_ds_cpu_optimizer",
        ("optimizer.name", "strategy.offload_optimizer"),
        lambda context: False if setting(context, "strategy.offload_optimizer") not in ("none", UNSET) else UNSET,
        default=True,
        rules=readers.REQUIRED,
    ),
    *offload("offload_param", (3,), "cpu_offload_param", "cpu_offload_params"),
    pinned("offload_param", (3,)),
    _switch(
        f"{ZERO}.stage3_gather_16bit_weights_on_model_save",
        "strategy.gather_16bit",
        readers.GATHERING,
        default=False,
        stages=(3,),
        written=lambda context: setting(context, "strategy.gather_16bit") is True,
    ),
)
# In the order in which a file is written.
FIELDS: tuple[Row, ...] = (
    *BATCH,
    # 0 before DeepSpeed 0.19.3
    same_row("gradient_clipping", "train.max_grad_norm", readers.CLIPPING, default=1.0),
    *FORMATS,
    Row(
        "fp16.auto_cast",
        encode=lambda context: context.dtype == "fp16" or UNSET,
        default=False,
        rules=readers.CASTING,
        written=lambda context: not _has_file(context),
    ),
    # Micro steps add up in fp32 under every strategy of the built-in trainer.
    Row(
        "data_types.grad_accum_dtype",
        ("precision.dtype",),
        lambda context: "fp32",
        default=None,
        rules=readers.BUILTIN,
        written=lambda context: context.dtype != "fp32",
    ),
    *_ZERO,
    *SWAPPING,
    _of_width("stage3_prefetch_bucket_size", lambda width: int(0.9 * width * width), 50_000_000),
    _of_width("stage3_param_persistence_threshold", lambda width: 10 * width, 100_000),
    # DeepSpeed's list has torch's AdamW only.
    Row(
        "zero_allow_untested_optimizer",
        ("optimizer.name",),
        lambda context: True,
        default=False,
        rules=readers.UNTESTED,
        written=lambda context: not context.recipe.optimizer.name.startswith("adamw_torch"),
    ),
    *OPTIMIZER,
    Row(
        "steps_per_print",
        ("logging.every_steps",),
        lambda context: context.recipe.logging.every_steps,
        _steps,
        rules=readers.ENGINE,
    ),
    *SCHEDULER,
    # Elsewhere the trainer writes the metrics.
    Row("steps_per_print", ("logging.every_steps",), lambda context: 2**31 - 1, _steps, rules=readers.BUILTIN),
    # It waits for the device twice in each micro step (deepspeed/utils/timer.py: ThroughputTimer).
    Row("timers.throughput.enabled", (), lambda context: False, default=True, rules=readers.BUILTIN),
)
ROWS: Mapping[str, Row] = {name: row for row in reversed(FIELDS) for name in (*row.aliases, row.name)}
# Names of DeepSpeed's first versions, which it refuses beside today's -> what to write.
OUTDATED: Mapping[str, str] = {
    **{old.removesuffix(".enabled"): row.name.removesuffix(".enabled") for row in FIELDS for old in row.aliases},
    f"{ZERO}.cpu_offload_use_pin_memory": "pin_memory in the section of what is offloaded",
}
# Beside the new name, which accelerate adds to every file, DeepSpeed reads no old one (precision_config.py).
NEW_NAMES_ONLY: Mapping[str, str] = {"bfloat16": "bf16"}
# Settings that reach a script on DeepSpeed's own engine.
CARRIED: frozenset[str] = frozenset(
    key for row in FIELDS if row.rules.deepspeed in REACHES for key in row.keys if not key.startswith("strategy.")
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
