"""The batch triangle, solved once: global = micro x accumulation x ranks.

A program of the user's own has sizes of its own, which no plan knows: there a side that nobody gives stays open, and
the triangle is completed where the recipe gives its first side, the global batch.
"""

from __future__ import annotations

from collections.abc import Mapping

from trainkit.batch import Sides, solve
from trainkit.errors import Diagnostic, Origin, RecipeError
from trainkit.launch_plan.model import BatchArithmetic
from trainkit.lazy import load
from trainkit.recipe.resolved import Resolved
from trainkit.recipe.rules import yielding_corner
from trainkit.text import pluralize

DEFAULT_MICRO = 8  # samples, where neither the recipe nor a DeepSpeed file sets batch.micro; less where it must divide
TOLD = ("hf", "deepspeed")  # programs of the user's own for which a size in DeepSpeed's file alone decides, too
SIDES = ("global", "micro", "accumulation")


def solve_batch(resolved: Resolved, ranks: int) -> BatchArithmetic:
    """Solve the triangle for `ranks` data-parallel ranks. Raises RecipeError where the numbers cannot fit."""
    batch, given = resolved.recipe.batch, _given(resolved)
    by_layers = any(resolved.given(f"batch.{name}") for name in SIDES)
    if resolved.recipe.program.kind == "deepspeed" and given and not by_layers:
        return _of_engine(resolved, given, ranks)
    if batch.micro == "auto" and "accumulation" not in given:
        return _searched(resolved, given, ranks)
    note = ""
    if len(given) == 3 and solve(_sides(given, ranks)) is None:
        # A DeepSpeed file and the program's own words are weaker than any layer.
        strengths = {
            name: origin.strength if resolved.given(f"batch.{name}") and (origin := _origin(resolved, name)) else -1
            for name in given
        }
        loser = yielding_corner(strengths)
        if loser is None:
            raise RecipeError(_contradiction(resolved, given, ranks))
        beaten, origin = given.pop(loser), _origin(resolved, loser)
        layer = origin.layer if origin else "the defaults"
        note = f"batch.{loser} gives way: it was {beaten} in {layer}, the weakest of the three"
    asked, kind = None if batch.eval_micro == "auto" else batch.eval_micro, resolved.recipe.program.kind
    completes = "global" in given and (kind in TOLD or batch.global_ != "auto")
    if kind != "builtin" and not completes:
        return BatchArithmetic(*_as_given(resolved, given, ranks), ranks, asked, note)
    solved = _complete(resolved, given, ranks)
    eval_micro = asked or (solved.micro if kind == "builtin" else None)
    return BatchArithmetic(solved.global_, solved.micro, solved.accumulation, ranks, eval_micro, note)


def _sides(given: Mapping[str, int], ranks: int) -> Sides:
    return Sides(given.get("global"), given.get("micro"), given.get("accumulation"), ranks)


def _of_engine(resolved: Resolved, given: Mapping[str, int], ranks: int) -> BatchArithmetic:
    """The sizes that DeepSpeed's engine makes of its file alone (runtime/config.py: _set_batch_related_parameters).

    A script may split its model over ranks by itself, so sizes that do not fit are noted, and what they leave is open.
    """
    base = resolved.attachments["strategy.config"].tree
    replicas = load("trainkit.tools.deepspeed.fields:data_parallel_ranks")(base, ranks)
    known = _sides(given, replicas)
    if known.global_ is None or known.micro is None:
        known = known._replace(accumulation=known.accumulation or 1)
    if (solved := solve(known)) and solved.micro:
        return BatchArithmetic(solved.global_, solved.micro, solved.accumulation, ranks, None)
    sizes = ", ".join(f"{_in_file()[name]} {size}" for name, size in given.items())
    note = (
        f"{sizes} in the DeepSpeed file do not fit {pluralize(replicas, 'rank')}: DeepSpeed ends with an error, unless "
        "the script splits its model over several ranks"
    )
    return BatchArithmetic(given.get("global"), given.get("micro"), given.get("accumulation"), ranks, None, note)


def _as_given(resolved: Resolved, given: Mapping[str, int], ranks: int) -> tuple[int | None, int | None, int | None]:
    """(global, micro, accumulation) of a program of the user's own, as far as they are given."""
    micro, accumulation = given.get("micro"), given.get("accumulation")
    if resolved.recipe.program.kind == "deepspeed" and micro and not accumulation:
        accumulation = 1  # as its engine takes it (runtime/config.py: _set_batch_related_parameters)
    solved = solve(Sides(None, micro, accumulation, ranks))
    return given.get("global", solved.global_ if solved else None), micro, accumulation


def _searched(resolved: Resolved, given: dict[str, int], ranks: int) -> BatchArithmetic:
    """The micro batches to choose from: all that divide a rank's share, so that the global batch stays what it is."""
    if "global" not in given:
        problem = resolved.error(
            "batch.micro",
            "batch.micro is auto, and batch.global is not given",
            f"set batch.global; or leave batch.micro out, which makes it {DEFAULT_MICRO}",
            why="the course of training must not depend on what fits in memory, so the global batch has to be given",
        )
        raise RecipeError(problem)
    solved = _complete(resolved, {**given, "micro": 1}, ranks)
    share = solved.accumulation or 1
    sizes = tuple(size for size in range(1, share + 1) if share % size == 0)
    asked = resolved.recipe.batch.eval_micro
    eval_micro = max(size for size in sizes if size <= DEFAULT_MICRO) if asked == "auto" else asked
    return BatchArithmetic(solved.global_, 1, share, ranks, eval_micro, search=sizes if len(sizes) > 1 else ())


def _given(resolved: Resolved) -> dict[str, int]:
    """The sides that the recipe sets, and those that only the program's own words or a DeepSpeed file do."""
    batch, base = resolved.recipe.batch, resolved.attachments.get("strategy.config")
    sides = {"global": batch.global_, "micro": batch.micro, "accumulation": batch.accumulation}
    given = {name: value for name, value in sides.items() if isinstance(value, int)}
    if resolved.recipe.program.kind == "hf":
        given = {**load("trainkit.tools.hf.argv_reader:own_batch")(resolved), **given}
    if batch.micro == "auto" or base is None or not isinstance(base.tree, Mapping):  # a search leaves its sides open
        return given
    in_file = {name: base.tree.get(key) for name, key in _in_file().items()}
    given |= {name: value for name, value in in_file.items() if name not in given and type(value) is int and value > 0}
    if given.keys() == {"global"} and batch.global_ == "auto":
        given["accumulation"] = 1  # as DeepSpeed reads a file with train_batch_size alone
    return {name: given[name] for name in sides if name in given}


def _complete(resolved: Resolved, given: Mapping[str, int], ranks: int) -> Sides:
    """Every side, from what was given and the defaults."""
    known = _sides(given, ranks)
    if known.global_ is None:
        known = known._replace(micro=known.micro or DEFAULT_MICRO, accumulation=known.accumulation or 1)
    elif solve(known) and known.micro is known.accumulation is None:
        share = known.global_ // ranks
        known = known._replace(micro=max(size for size in range(1, DEFAULT_MICRO + 1) if share % size == 0))
    solved = solve(known)
    if solved is None:
        raise RecipeError(_indivisible(resolved, known))
    return solved


def _indivisible(resolved: Resolved, known: Sides) -> Diagnostic:
    """A global batch that the known sides do not divide."""
    total, divisor, by = known.global_ or 0, known.factor, pluralize(known.ranks or 1, "rank")
    below, above = total // divisor * divisor, (total // divisor + 1) * divisor
    for name, size in (("micro", known.micro), ("accumulation", known.accumulation)):
        if size is not None:
            by = f"{name} {size} x {by} = {divisor}"
    return resolved.error(
        "batch.global",
        f"batch.global {total} cannot be divided by {by}",
        f"set batch.global to {below} or {above}" if below else f"set batch.global to {above}",
        why="each rank must see the same number of whole samples in each optimizer step",
        at=_origin(resolved, "global"),
    )


def _contradiction(resolved: Resolved, given: dict[str, int], ranks: int) -> Diagnostic:
    micro, accumulation, product = given["micro"], given["accumulation"], _sides(given, ranks).factor
    origins = {name: _origin(resolved, name) for name in given}
    places = ", ".join(f"batch.{name} {given[name]} ({at.place if at else 'default'})" for name, at in origins.items())
    return resolved.error(
        "batch.global",
        f"the batch triangle contradicts itself: {places}",
        f"leave one of the three out, or set batch.global to {product}",
        why=f"micro {micro} x accumulation {accumulation} x {ranks} ranks is {product}, not {given['global']}",
        at=_origin(resolved, "global"),
    )


def _in_file() -> Mapping[str, str]:
    """What a DeepSpeed file of the user's calls the sides; it counts where no layer gives a value."""
    return {row.keys[0].removeprefix("batch."): row.name for row in load("trainkit.tools.deepspeed.fields:BATCH")}


def _origin(resolved: Resolved, name: str) -> Origin | None:
    key, base = f"batch.{name}", resolved.attachments.get("strategy.config")
    if base and not resolved.given(key) and (in_file := base.origins.get(_in_file()[name])):
        return in_file
    return resolved.origin(key)
