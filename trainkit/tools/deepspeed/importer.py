"""Read a DeepSpeed file into a recipe: its fields as keys, or as a base file that stays as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainkit.batch import Sides, solve
from trainkit.errors import Origin, RecipeError, UsageError
from trainkit.recipe.assignment import Assignment
from trainkit.recipe.interpolation import interpolated
from trainkit.recipe.merge import value_at
from trainkit.recipe.paths import absolute
from trainkit.recipe.schema import Optimizer
from trainkit.tools.base import trainer_files
from trainkit.tools.base.detection import program_kind
from trainkit.tools.base.fields import Unsupported
from trainkit.tools.base.imported_recipe import ForeignFile, ImportContext, ImportedRecipe, read_mapping
from trainkit.tools.deepspeed.config import leaves
from trainkit.tools.deepspeed.fields import (
    AUTO,
    BATCH,
    BUCKETS,
    FIELDS,
    KINDS,
    OFFLOADS,
    OUTDATED,
    ROWS,
    STAGE,
    ZERO,
    DeepSpeedField,
    faults,
    formats,
    mebibytes,
    sharding,
)

STAGES = "write 0, 1, 2 or 3"


def stage_of(tree: Mapping[str, Any]) -> Any:
    """The stage of ZeRO that DeepSpeed reads in a file: 0 where there is none; any other value is an error of its own.

    deepspeed/runtime/zero/config.py: get_zero_config, which takes the switch of the first versions too.
    """
    if isinstance(tree.get(ZERO), bool):
        return int(tree[ZERO])
    found = value_at(tree, STAGE)
    return 0 if found is None else found


def use_as_base(draft: ImportedRecipe, context: ImportContext, path: str, origin: Origin) -> ForeignFile | None:
    """Set strategy and base file; the file that was read, or None and a problem in the draft."""
    if interpolated(path):
        hint = "give its value with --set NAME=VALUE: the stage of ZeRO stands in the file"
        draft.fail(f"the DeepSpeed file is named by a variable: {path}", origin, hint)
        return None
    try:
        file = read_mapping(context, path, f"file {path}", 1)
    except UsageError as error:
        for each in error.diagnostics:
            draft.fail(each.what, origin, each.hint)
        return None
    except RecipeError as error:
        draft.problems += error.diagnostics
        return None
    stage, zero = stage_of(file.tree), file.tree.get(ZERO)
    if not (zero is None or isinstance(zero, Mapping | bool)):
        draft.fail(f"{ZERO} is {zero!r}", file.at(ZERO), 'write {"stage": 1}, or the stage that is meant')
    elif type(stage) is not int or stage not in KINDS:
        draft.fail(f"{STAGE} is {stage!r}", file.at(STAGE), STAGES)
    else:
        says = stage or value_at(file.tree, STAGE) == 0
        reason = "" if says else f"{path} says no ZeRO stage: nothing is partitioned"
        draft.set("strategy.kind", KINDS[stage], origin, reason)
        draft.set("strategy.config", absolute(path, context.cwd), origin)
        return file
    return None


_DEEPSPEEDS = "the file does not say how gradients are exchanged: these are DeepSpeed's defaults"
# Names at the top of DeepSpeed's files (deepspeed/runtime/config.py, constants.py, and the configs of its parts).
KNOWN = {name.partition(".")[0] for name in ROWS} | {
    *("activation_checkpointing", "amp", "autotuning", "checkpoint", "comms_logger", "communication_data_type"),
    *("compile", "compression_training", "csv_monitor", "curriculum_learning", "data_efficiency", "data_types"),
    *("dataloader_drop_last", "disable_allgather", "dump_state", "eigenvalue", "elasticity", "flops_profiler"),
    *("fp32_allreduce", "gradient_accumulation_dtype", "gradient_predivide_factor", "graph_harvesting"),
    *("hybrid_engine", "load_universal_checkpoint", "memory_breakdown", "pipeline", "prescale_gradients"),
    *("progressive_layer_drop", "quantize_training", "seq_parallel_communication_data_type", "sparse_attention"),
    *("sparse_gradients", "tensor_parallel", "tensorboard", "torch_autocast", "use_data_before_expert_parallelism"),
    *("use_node_local_storage", "wall_clock_breakdown", "wandb", "weight_quantization"),
}  # fmt: skip
# Those that other tools have too; DeepSpeed's are mappings with this key.
_SHARED = {"bf16": "enabled", "fp16": "enabled", "optimizer": "type", "scheduler": "type", "amp": "enabled"}
_COMMON = {*_SHARED, "checkpoint", "compile", "gradient_accumulation_steps", "pipeline", "tensorboard", "wandb"}


COMMAND = ""  # a program reads the file


def likeness(tree: Mapping[str, Any]) -> float:
    """The share of keys that are DeepSpeed's; accelerate's files have one of the name deepspeed_config instead."""
    by_form = [name for name, key in _SHARED.items() if isinstance(tree.get(name), Mapping) and key in tree[name]]
    return trainer_files.likeness(tree, KNOWN, {*KNOWN - _COMMON, *by_form}, 1)


def read(draft: ImportedRecipe, context: ImportContext, source: ForeignFile) -> None:
    """The base of a program's file; without one, settings for the built-in trainer, and the file for what is left."""
    if not source.program:
        take_apart(draft, context, source)
        if draft.get("strategy.config") is None and not draft.problems:
            _silent_sizes(draft, source)
        return
    # It is the program's, which gets it as it is.
    found = program_kind(context, source.program, "deepspeed")
    draft.set("program.kind", found.kind, source.at(""))
    use_as_base(draft, context, source.path, source.at(""))


def take_apart(draft: ImportedRecipe, context: ImportContext, source: ForeignFile) -> None:
    """Each key that has a setting of the built-in trainer's; the file stays the base for the others."""
    if not isinstance(source.tree.get(ZERO, {}), Mapping):
        hint = 'write {"stage": 1}, or the stage that is meant'
        draft.fail(f"{ZERO} is {source.tree[ZERO]!r}, as DeepSpeed's first versions had it", source.at(ZERO), hint)
        return
    stage = stage_of(source.tree)
    entries = Entries(draft, source, stage)
    if type(stage) is not int or stage not in KINDS:
        draft.fail(f"{STAGE} is {stage!r}", source.at(STAGE), STAGES)
        entries.stage = 1
    elif stage:
        draft.set("strategy.kind", KINDS[stage], source.at(STAGE))
    else:
        where = "says no ZeRO stage" if value_at(source.tree, STAGE) is None else "has ZeRO stage 0"
        draft.set("strategy.kind", "ddp", source.at(STAGE), f"the file {where}: plain data parallelism")
    for read_part in (_strategy, _batch, _plain, _optimizer, _schedule):
        read_part(entries)
    for row in FIELDS:
        entries.take(row)
    _defaults(entries)
    autos = [key for key, value in leaves(source.tree) if value == AUTO]
    if autos:
        draft.remark(f'"auto", which Trainer of transformers fills from its own arguments: {", ".join(autos)}.')
    left = [key for key, _ in leaves(source.tree) if key not in entries.read and key not in autos]
    if left:
        _keep_as_base(entries, absolute(source.path, context.cwd), ", ".join(left))


def _strategy(entries: Entries) -> None:
    entries.skipped.add(ZERO)
    entries.read.add(STAGE)
    if not (stage := entries.stage):
        return
    for setting, key, value in sharding(entries.source.tree, stage):
        entries.read.add(key)
        if value != "none":
            entries.put(key, setting, value)
    for name in OFFLOADS:
        row = ROWS[f"{ZERO}.{name}.device"]
        entries.read.add(f"{ZERO}.{name}.nvme_path")
        if entries.get(row.name) in (None, "none"):
            entries.read.add(row.name)
        elif stage not in row.stages:
            _contradicted(entries, f"{ZERO}.{name}")
        for old in row.aliases:
            if entries.get(old) is True and stage in row.stages:
                entries.put(old, row.keys[0], "cpu", f"{old.rpartition('.')[2]} is today {name}: {{device: cpu}}")
            elif entries.get(old) is True:
                _contradicted(entries, old)
            elif entries.get(old) is False:
                entries.read.add(old)
    for key, what, hint in faults(entries.source.tree):
        entries.draft.fail(what, entries.source.at(key), hint)
    _buckets(entries)


def _contradicted(entries: Entries, section: str) -> None:
    entries.draft.remark(
        f"{entries.source.at(section).place}: parameters can be offloaded at ZeRO stage 3 only, and the stage is "
        f"{entries.stage}: nothing of {section} is taken over."
    )
    entries.read |= {key for key, _ in leaves(entries.source.tree) if f"{key}.".startswith(f"{section}.")}
    entries.obstacles.append((section, f"{section} is for ZeRO stage 3", f"remove {section}, or set {STAGE} to 3"))


def _buckets(entries: Entries) -> None:
    """One size for all buckets that the stage has; in bytes, which an "auto" number format leaves open."""
    names = [row.name for row in BUCKETS if entries.stage in row.stages]
    sizes = [entries.get(name) for name in names]
    if AUTO in (entries.get("fp16.enabled"), entries.get("bf16.enabled")) or len({str(size) for size in sizes}) > 1:
        return
    if isinstance(sizes[0], int | float):
        dtype = next(iter(formats(entries.source.tree)), "fp32")  # in which values are exchanged
        entries.put(names[0], "strategy.bucket_mb", mebibytes(sizes[0], dtype))
        entries.read |= {row.name for row in BUCKETS if row.name in names}


def _silent_sizes(draft: ImportedRecipe, source: ForeignFile) -> None:
    """What DeepSpeed takes of the exchange where the file is silent and does not stay the base, which would be too."""
    stage, dtype = stage_of(source.tree), next(iter(formats(source.tree)), "fp32")
    if stage and not any(value_at(source.tree, row.name) for row in BUCKETS):
        draft.set("strategy.bucket_mb", mebibytes(BUCKETS[0].default, dtype), source.at(""), _DEEPSPEEDS)
    if stage == 3 and value_at(source.tree, f"{ZERO}.overlap_comm") is None:
        draft.set("strategy.overlap_comm", True, source.at(""), _DEEPSPEEDS)


def _batch(entries: Entries) -> None:
    """Two of the three sizes: the third follows from the number of ranks."""
    total, micro, accumulation = (entries.get(row.name) for row in BATCH)
    if type(total) is int and total == micro and accumulation in (None, 1):
        reason = f"train_batch_size {total} is the micro batch: one rank"
        entries.draft.set("nodes.processes_per_node", 1, entries.source.at(BATCH[0].name), reason)
    if not all(type(size) is int and size > 0 for size in (total, micro, accumulation)):
        return
    entries.skipped.add(BATCH[2].name)
    entries.read.add(BATCH[2].name)
    solved = solve(Sides(total, micro, accumulation))
    if solved is None:
        what = f"train_batch_size {total} is not {micro} x {accumulation} x a number of ranks"
        hint = "bring the three into line, or leave one of them out"
        entries.draft.fail(what, entries.source.at(BATCH[0].name), hint)
    else:
        text = f"gradient_accumulation_steps {accumulation} follows from the other two with {solved.ranks} ranks."
        entries.draft.remark(text)


def _plain(entries: Entries) -> None:
    """What single keys mean beside their settings."""
    draft, source = entries.draft, entries.source
    if len(formats(source.tree)) > 1:
        draft.fail("bf16 and fp16 are both enabled", source.at("fp16.enabled"), "enable one of them")
    every = entries.get("steps_per_print")
    if every not in (None, AUTO) and ROWS["steps_per_print"].decode(every) == {}:
        draft.remark(f"steps_per_print {every} prints nothing; a recipe writes a metrics line every few steps.")
    section = "activation_checkpointing"
    if entries.get(section) is not None:
        entries.read |= {key for key, _ in leaves(source.tree) if key.startswith(f"{section}.")}
        draft.remark("The built-in trainer does not call DeepSpeed's activation_checkpointing: see "
                     "efficiency.gradient_checkpointing.")  # fmt: skip
        entries.obstacles.append((section, f"{section} does nothing", "remove it from the file"))


def _keep_as_base(entries: Entries, path: str, left: str) -> None:
    draft, source = entries.draft, entries.source
    if not entries.stage:
        draft.remark(f"Without ZeRO there is no DeepSpeed engine; not taken over: {left}.")
        return
    for key, instead in OUTDATED.items():
        if entries.get(key) is not None:
            entries.obstacles.append((key, f"{key} is a name that DeepSpeed has replaced", f"write {instead}"))
    forced = "zero_force_ds_cpu_optimizer"
    if entries.get(forced) is True and draft.get("strategy.offload_optimizer") not in (None, "none"):
        what = f"{forced} is true, and the built-in trainer steps with an optimizer of its own"
        entries.obstacles.append((forced, what, "remove it, or name your program behind `--`"))
    if entries.obstacles:
        key, what, hint = entries.obstacles[0]
        draft.fail(f"{what}, and the file is needed as base for {left}", source.at(key), hint)
        return
    reason = f"base of the generated file, for what the recipe has no key of: {left}"
    draft.put_checked(Assignment("strategy.config", path, source.at("")), reason)


def _optimizer(entries: Entries) -> None:
    kind, params = entries.get("optimizer.type"), "optimizer.params"
    if not entries.has_counterpart("optimizer.type"):
        return
    if kind == "Adam" and entries.get(f"{params}.adam_w_mode") is False:
        hint = "use AdamW or SGD, or remove the section and choose optimizer.name in the recipe"
        where = entries.source.at(f"{params}.adam_w_mode")
        entries.draft.fail("Adam with adam_w_mode false has no counterpart in the recipe", where, hint)
    elif kind == "Adam":
        entries.reasons["optimizer.type"] = "DeepSpeed's Adam decouples weight decay, unless adam_w_mode is false"
    if kind == "SGD" and entries.get("zero_allow_untested_optimizer") is True:
        entries.read.add("zero_allow_untested_optimizer")  # which the plan says by itself


def _schedule(entries: Entries) -> None:
    kind, params = entries.get("scheduler.type"), "scheduler.params"
    if not entries.has_counterpart("scheduler.type"):
        return
    if kind != "WarmupCosineLR" and entries.get(f"{params}.warmup_type") in (None, "log"):
        entries.read.add(f"{params}.warmup_type")
        text = f"{kind} warms up along a logarithm by default; the recipe's warm-up is a line."
        entries.draft.remark(text)


def _defaults(entries: Entries) -> None:
    """What DeepSpeed takes where the file is silent, and the recipe does not."""
    draft, source = entries.draft, entries.source
    if draft.get("schedule.name") == "linear":
        entries.put("scheduler.type", "schedule.min_lr_ratio", 0.0, "WarmupDecayLR ends at 0")
    kind = entries.get("optimizer.type") if draft.get("optimizer.name") else ""
    made = "torch" if entries.get("optimizer.params.torch_adam") is True else "AdamW" if kind == "Adam" else kind
    silent = [row for row in FIELDS if isinstance(row.default, Mapping) and entries.get(row.name) is None]
    found = [row.decode(row.default[made]) for row in silent if made in row.default]
    ours = Optimizer().model_dump()
    taken = {key: value for each in found if not isinstance(each, Unsupported) for key, value in each.items()}
    missing = {key: value for key, value in taken.items() if ours[key.removeprefix("optimizer.")] != value}
    names = ", ".join(key.removeprefix("optimizer.") for key in missing)
    reason = f"the file leaves {names} to DeepSpeed's {kind}, whose defaults are not the recipe's"
    for key, value in missing.items():
        draft.set(key, value, source.at("optimizer"), reason)
    clipping = ROWS["gradient_clipping"]
    if entries.get(clipping.name) is None:
        reason = "the file has no gradient_clipping: DeepSpeed's default is 1 (no clipping before 0.19.3)"
        draft.set(clipping.keys[0], clipping.default, source.at(""), reason)


@dataclass
class Entries:
    """What has been taken over so far.

    stage: of ZeRO, 0 without it. read: keys that need the file no more. skipped: keys and sections that are not taken
    over as they are. reasons: by key. obstacles: keys with which the file cannot be the base, why, and what to do.
    """

    draft: ImportedRecipe
    source: ForeignFile
    stage: int
    read: set[str] = field(default_factory=set)
    skipped: set[str] = field(default_factory=set)
    reasons: dict[str, str] = field(default_factory=dict)
    obstacles: list[tuple[str, str, str]] = field(default_factory=list)

    def get(self, key: str) -> Any:
        """The value at a dotted key, None where there is none."""
        return value_at(self.source.tree, key)

    def put(self, key: str, setting: str, value: Any, reason: str = "") -> None:
        """Set what a key means, or note what is wrong with it."""
        self.read.add(key)
        self.draft.put_checked(Assignment(setting, value, self.source.at(key)), reason)

    def take(self, row: DeepSpeedField) -> None:
        """Set what a field says, by any of its names; what no setting says stays in the file."""
        for key in (row.name, *row.aliases):
            value, skipped = self.get(key), any(f"{key}.".startswith(f"{each}.") for each in self.skipped)
            found = Unsupported("") if skipped or value in (None, AUTO) else row.decode(value)
            if isinstance(found, Unsupported):
                continue
            self.read.add(key)
            for setting, each in found.items():
                self.put(key, setting, each, self.reasons.get(key, ""))

    def has_counterpart(self, key: str) -> bool:
        """Whether a recipe has a name for the class that a key names."""
        value, found = self.get(key), ROWS[key].decode(self.get(key))
        if not isinstance(found, Unsupported):
            return True
        self.skipped.add(key.partition(".")[0])
        if not isinstance(value, str | None):
            what = f"{key} must be the name of a class, not {value!r}"
        elif value in (None, AUTO):
            return False
        else:
            what = f"{key} {value} has no counterpart in the recipe"
        hint = f"{found.instead}, or remove the section and choose {ROWS[key].keys[0]} in the recipe"
        self.draft.fail(what, self.source.at(key), hint)
        return False
