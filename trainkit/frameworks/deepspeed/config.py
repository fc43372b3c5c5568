"""The configuration file for a program: the user's base file, filled from the recipe and the plan's batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from json import dumps
from typing import Any

from trainkit.errors import Diagnostic, RecipeError
from trainkit.frameworks.base.fields import UNSET, said, setting
from trainkit.frameworks.deepspeed.fields import AUTO, BATCH, FIELDS, FILE, OUTDATED
from trainkit.frameworks.deepspeed.readers import AUTO_STAYS, Reader, Row, Rule, rule_of
from trainkit.plan.context import Context
from trainkit.plan.provenance import Source, SourcedFile
from trainkit.recipe.layers.merge import value_at
from trainkit.recipe.resolved import Attachment

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
}


def config_file(context: Context, reader: Reader, *, whole: bool = False) -> SourcedFile:
    """The file of a plan, for a program of this kind; see `deepspeed_config`."""
    content, sources = deepspeed_config(context, reader, whole=whole)
    text = dumps(content, indent=2, ensure_ascii=False) + "\n"
    return SourcedFile(FILE, text, {key: Source(keys) for key, keys in sources})


def deepspeed_config(context: Context, reader: Reader, *, whole: bool = False) -> tuple[Tree, Sources]:
    """The complete configuration, and for each of its keys the recipe keys that made it.

    whole: whether it says what the recipe's defaults mean, too. RecipeError holds every disagreement between the base
    file and the recipe, each with both places.
    """
    base = context.resolved.attachments.get("strategy.config")
    tree, problems = _base_tree(base)
    sources: Sources = []
    rules = [(row, rule_of(row, reader, context, whole=whole)) for row in FIELDS]
    known = {row.name for row, rule in rules if rule is not Rule.OWN and row.encode(context) is not UNSET}
    for row, rule in rules:
        value = _value(tree, row, rule, context, guesses=reader != "deepspeed")
        found = value_at(tree, row.name, UNSET)
        if value is UNSET or (found is not UNSET and found != AUTO and _same(found, value)):
            continue
        if found is UNSET or found == AUTO:
            problems += _fill(tree, row.name, value, base)
            sources.append((row.name, _keys(row, context)))
        else:
            problems.append(_disagreement(row, found, value, context))
    stays = {row.name for row, rule in rules if rule in AUTO_STAYS}
    if reader == "builtin":
        problems += _not_for_builtin(tree, known, base)
    for key, value in leaves(tree):
        if value == AUTO and not key.startswith(OWN_AUTO) and key not in stays:
            hint = "write a value, or remove it"
            problems.append(_problem(key, 'is "auto", and no setting of the recipe fills it', base, hint))
    if problems:
        raise RecipeError(problems)
    made = {key for key, _ in sources}
    sources += [(key, ("strategy.config",)) for key, _ in leaves(tree) if key not in made]
    return tree, sorted(source for source in sources if value_at(tree, source[0], UNSET) is not UNSET)


def _value(tree: Tree, row: Row, rule: Rule, context: Context, *, guesses: bool) -> Any:
    """What the file has to say at a key; UNSET where that is not the recipe's affair.

    guesses: whether "auto" may be a setting's default. On DeepSpeed's own engine it is a mistake.
    """
    found, value = value_at(tree, row.name, UNSET), row.encode(context)
    given, is_open = said(context, *row.keys), found is UNSET or found == AUTO
    if (rule is Rule.SIZED and value is UNSET) or (rule is Rule.ASKED and not given):
        # A file of the user's without the key has DeepSpeed's default; sizes of the batch have none but each other.
        base = context.resolved.attachments.get("strategy.config")
        asks = base is None or (row.default is UNSET and not any(value_at(base.tree, each.name) for each in BATCH))
        return AUTO if found is UNSET and asks else UNSET
    if value is UNSET or rule in (Rule.OWN, Rule.LEFT):
        return UNSET
    if not given and rule in (Rule.SAID, Rule.FILLED, Rule.AGREED):
        return value if rule is Rule.SAID and found == AUTO and guesses else UNSET
    if found is UNSET:
        return value if row.written(context) and rule not in (Rule.COMPARED, Rule.AGREED) else UNSET
    return value if is_open or not (rule is Rule.TUNED or (rule is Rule.KEPT and not given)) else UNSET


def _keys(row: Row, context: Context) -> tuple[str, ...]:
    """The recipe keys that decide the value: the stage, of what it does not have."""
    absent = any(key.startswith("strategy.") and setting(context, key) is UNSET for key in row.keys)
    return ("strategy.kind",) if absent else row.keys


def _base_tree(base: Attachment | None) -> tuple[Tree, list[Diagnostic]]:
    if base is None:
        return {}, []
    if not isinstance(base.tree, Mapping):
        what = f"{base.path} holds {type(base.tree).__name__}, where DeepSpeed expects a mapping"
        return {}, [Diagnostic("error", what, key="strategy.config", origin=base.origins.get(""))]
    # Beside today's names, which the recipe fills in, the old ones are an error of DeepSpeed's own.
    return deepcopy(dict(base.tree)), [
        _problem(key, "is a name that DeepSpeed has replaced", base, f"write {instead}")
        for key, instead in OUTDATED.items()
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


def _same(found: Any, expected: Any) -> bool:
    """Equal, numbers by value; DeepSpeed takes a quoted number for a different thing, and so does this."""
    if isinstance(found, bool) or isinstance(expected, bool):
        return found is expected
    return bool(found == expected)


def _disagreement(row: Row, found: Any, value: Any, context: Context) -> Diagnostic:
    keys, base = _keys(row, context), context.resolved.attachments["strategy.config"]
    recipe_keys = " and ".join(keys)
    places = ", ".join(origin.place for key in keys if (origin := context.resolved.given(key)))
    return Diagnostic(
        "error",
        f"{row.name} is {dumps(found)} in the DeepSpeed file, but the recipe makes it {dumps(value)}",
        key=keys[0],
        origin=base.origins.get(row.name),
        why=f"{recipe_keys}: {f'set at {places}' if places else 'a default or derived'}",
        hint=f'Write "auto" for {row.name}, or bring {recipe_keys} into line with it.',
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


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value by its dotted key."""
    if not isinstance(tree, Mapping):
        yield prefix, tree
        return
    for key, value in tree.items():
        yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))
