"""The configuration file for a program: the user's base file, filled from the recipe and the plan's batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from json import dumps
from typing import Any

from trainkit.distribution import install
from trainkit.errors import Diagnostic, RecipeError, warning
from trainkit.launch_plan.context import Context
from trainkit.launch_plan.provenance import Source, SourcedFile
from trainkit.machine.facts import at_least
from trainkit.recipe.merge import value_at
from trainkit.recipe.resolved import Attachment
from trainkit.tools.base.fields import UNSET, Unsupported, is_set, setting
from trainkit.tools.deepspeed.fields import (
    AGREES,
    AUTO,
    BATCH,
    FIELDS,
    FILE,
    FILE_S,
    NEW_NAMES_ONLY,
    OUTDATED,
    ROWS,
    STAGE,
    ZERO,
    DeepSpeedField,
    Policy,
    ProgramKind,
    policy_of,
)

Tree = dict[str, Any]
Sources = list[tuple[str, tuple[str, ...]]]

# Keys, and all below them, where "auto" is a word of DeepSpeed's own.
OWN_AUTO = ("data_types.keep_in_fp32_modules", "expert_parallel.", "pipeline.", "zero_optimization.zenflow.")
# What the built-in trainer does itself: these are compared with the recipe, and not passed on.
HANDED_OVER = ("optimizer", "scheduler")
# Sections of what a program has to call DeepSpeed for, and the built-in trainer does not -> what to do instead.
UNCALLED: Mapping[str, str] = {
    "activation_checkpointing": "set efficiency.gradient_checkpointing instead",
    "compression_training": "remove it",
    "data_efficiency": "remove it: the trainer's data is its own",
    "expert_parallel": "set model.moe instead",
    "tensor_parallel": "remove it: the trainer's models are not split by tensor",
    "sequence_parallel_size": "remove it: each rank computes whole sequences",
    "data_parallel_size": "remove it: every rank has data of its own",
}


def config_file(context: Context, reader: ProgramKind, *, whole: bool = False) -> SourcedFile:
    """The file of a plan, for a program of this kind; see `deepspeed_config`."""
    content, sources = deepspeed_config(context, reader, whole=whole)
    text = dumps(content, indent=2, ensure_ascii=False) + "\n"
    return SourcedFile(FILE, text, {key: Source(keys) for key, keys in sources})


def deepspeed_config(context: Context, reader: ProgramKind, *, whole: bool = False) -> tuple[Tree, Sources]:
    """The complete configuration, and for each of its keys the recipe keys that made it.

    whole: whether it says what the recipe's defaults mean, too. RecipeError holds every disagreement between the base
    file and the recipe, each with both places.
    """
    base = context.resolved.attachments.get("strategy.config")
    tree, problems = _base_tree(base, reader)
    sources: Sources = []
    silent = base is None or all(_found(tree, each)[1] is UNSET for each in BATCH[:2])
    policies = [(row, policy_of(row, reader, context, whole=whole)) for row in FIELDS]
    known = {row.name for row, policy in policies if policy != FILE_S and row.encode(context) is not UNSET}
    for row, policy in policies:
        key, found = _found(tree, row)
        if isinstance(found, Mapping | list) and not key.endswith(".betas"):
            wrong = _problem(key, f"is {dumps(found)}, and one value is expected", base, "write it, or remove the key")
            problems += [] if wrong in problems else [wrong]
            continue
        # DeepSpeed takes a file with one of the two sizes of the batch; with neither it ends with an error.
        beside = base is not None and not (row in BATCH and silent and policy.write == "auto" and row.default is UNSET)
        value = _value(found, row, policy, context, beside=beside)
        if value is UNSET or (found is not UNSET and found != AUTO and _agrees(row, found, value, context, policy)):
            continue
        if found is UNSET or found == AUTO:
            problems += _fill(tree, key, value, base)
            sources.append((key, _keys(row, context)))
        else:
            problems.append(_disagreement(row, key, value, context))
    stays = {row.name for row, policy in policies if policy.keeps_auto}
    problems += _not_for_builtin(tree, known, base) if reader == "builtin" else _not_for_programs(tree, reader, context)
    for key, value in leaves(tree):
        if value == AUTO and not key.startswith(OWN_AUTO) and key not in stays:
            keys = ROWS[key].keys if key in ROWS and ROWS[key].policies.deepspeed.write != "never" else ()
            hint = " or ".join([*(f"set {each}" for each in keys[:1]), "write a value, or remove it"])
            problems.append(_problem(key, 'is "auto", and no setting of the recipe fills it', base, hint))
    if problems:
        raise RecipeError(problems)
    made = {key for key, _ in sources}
    sources += [(key, ("strategy.config",)) for key, _ in leaves(tree) if key not in made]
    return tree, sorted(source for source in sources if value_at(tree, source[0], UNSET) is not UNSET)


def _value(found: Any, row: DeepSpeedField, policy: Policy, context: Context, *, beside: bool) -> Any:
    """What the file has to say at a key; UNSET where that is not the recipe's affair.

    found: what it says. beside: whether there is a file of the user's, which may be silent.
    """
    value, given = row.encode(context), is_set(context, *row.keys)
    if found is UNSET:
        write = (policy.beside or policy.write) if beside else policy.write
        if write == "auto" and not given:
            return AUTO
        writes = write in ("always", "auto") or (write == "if_set" and given)
        return value if writes and row.written(context) else UNSET
    if found == AUTO:
        fills = policy.auto == "fill" or (policy.auto in ("fill_set", "fill_or_keep") and given)
        return value if fills else UNSET
    counts = policy.user_file == "must_agree" or (policy.user_file == "set_must_agree" and given)
    return value if counts else UNSET


def _found(tree: Tree, row: DeepSpeedField) -> tuple[str, Any]:
    """What the file says of a field, and under which of the names that DeepSpeed reads it by."""
    if row.name == STAGE and isinstance(tree.get(ZERO), bool):  # as the first versions had it
        return ZERO, int(tree[ZERO])
    for key in (row.name, *row.aliases):
        found = value_at(tree, key, UNSET)
        if found is not UNSET and found is not None:
            # zero/config.py: cpu_offload is a switch, what replaced it names a device
            return key, ("cpu" if found else "none") if row.default == "none" and isinstance(found, bool) else found
    return row.name, UNSET


def _keys(row: DeepSpeedField, context: Context) -> tuple[str, ...]:
    """The recipe keys that decide the value: the stage, of what it does not have."""
    absent = any(key.startswith("strategy.") and setting(context, key) is UNSET for key in row.keys)
    return ("strategy.kind",) if absent else row.keys


def _base_tree(base: Attachment | None, reader: ProgramKind) -> tuple[Tree, list[Diagnostic]]:
    if base is None:
        return {}, []
    if not isinstance(base.tree, Mapping):
        what = f"{base.path} holds {type(base.tree).__name__}, where DeepSpeed expects a mapping"
        return {}, [Diagnostic("error", what, key="strategy.config", origin=base.origins.get(""))]
    # Beside today's names, which the trainer or the library fills in, the old ones are an error, or without effect.
    unread = {"builtin": OUTDATED, "deepspeed": {}}.get(reader, NEW_NAMES_ONLY)
    return deepcopy(dict(base.tree)), [
        _problem(key, "is a name that DeepSpeed has replaced", base, f"write {instead}")
        for key, instead in unread.items()
        if value_at(base.tree, key, UNSET) is not UNSET
    ]


def _fill(tree: Tree, key: str, value: Any, base: Attachment | None) -> Iterator[Diagnostic]:
    *parents, last = key.split(".")
    for depth, part in enumerate(parents):
        inner = tree.setdefault(part, {})
        if not isinstance(inner, dict):
            yield _problem(".".join(parents[: depth + 1]), "must be a mapping", base)
            return
        tree = inner
    tree[last] = value


def _agrees(row: DeepSpeedField, found: Any, value: Any, context: Context, policy: Policy) -> bool:
    """Whether the file says what the recipe does, be it in another word, as Adam for AdamW."""
    if _same(found, value) or not row.name.startswith(HANDED_OVER):
        return _same(found, value)
    meant = row.decode(found)
    if isinstance(meant, Unsupported) or not meant:
        return False
    open_keys = {key for key in meant if policy == AGREES and not is_set(context, key)}
    return all(_same(each, setting(context, key)) for key, each in meant.items() if key not in open_keys)


def _same(found: Any, expected: Any) -> bool:
    """Equal, numbers by value; DeepSpeed takes a quoted number for a different thing, and so does this."""
    if isinstance(found, bool) or isinstance(expected, bool):
        return found is expected
    return bool(found == expected)


def _disagreement(row: DeepSpeedField, name: str, value: Any, context: Context) -> Diagnostic:
    keys, base = _keys(row, context), context.resolved.attachments["strategy.config"]
    found = value_at(base.tree, name)
    recipe_keys = " and ".join(keys)
    places = ", ".join(origin.place for key in keys if (origin := context.resolved.given(key)))
    return Diagnostic(
        "error",
        f"{name} is {dumps(found)} in the DeepSpeed file, but the recipe makes it {dumps(value)}",
        key=keys[0],
        origin=base.origins.get(name),
        why=f"{recipe_keys}: {f'set at {places}' if places else 'a default or derived'}",
        hint=f'Write "auto" for {name}, or bring {recipe_keys} into line with it.',
    )


def _problem(key: str, what: str, base: Attachment | None, hint: str = "") -> Diagnostic:
    origin = base.origins.get(key) if base else None
    return Diagnostic("error", f"{key} in the DeepSpeed file {what}", key="strategy.config", origin=origin, hint=hint)


def _not_for_builtin(tree: Tree, known: set[str], base: Attachment | None) -> Iterator[Diagnostic]:
    """What the trainer does itself must have a counterpart in the recipe: it would be ignored otherwise."""
    for section in HANDED_OVER:
        for key, value in leaves(tree.pop(section, {}), section):
            if key not in known and value != AUTO:
                yield _problem(key, f"is {dumps(value)}, and no setting of the recipe says that", base, "remove it")
    for section in UNCALLED.keys() & tree.keys():
        yield _problem(section, "does nothing: the built-in trainer does not call it", base, UNCALLED[section])


def _not_for_programs(tree: Tree, reader: ProgramKind, context: Context) -> Iterator[Diagnostic]:
    """What the library that reads the file ends with an error at."""
    base = context.resolved.attachments.get("strategy.config")
    if reader in ("hf", "accelerate") and ZERO not in tree:
        why = "accelerate, which Trainer uses too, takes no file without it (utils/dataclasses.py)"
        what, hint = "zero_optimization is missing in the DeepSpeed file", f'add {{"{ZERO}": {{"stage": 0}}}}'
        origin = base.origins.get("") if base else None
        yield Diagnostic("error", what, key="strategy.config", origin=origin, why=why, hint=hint)


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value by its dotted key."""
    if not isinstance(tree, Mapping) or (not tree and prefix in ROWS):
        yield prefix, tree
        return
    for key, value in tree.items():
        yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))


# Key of the file -> the first version that ends with an error at it (deepspeed/runtime/config.py, 0.19.6 to 0.19.8).
KEYS: Mapping[str, str] = {
    **dict.fromkeys(
        ("nebula", "compression_training", "quantize_training", "sparse_attention",
         f"{ZERO}.mics_shard_size", f"{ZERO}.mics_hierarchical_params_gather"),
        "0.19.7",
    ),
    **dict.fromkeys(
        ("amp", "sparse_gradients", "eigenvalue", "elasticity", "graph_harvesting", "curriculum_learning",
         "progressive_layer_drop", f"{ZERO}.zeropp_loco_param"),
        "0.19.8",
    ),
}  # fmt: skip
# Type of optimizer, in small letters -> the first version without it.
OPTIMIZERS: Mapping[str, str] = dict.fromkeys(("onebitadam", "onebitlamb", "zerooneadam"), "0.19.7")


def removed_notices(context: Context) -> Iterator[Diagnostic]:
    base, installed = context.resolved.attachments.get("strategy.config"), context.facts.packages.get("deepspeed", "")
    if base is None or not context.zero or not installed:  # a missing package is said by itself
        return
    kind = value_at(base.tree, "optimizer.type")
    asked = {key: first for key, first in KEYS.items() if value_at(base.tree, key) is not None}
    if str(kind).lower() in OPTIMIZERS:
        asked[f"the optimizer {kind}"] = OPTIMIZERS[str(kind).lower()]
    for name, first in asked.items():
        if at_least(installed, first):
            what = f"DeepSpeed {installed} no longer has {name}, which the DeepSpeed file asks for"
            older = install(context.facts.executable, f"deepspeed<{first}")
            yield warning(what, f"{older}, or take it out of the file")
