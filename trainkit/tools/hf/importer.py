"""Read the flags of a script on transformers' Trainer into a recipe, by the table of TrainingArguments."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainkit.errors import Diagnostic, RecipeError, UsageError
from trainkit.metrics import LOSS, PREFIX, lower_is_better
from trainkit.optimizers import MOMENTS
from trainkit.recipe.assignment import Assignment, read_value
from trainkit.recipe.hub_name import has_owner
from trainkit.recipe.paths import absolute, named_config
from trainkit.recipe.yaml_reader import compose_bytes
from trainkit.tools.base.fields import Settings, Unsupported
from trainkit.tools.base.fsdp_settings import CHECKPOINTING, only_by_size
from trainkit.tools.base.imported_recipe import (
    ImportContext,
    ImportedFlag,
    ImportedRecipe,
    apply_flag,
    read_flag,
    read_mapping,
    wrong_values,
)
from trainkit.tools.base.launcher_flags import ScriptFlag, script_flags
from trainkit.tools.deepspeed.importer import use_as_base
from trainkit.tools.hf import fields
from trainkit.tools.hf.argv_reader import newest, shown, written
from trainkit.tools.hf.deepspeed import import_base
from trainkit.tools.hf.fields import BY_NAME, FIELDS, Argument
from trainkit.tools.hf.fsdp_config import MISSPELT, read_fsdp_config
from trainkit.tools.hf.removed_arguments import BY_GONE_NAME, GONE, remark

NO_SHARD = "FSDP without sharding (no_shard) is plain data parallelism"
NOT_READ = (
    "Trainer does not read fsdp_offload_params in --fsdp_config (its name there is cpu_offload); the recipe means it."
)
STRATEGIES = tuple(BY_NAME[f"{what}_strategy"] for what in ("eval", "save", "logging"))
OF_PUSH = ("hub_model_id", "hub_strategy", "hub_private_repo")  # which do nothing alone
# Fields whose value means something only beside others: read by functions of their own.
TOGETHER = {
    *("fsdp", "lr_scheduler_kwargs", "metric_for_best_model", "greater_is_better"),
    *("push_to_hub", *OF_PUSH),
    *(each.name for each in STRATEGIES),
}
UNREADABLE = Unsupported("", "write what transformers documents for it")
LOADS_ONCE = "rank 0 alone loads the weights, by a default of accelerate launch that Trainer has not"
KEEPS_TF32 = "Trainer's own torch_compile would switch TF32 on, which accelerate's compilation does not"
RECOMPUTES = "activation_checkpointing"
BESIDE_FSDP = (
    "{} stays the program's own argument: Trainer recomputes by it, and FSDP's own switch, which is "
    "efficiency.gradient_checkpointing in a recipe, would take its place with one gather less."
)
REPLICAS_ONLY = ("ddp_find_unused_parameters", "ddp_bucket_cap_mb")


@dataclass
class HfImport:
    """The flags on their way into the draft. flags: by newest name, the last use of each; taken: those that leave."""

    draft: ImportedRecipe
    context: ImportContext
    flags: dict[str, ScriptFlag]
    taken: set[str] = field(default_factory=set)

    def take(self, name: str, settings: Settings, reason: str = "") -> None:
        """Set what a flag says; it leaves the program's arguments."""
        origin = self.flags[name].origin
        self.put(name, (Assignment(key, value, origin) for key, value in settings.items()), reason)

    def put(self, name: str, assignments: Iterable[Assignment], reason: str = "") -> None:
        """The same with places of their own."""
        for each in assignments:
            self.draft.put(each, reason)
        self.taken.add(name)

    def value(self, name: str) -> str | None:
        """What follows a flag, None where it was not used."""
        return " ".join(self.flags[name].values) if name in self.flags else None


def read_program(draft: ImportedRecipe, context: ImportContext, argv: Sequence[str]) -> list[str]:
    """Settings out of the arguments of a script on Trainer; returns those that stay its own, in their order."""
    found = list(script_flags(argv))
    reading = HfImport(draft, context, _by_name(found, context))
    for name, read in FILES.items():
        if name in reading.flags:
            read(reading, name)
    # The table's order counts: an optimizer is known before its arguments, the learning rate before the schedule.
    for each in (*FIELDS, *GONE):
        if each.name in reading.flags and each.keys and each.name not in TOGETHER:
            _by_field(reading, each)
    _fsdp_config(reading, "fsdp_config")
    for strategy in STRATEGIES:
        _strategy(reading, strategy)
    _best(reading)
    _push(reading)
    # `--bf16 False` and `--fp16 False` say that neither is used.
    denied = [name for name in ("bf16", "fp16") if name in reading.flags and reading.flags[name].switch is False]
    if denied and draft.get("precision.dtype") is None:
        reading.take(denied[0], {"precision.dtype": "fp32"})
    _as_accelerate_launches(reading)
    _device_of_file(draft, context, argv)
    import_base(draft, context)
    for name, flag in reading.flags.items():
        old = BY_GONE_NAME.get(written(flag).removeprefix("--").replace("-", "_"))
        if old and name not in reading.taken:
            draft.remark(remark(old))
    return [word for each in found if newest(each).name not in reading.taken for word in each.words]


def _as_accelerate_launches(reading: HfImport) -> None:
    """What `accelerate launch` leaves by defaults of its own, where Trainer's are others.

    Source: accelerate, commands/launch.py (--fsdp_cpu_ram_efficient_loading) and utils/dataclasses.py
    (TorchDynamoPlugin), against training_args.py.
    """
    draft, key = reading.draft, "strategy.cpu_ram_efficient_loading"
    compiles = "efficiency.compile.enabled"
    if draft.get(compiles) and "torch_compile" not in reading.flags and draft.get("precision.tf32") is None:
        draft.set("precision.tf32", False, draft.settings[compiles].origin, KEEPS_TF32)
    by_launcher = draft.get("launcher.kind") == "accelerate" and "fsdp" not in reading.flags
    if by_launcher and draft.get("strategy.kind") == "fsdp" and draft.get(key) is None:
        draft.set(key, True, draft.settings["strategy.kind"].origin, LOADS_ONCE)


def _device_of_file(draft: ImportedRecipe, context: ImportContext, argv: Sequence[str]) -> None:
    """The CPU, where the script's own file of settings asks for it: the plan decides the device in any case."""
    path = named_config(list(argv))
    if path is None or draft.get("devices.type") is not None:
        return
    try:
        file = read_mapping(context, path, f"file {path}", 1)
    except (UsageError, RecipeError):  # what is wrong with it the script says
        return
    if name := next((each for each in ("use_cpu", "no_cuda") if file.tree.get(each) is True), ""):
        draft.set("devices.type", "cpu", file.at(name), f"{path} says {name}")
        if draft.get("devices.select") == "all":
            draft.forget("devices.select")


def _by_name(found: Iterable[ScriptFlag], context: ImportContext) -> dict[str, ScriptFlag]:
    """The flags to read, in the names of the newest transformers."""
    return {newest(each).name: newest(each) for each in found if each.name and each.name not in context.own}


def _by_field(reading: HfImport, argument: Argument) -> None:
    """What a flag says by itself, as the table decodes it."""
    name, draft = argument.name, reading.draft
    flag, text, problems = reading.flags[name], reading.value(name) or "", list[Diagnostic]()
    if name == RECOMPUTES and draft.get("strategy.kind") == "fsdp" and flag.switch:
        return  # see _fsdp_config
    if name in REPLICAS_ONLY and (draft.get("strategy.kind") or ("ddp" if draft.replicas else "")) != "ddp":
        return
    value: Any = flag.switch if argument.switch else None
    if text and not argument.switch:
        value, problems = read_value(argument.keys[0], text, flag.origin)
    settings = UNREADABLE if value is None else _decoded(reading, argument, value)
    reason = settings if isinstance(settings, Unsupported) else UNREADABLE
    if not isinstance(settings, Unsupported):
        # What a flag only implies gives way to the flag that says it.
        settings = {key: each for key, each in settings.items() if key in argument.keys or draft.get(key) is None}
        checked = {**settings, **({"strategy.kind": "ddp"} if name in REPLICAS_ONLY else {})}
        problems = wrong_values([Assignment(key, each, flag.origin) for key, each in checked.items()], draft)
        if not problems:
            reading.take(name, settings)
            return
    # What the recipe cannot say stays with the program, unless the plan decides it.
    errors = [each for each in problems if each.severity == "error"]
    if not argument.owned:
        draft.remark(f"{shown(flag)} stays the program's own argument: the recipe has no such value.")
    elif errors:
        draft.problems += errors
    else:
        draft.fail(f"{shown(flag)} cannot be read", flag.origin, reason.instead or UNREADABLE.instead, reason.why)


def _decoded(reading: HfImport, argument: Argument, value: Any) -> Settings | Unsupported:
    """Decoded alone, or beside the flags that decide what it means."""
    draft, name = reading.draft, reading.draft.get("optimizer.name")
    moment = argument.keys[0].removeprefix("optimizer.")
    if name and moment in MOMENTS and not fields.has_moment(name, moment):
        return Unsupported(f"Trainer's {name} has no such setting")
    if argument.name == "optim_args":
        return fields.decode_arguments(value, name)
    if argument.name == "lr_scheduler_type":
        kwargs = _mapping(reading.value("lr_scheduler_kwargs") or "")
        if both := fields.decode_schedule(value, kwargs, draft.get("optimizer.lr")):
            reading.taken.add("lr_scheduler_kwargs")
            return both
        if value == fields.WSD:  # its decay has no default there
            return Unsupported("its --lr_scheduler_kwargs have no counterpart in the recipe")
    return argument.decode(value)


def _mapping(text: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _by_own_flag(reading: HfImport, name: str) -> None:
    """A place or a file, as trainkit's own flag of this name reads it."""
    value, draft, origin = reading.value(name) or "", reading.draft, reading.flags[name].origin
    if not value:
        draft.fail(f"{shown(reading.flags[name])} cannot be read", origin, UNREADABLE.instead)
    else:
        apply_flag(draft, reading.context, name, value, origin)
        reading.taken.add(name)


def _deepspeed(reading: HfImport, name: str) -> None:
    value, draft, flag = reading.value(name) or "", reading.draft, reading.flags[name]
    if not value:
        draft.fail(f"{shown(flag)} cannot be read", flag.origin, UNREADABLE.instead)
    elif value.lstrip().startswith("{"):
        hint = "write these settings to a file, and name that"
        draft.fail("--deepspeed holds settings, where a recipe names a file", flag.origin, hint)
    else:
        use_as_base(draft, reading.context, value, flag.origin)
        reading.taken.add(name)


def _fsdp(reading: HfImport, name: str) -> None:
    flag, value, draft = reading.flags[name], reading.value(name) or "", reading.draft
    words = value.replace(",", " ").split()
    if (flag.values and not words) or value in ("False", "false"):
        reading.taken.add(name)
        return
    if "no_shard" in words and "offload" not in words:
        reading.take(name, {"strategy.kind": "ddp"}, NO_SHARD)
        return
    if value in ("True", "true"):
        draft.remark("Trainer of transformers 5 ends with an error at --fsdp True; the switch is bare.")
    apply_flag(draft, reading.context, name, value if flag.values else None, flag.origin)
    reading.taken.add(name)


# Read before the table: the strategy decides which of its fields count.
FILES: Mapping[str, Callable[[HfImport, str], None]] = {
    "fsdp": _fsdp,
    "output_dir": _by_own_flag,
    "deepspeed": _deepspeed,
}


def _fsdp_config(reading: HfImport, name: str) -> None:
    """A file, or its content in its place."""
    if name in reading.flags:
        _sharding_file(reading, name)
    if reading.draft.get("strategy.kind") != "fsdp" or RECOMPUTES not in reading.flags:
        return
    if reading.draft.get(CHECKPOINTING):  # FSDP's own switch: Trainer would do both, or end with an error
        reading.taken.add(RECOMPUTES)
    elif RECOMPUTES not in reading.taken:
        reading.draft.remark(BESIDE_FSDP.format(shown(reading.flags[RECOMPUTES])))


def _sharding_file(reading: HfImport, name: str) -> None:
    flag, draft, value = reading.flags[name], reading.draft, reading.value(name) or ""
    if draft.get("strategy.kind") != "fsdp":
        without = f"Trainer does not read {shown(flag)} without --fsdp; it is left out."
        replicas = f"{shown(flag)} says nothing of plain data parallelism."
        draft.remark(replicas if "fsdp" in reading.flags else without)
        reading.taken.add(name)
        return
    if value.lstrip().startswith("{"):
        tree: Any = _mapping(value)
        if not tree:
            draft.fail("--fsdp_config holds no JSON object", flag.origin, "write a JSON object, or name a file")
        assignments, problems = read_fsdp_config(tree, lambda key: flag.origin)
        problems = problems or wrong_values(assignments, draft)
    else:
        assignments, problems = read_flag(draft, reading.context, ImportedFlag(name, value, flag.origin))
        tree = {} if problems else compose_bytes(reading.context.files.read(absolute(value, reading.context.cwd))).tree
    draft.problems += problems
    reading.put(name, assignments)
    said = {key.removeprefix("fsdp_"): each for key, each in tree.items()}
    if said.get("offload_params") and "cpu_offload" not in said:
        draft.remark(NOT_READ)
    if str(said.get("backward_prefetch")).lower() == MISSPELT:
        draft.remark(f"{MISSPELT} is read as backward_post, which transformers' documentation means by it.")
    by_size = said.get("auto_wrap_policy") == "SIZE_BASED_WRAP" or said.get("xla") is True
    if said.get("min_num_params") and not by_size:
        draft.remark(only_by_size("Trainer"))


def _strategy(reading: HfImport, argument: Argument) -> None:
    """`eval_strategy` and its like decide whether `eval_steps` counts at all."""
    draft, name, key = reading.draft, argument.name, argument.keys[0]
    steps = name.replace("strategy", "steps")
    strategy, said = reading.value(name), reading.flags.get(steps)
    effective = strategy or argument.default
    if effective == "steps" and said is not None and draft.get(key) is not None:
        reading.taken.add(name)
    elif said is not None and effective != "steps":
        draft.settings.pop(key, None)
        reading.taken.discard(steps)
        if effective != "best":
            draft.remark(f"Trainer ignores {shown(said)}: --{name} is {effective}.")
    if strategy == "no" and name != "logging_strategy":
        reading.take(name, {key: 0})
    elif strategy == "steps" and name == "eval_strategy" and said is None:
        every = reading.value("logging_steps") or ""
        if every.isdecimal() and int(every):
            reason = "Trainer evaluates as often as it logs where --eval_steps is missing"
            reading.take(name, {key: int(every)}, reason)


def _push(reading: HfImport) -> None:
    """Uploads, where they are on and the repository has its owner: else Trainer finds out a name of its own."""
    flags = reading.flags
    on = "push_to_hub" in flags and flags["push_to_hub"].switch
    if not on or not has_owner(reading.value("hub_model_id") or ""):
        return
    reading.take("push_to_hub", {})
    for name in (each for each in OF_PUSH if each in flags):
        _by_field(reading, BY_NAME[name])


def _best(reading: HfImport) -> None:
    """`--save_strategy best`, and by which metric: Trainer takes the greatest, unless its name ends with loss."""
    greater, metric = reading.flags.get("greater_is_better"), reading.value("metric_for_best_model")
    if reading.value("save_strategy") != "best" or metric is None or not reading.draft.get("eval.every_steps"):
        return
    name = metric.removeprefix(PREFIX)
    is_greater = greater.switch if greater is not None else not name.endswith(LOSS)
    reading.take("save_strategy", {"checkpoint.keep_best": True})
    if name != LOSS:
        reading.take("metric_for_best_model", {"eval.best_metric": name})
    if lower_is_better(name) == is_greater:
        where = "greater_is_better" if greater is not None else "metric_for_best_model"
        reading.take(where, {"eval.greater_is_better": is_greater})
    reading.taken |= {"metric_for_best_model", "greater_is_better"}
