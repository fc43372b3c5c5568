"""DeepSpeed's JSON: the user's base file, filled from the recipe and the one solution of the batch triangle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from json import dumps
from typing import TYPE_CHECKING, Any

from trainkit.errors import Diagnostic, Origin, RecipeError
from trainkit.frameworks.deepspeed.fields import Row, rows
from trainkit.frameworks.deepspeed.optimizer import made_by_deepspeed, made_rows
from trainkit.frameworks.deepspeed.readers import BUILTIN, OWN_AUTO, Reader
from trainkit.frameworks.deepspeed.strategy import OUTDATED
from trainkit.plan.model import BatchArithmetic
from trainkit.recipe.schema import Recipe

if TYPE_CHECKING:
    from trainkit.recipe.resolved import Attachment

Tree = dict[str, Any]
OriginOf = Callable[[str], Origin | None]
Sources = list[tuple[str, tuple[str, ...]]]

AUTO = "auto"  # the mark of HF's files for "take it from the training settings"
_MISSING = object()


def deepspeed_config(
    recipe: Recipe,
    batch: BatchArithmetic,
    dtype: str,
    base: Attachment | None = None,
    origin_of: OriginOf = lambda key: None,
    *,
    reader: Reader = BUILTIN,
) -> tuple[Tree, Sources]:
    """The complete configuration, and for each of its keys the recipe keys that made it.

    origin_of: where a recipe key was set, for the messages. reader: what reads the file. RecipeError holds every
    disagreement between the base file and the recipe, each with both places.
    """
    tree, problems = _base_tree(base)
    sources: Sources = []
    table = rows(recipe, batch, dtype)
    if reader.makes:
        table = [*(row for row in table if not made_by_deepspeed(row)), *made_rows(recipe, origin_of)]
    known = [row for row in table if row.key not in reader.decides]
    for row in known:
        if row.key in reader.keeps and not any(map(origin_of, row.recipe_keys)):
            continue
        found = _get(tree, row.key)
        if row.key in reader.fills and not any(map(origin_of, row.recipe_keys)):
            if found is not _MISSING:
                continue
            if row.key in reader.asks:
                row = replace(row, value=AUTO)  # noqa: PLW2901 - the same row, left to the reader
        if found is _MISSING and not row.emit:
            continue
        if found is _MISSING or found == AUTO:
            problems += _fill(tree, row, base, sources)
        elif not _same(found, row.value) and row.firm:
            problems.append(_disagreement(row, found, base, origin_of))
    problems += _strangers(tree, known, base, reader)
    for section in reader.handed_over:
        tree.pop(section, None)
    problems += _unfilled(tree, base, reader)
    problems += (
        _problem(section, "does nothing: the built-in trainer does not call it", base, instead)
        for section, instead in reader.uncalled.items()
        if section in tree
    )
    if problems:
        raise RecipeError(problems)
    named = {key for key, _ in sources}
    sources += [(key, ("strategy.config",)) for key, _ in _leaves(tree) if key not in named]
    return tree, sorted(source for source in sources if _get(tree, source[0]) is not _MISSING)


def _base_tree(base: Attachment | None) -> tuple[Tree, list[Diagnostic]]:
    if base is None:
        return {}, []
    if isinstance(base.tree, Mapping):
        return deepcopy(dict(base.tree)), list(_outdated(base))
    what = f"{base.path} holds {type(base.tree).__name__}, where DeepSpeed wants a mapping"
    return {}, [Diagnostic("error", what, key="strategy.config", origin=base.origins.get(""))]


def _outdated(base: Attachment) -> Iterator[Diagnostic]:
    """Names of DeepSpeed's first versions: beside today's, which the recipe fills in, they are an error of its own."""
    for key, instead in OUTDATED.items():
        if _get(base.tree, key) is not _MISSING:
            yield _problem(key, "is a name that DeepSpeed has replaced", base, f"Write {instead}.")


def _get(tree: Any, key: str) -> Any:
    for part in key.split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            return _MISSING
        tree = tree[part]
    return tree


def _fill(tree: Tree, row: Row, base: Attachment | None, sources: Sources) -> list[Diagnostic]:
    *parents, last = row.key.split(".")
    for depth, part in enumerate(parents):
        inner = tree.setdefault(part, {})
        if not isinstance(inner, dict):
            return [_problem(".".join(parents[: depth + 1]), "must be a mapping", base)]
        tree = inner
    tree[last] = row.value
    sources.append((row.key, row.recipe_keys))
    return []


def _same(found: Any, wanted: Any) -> bool:
    """Equal, numbers by value; DeepSpeed takes a quoted number for a different thing, and so does this."""
    if isinstance(found, bool) or isinstance(wanted, bool):
        return found is wanted
    return bool(found == wanted)


def _disagreement(row: Row, found: Any, base: Attachment | None, origin_of: OriginOf) -> Diagnostic:
    recipe_keys = " and ".join(row.recipe_keys)
    places = [origin.place for key in row.recipe_keys if (origin := origin_of(key))]
    where = f"set at {', '.join(places)}" if places else "trainkit's default or derived"
    return Diagnostic(
        "error",
        f"{row.key} is {dumps(found)} in the DeepSpeed file, but the recipe makes it {dumps(row.value)}",
        key=row.recipe_keys[0],
        origin=base.origins.get(row.key) if base else None,
        why=f"{recipe_keys}: {where}",
        hint=f'Write "auto" for {row.key}, or bring {recipe_keys} into line with it.',
    )


def _problem(key: str, what: str, base: Attachment | None, hint: str = "") -> Diagnostic:
    origin = base.origins.get(key) if base else None
    return Diagnostic("error", f"{key} in the DeepSpeed file {what}", key="strategy.config", origin=origin, hint=hint)


def _strangers(tree: Tree, known: list[Row], base: Attachment | None, reader: Reader) -> Iterator[Diagnostic]:
    """What the trainer does itself must have a counterpart in the recipe: it would be ignored otherwise."""
    compared = {row.key for row in known}
    for section in reader.handed_over:
        for key, value in _leaves(tree.get(section, {}), section):
            if key not in compared and value != AUTO:
                yield _problem(key, f"is {dumps(value)}, and no setting of the recipe says that", base, "Remove it.")


def _unfilled(tree: Tree, base: Attachment | None, reader: Reader) -> Iterator[Diagnostic]:
    for key, value in _leaves(tree):
        if value == AUTO and key not in reader.fills and not key.startswith(OWN_AUTO):
            yield _problem(
                key, 'is "auto", and no setting of the recipe fills it', base, "Write a value, or remove it."
            )


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(tree, Mapping):
        yield prefix, tree
        return
    for key, value in tree.items():
        yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))
