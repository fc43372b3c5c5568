"""DeepSpeed's JSON: keys that have a setting in the recipe become it, the others stay in the file as its base."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainkit.frameworks.base.detection import program_kind
from trainkit.frameworks.base.draft import Draft, FlagUse, ImportContext, read_flag, wrong_values
from trainkit.frameworks.base.foreign_file import ForeignFile
from trainkit.frameworks.deepspeed.config import AUTO
from trainkit.frameworks.deepspeed.fields import STAGES
from trainkit.frameworks.deepspeed.import_optimizer import MADE, Entries
from trainkit.frameworks.deepspeed.strategy import OFFLOADS, OUTDATED, ZERO, faults, sharding
from trainkit.recipe.layers.assignment import Assignment
from trainkit.recipe.layers.merge import value_at
from trainkit.recipe.layers.paths import absolute

# Any of these says that a mapping is DeepSpeed's.
MARKS = frozenset({
    "zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "fp16",
    "bf16", "gradient_clipping", "steps_per_print", "wall_clock_breakdown", "activation_checkpointing", "optimizer",
    "scheduler", "zero_allow_untested_optimizer",
})  # fmt: skip
_KIND = {stage: kind for kind, stage in STAGES.items()}
_FORMATS = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16"}
_NEVER = 10**6  # steps: files say such numbers where nothing is to be printed
_BUCKETS = (f"{ZERO}.reduce_bucket_size", f"{ZERO}.allgather_bucket_size")


def recognises(tree: Mapping[str, Any]) -> bool:
    """Whether these are DeepSpeed's keys; accelerate's files have one of the name deepspeed_config instead."""
    return bool(MARKS & tree.keys()) and "distributed_type" not in tree and "compute_environment" not in tree


def read(draft: Draft, context: ImportContext, source: ForeignFile) -> None:
    """Settings, and the file as base where it says more than these."""
    if source.program and program_kind(context, source.program).kind == "hf":
        _for_trainer(draft, context, source)
    else:
        take_apart(draft, context, source)


def take_apart(draft: Draft, context: ImportContext, source: ForeignFile) -> None:
    """Each key that has a setting; the file stays the base for the others."""
    if not isinstance(source.tree.get(ZERO, {}), Mapping):
        hint = 'write {"stage": 1}, or the stage that is meant'
        draft.fail(f"{ZERO} is {source.tree[ZERO]!r}, as DeepSpeed's first versions had it", source.at(ZERO), hint)
        return
    stage = value_at(source.tree, f"{ZERO}.stage")
    if stage in (None, 0) and source.program:
        hint = "write zero_optimization.stage: 1, which runs on one process too"
        draft.fail("a program on DeepSpeed's engine trains with ZeRO", source.at(f"{ZERO}.stage"), hint)
        return
    kind = _kind(draft, source, stage)
    entries = Entries(draft, source, kind)
    for read_part in (_strategy, _batch, _precision, _plain, *MADE):
        read_part(entries)
    if source.program:
        draft.set("program.kind", "deepspeed", source.at(""))
    else:
        _clipping(entries)
    autos = [key for key, value in leaves(source.tree) if value == AUTO]
    if autos:
        draft.remark(f'"auto", which Trainer of transformers fills from its own arguments: {", ".join(autos)}.')
    left = [key for key, _ in leaves(source.tree) if key not in entries.read and key not in autos]
    _base(entries, absolute(source.path, context.cwd), left)


def _for_trainer(draft: Draft, context: ImportContext, source: ForeignFile) -> None:
    """Trainer reads the file beside its own arguments: it is the base as it stands."""
    assignments, draft.problems = read_flag(draft, context, FlagUse("deepspeed", source.path, source.at("")))
    for each in assignments:
        draft.put(each)


def _kind(draft: Draft, source: ForeignFile, stage: Any) -> str:
    if stage in (None, 0):
        where = "says no ZeRO stage" if stage is None else "has ZeRO stage 0"
        draft.set("strategy.kind", "ddp", source.at(f"{ZERO}.stage"), f"the file {where}: plain data parallelism")
        return "ddp"
    if type(stage) is not int or stage not in _KIND:
        draft.fail(f"zero_optimization.stage is {stage!r}", source.at(f"{ZERO}.stage"), "write 0, 1, 2 or 3")
        return "zero1"
    draft.set("strategy.kind", _KIND[stage], source.at(f"{ZERO}.stage"))
    return _KIND[stage]


def _strategy(entries: Entries) -> None:
    entries.read.add(f"{ZERO}.stage")
    if entries.kind == "ddp":
        return
    stage = STAGES[entries.kind]
    for said in sharding(entries.source.tree, stage):
        entries.read.add(said.key)
        if said.value != "none":
            entries.put(said.key, said.setting, said.value)
    for name, stages in OFFLOADS.items():
        section = f"{ZERO}.{name}"
        if entries.get(f"{section}.device") in (None, "none"):
            entries.read.add(f"{section}.device")
        elif stage not in stages:
            _contradicted(entries, section, stage)
    _of_old(entries, stage)
    _paths(entries)
    _buckets(entries)


def _contradicted(entries: Entries, section: str, stage: int) -> None:
    entries.draft.remark(
        f"{entries.place(section)}: parameters can be offloaded at ZeRO stage 3 only, and the stage is {stage}: "
        f"nothing of {section} is taken over."
    )
    entries.contradicted.append(section)
    entries.read |= {key for key, _ in leaves(entries.source.tree) if key.startswith(f"{section}.")}


def _of_old(entries: Entries, stage: int) -> None:
    """Switches of DeepSpeed's first versions for what has a section of its own today."""
    names = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param",
             "cpu_offload_params": "offload_param"}  # fmt: skip
    for old, new in names.items():
        key, value = f"{ZERO}.{old}", entries.get(f"{ZERO}.{old}")
        if value is False or (value is True and stage not in OFFLOADS[new]):
            entries.read.add(key)
            if value:
                _contradicted(entries, key, stage)
        elif value is True:
            entries.put(key, f"strategy.{new}", "cpu", f"{old} is today {new}: {{device: cpu}}")


def _paths(entries: Entries) -> None:
    """One folder for both; where they differ, the file cannot be said."""
    entries.read |= {f"{ZERO}.{name}.nvme_path" for name in OFFLOADS}
    for key, what, hint in faults(entries.source.tree):
        if key.endswith("nvme_path"):
            entries.draft.fail(what, entries.source.at(key), hint)


def _buckets(entries: Entries) -> None:
    """DeepSpeed counts elements, the recipe MiB; stage 3 has one of the two sizes."""
    keys = _BUCKETS if entries.kind != "zero3" else _BUCKETS[:1]
    sizes = {entries.get(key) for key in keys if entries.get(key) not in (None, AUTO)}
    if AUTO in (entries.get("fp16.enabled"), entries.get("bf16.enabled")):
        return  # how many bytes an element has is not known
    size = next(iter(sizes), None)
    if len(sizes) == 1 and isinstance(size, int | float) and len([k for k in keys if entries.get(k)]) == len(keys):
        mib = size * (2 if entries.low else 4) / 2**20
        entries.put(keys[0], "strategy.bucket_mb", mib)
        entries.read |= set(keys)


def _batch(entries: Entries) -> None:
    keys = {
        "train_batch_size": "batch.global",
        "train_micro_batch_size_per_gpu": "batch.micro",
        "gradient_accumulation_steps": "batch.accumulation",
    }
    given = [key for key in keys if entries.get(key) not in (None, AUTO)]
    for key in given:
        entries.take(key, keys[key])
    if len(given) == 3 and not entries.draft.problems:
        total, micro, accumulation = (entries.get(key) for key in keys)
        del entries.draft.settings["batch.accumulation"]
        ranks = total / (micro * accumulation) if micro * accumulation else 0
        if ranks < 1 or ranks % 1:
            what = f"train_batch_size {total} is not {micro} x {accumulation} x a number of ranks"
            hint = "bring the three into line, or leave one of them out"
            entries.draft.fail(what, entries.source.at("train_batch_size"), hint)
            return
        entries.draft.remark(
            f"gradient_accumulation_steps {accumulation} follows from the other two with {ranks:g} ranks."
        )


def _precision(entries: Entries) -> None:
    on = [name for name in _FORMATS if entries.get(f"{name}.enabled") is True]
    if len(on) > 1:
        entries.draft.fail("bf16 and fp16 are both enabled", entries.source.at("fp16.enabled"), "enable one of them")
    for name, dtype in _FORMATS.items():
        if isinstance(entries.get(f"{name}.enabled"), bool):
            entries.read.add(f"{name}.enabled")
            if name in on:
                entries.put(f"{name}.enabled", "precision.dtype", dtype)


def _plain(entries: Entries) -> None:
    every = entries.get("steps_per_print")
    if every in ("inf", "Infinity") or (isinstance(every, int | float) and every >= _NEVER):
        entries.read.add("steps_per_print")
        entries.draft.remark(f"steps_per_print {every} prints nothing; a recipe writes a metrics line every few steps.")
    else:
        entries.take("steps_per_print", "logging.every_steps")
    section = "activation_checkpointing"
    if not entries.source.program and entries.get(section) is not None:
        entries.read |= {key for key, _ in leaves(entries.source.tree) if key.startswith(f"{section}.")}
        entries.draft.remark("The built-in trainer does not call DeepSpeed's activation_checkpointing: see "
                             "efficiency.gradient_checkpointing.")  # fmt: skip
        entries.unfit.append(section)
    entries.take("gradient_clipping", "train.max_grad_norm")


def _clipping(entries: Entries) -> None:
    if entries.get("gradient_clipping") is None:
        reason = "the file says no gradient_clipping: DeepSpeed clips nothing, and the recipe's default is 1"
        entries.draft.set("train.max_grad_norm", 0, entries.source.at(""), reason)


def _base(entries: Entries, path: str, left: list[str]) -> None:
    draft, source = entries.draft, entries.source
    if not left:
        return
    if entries.kind == "ddp":
        draft.remark(f"Without ZeRO there is no DeepSpeed engine; not taken over: {', '.join(left)}.")
        return
    if entries.unfit:
        what = f"{entries.unfit[0]} does nothing, and the file is needed as base for {', '.join(left)}"
        draft.fail(what, source.at(entries.unfit[0]), "remove it from the file")
        return
    if entries.contradicted:
        section = entries.contradicted[0]
        what = f"{section} is for ZeRO stage 3, and the file is needed as base for {', '.join(left)}"
        draft.fail(what, source.at(section), f"remove {section}, or set zero_optimization.stage to 3")
        return
    for key in (key for key in OUTDATED if entries.get(key) is not None):
        what = f"{key} is a name that DeepSpeed has replaced, and the file is needed as base for {', '.join(left)}"
        draft.fail(what, source.at(key), f"write {OUTDATED[key]}")
        return
    reason = f"base of the generated file, for what the recipe has no key of: {', '.join(left)}"
    assignment = Assignment("strategy.config", path, source.at(""))
    draft.problems += wrong_values([assignment], draft)
    draft.put(assignment, reason)


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value by its dotted key."""
    if not isinstance(tree, Mapping):
        yield prefix, tree
        return
    for key, value in tree.items():
        yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))
