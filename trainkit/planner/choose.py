"""`strategy.kind: auto` and `batch.micro: auto`: the quickest that fits, by its estimate; the numbers stay the same.

The guides' decision tree follows from it: what fits on one GPU is not divided, what does not is divided as little as
suffices, and what is still too large is offloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainkit.errors import Origin, RecipeError
from trainkit.foresight.estimate import Foresee
from trainkit.launch_plan.context import Context
from trainkit.launch_plan.model import Foresight
from trainkit.planner.changes import Settings, fits, possible, with_settings
from trainkit.recipe.resolved import Entry, Resolved
from trainkit.recipe.schema import Recipe
from trainkit.text import format_memory

EVERY, SELECTIVE = "efficiency.gradient_checkpointing.every", "efficiency.gradient_checkpointing.selective"
_OPTIMIZER = {"strategy.offload_optimizer": "cpu"}
_BOTH = {**_OPTIMIZER, "strategy.offload_param": "cpu"}
# The strategies, the simpler first, with as many ranks as there are devices.
ONE: tuple[Settings, ...] = (
    {"strategy.kind": "single"},
    {"strategy.kind": "zero2", **_OPTIMIZER},
    {"strategy.kind": "zero3", **_BOTH},
)
SEVERAL: tuple[Settings, ...] = (
    {"strategy.kind": "ddp"},
    {"strategy.kind": "zero2"},
    {"strategy.kind": "fsdp"},
    {"strategy.kind": "zero3"},
    {"strategy.kind": "fsdp", "strategy.offload": True},
    {"strategy.kind": "zero2", **_OPTIMIZER},
    {"strategy.kind": "zero3", **_BOTH},
)
RECOMPUTING: tuple[Settings, ...] = ({}, {EVERY: 1, SELECTIVE: True}, {EVERY: 1, SELECTIVE: False})
ALIKE = 1.02  # times as long a step may take, and the simpler still counts as no slower
Plan = Callable[[Resolved], Context]


@dataclass(frozen=True, slots=True)
class Candidate:
    """What may be chosen, and what it comes to. place: in the order from simple to complicated."""

    settings: Settings
    context: Context
    foresight: Foresight
    place: int

    @property
    def words(self) -> str:
        """In a few words."""
        batch, asked = self.context.batch, self.context.recipe.efficiency.gradient_checkpointing
        more = [key.partition(".")[2] for key, value in self.settings.items() if key.startswith("strategy.offload")]
        more += ["checkpointing" if not asked.selective else "selective checkpointing"] if asked.every else []
        time = f", {self.foresight.step:.3g} s a step" if self.foresight.step else ""
        sizes = f"micro batch {batch.micro} x accumulation {batch.accumulation}"
        told = " and ".join([self.context.strategy, *more])
        return f"{told}, {sizes} ({format_memory(self.foresight.total)}{time})"


def chosen(resolved: Resolved, plan: Plan, foresee: Foresee) -> Resolved:
    """The recipe with a strategy, checkpointing and sizes in place of `auto`. Raises RecipeError as `plan` does."""
    kinds, base = _kinds(resolved, plan)
    first = {"strategy.kind": base.strategy}
    if foresee(base) is None:
        why = "what the model takes cannot be told: the simplest strategy is taken"
        return _settled(resolved, first, why)
    found = list(_candidates(resolved, plan, kinds, foresee))
    if not found:
        return _settled(resolved, first, "no other strategy can run here")
    best, *others = _ranked(found)
    why = f"chosen by its estimate: {best.words}"
    if not fits(best.foresight):
        why = f"no strategy fits, and this is the one that takes least: {best.words}"
    elif others:
        why += f"; next: {others[0].words}"
    return _settled(resolved, best.settings, why)


def why_chosen(resolved: Resolved) -> str:
    """Why the plan has chosen the strategy; empty where the recipe names one."""
    entries = resolved.history.get("strategy.kind", ())
    return entries[-1].note if len(entries) > 1 and entries[-2].value == "auto" else ""


def chosen_micro(context: Context, foresee: Foresee) -> Context:
    """The plan with the micro batch for `batch.micro: auto`, where it can be told; else as it is, to be tried out."""
    share = (context.batch.micro or 1) * (context.batch.accumulation or 1)
    made = []
    for micro in context.batch.search:
        other = with_settings(context, {"batch.micro": micro, "batch.accumulation": share // micro})
        found = foresee(other)
        if found is None or not fits(found):
            break
        made.append(Candidate({}, other, found, 0))
    if not made:
        return context
    best = _ranked(made)[0]
    batch = best.context.batch
    note = f"batch.micro is auto: {batch.micro} is the quickest that fits, by its estimate"
    evaluates = batch.micro if context.recipe.batch.eval_micro == "auto" else batch.eval_micro
    return replace(best.context, batch=replace(batch, eval_micro=evaluates, note=note, search=()))


def _kinds(resolved: Resolved, plan: Plan) -> tuple[Sequence[Settings], Context]:
    """The strategies for the devices that there are, and the plan of the simplest."""
    shared_out = getattr(getattr(resolved.recipe.model, "moe", None), "parallel", 1) > 1  # which fsdp alone does
    several = [kind for kind in SEVERAL if kind["strategy.kind"] == "fsdp"] if shared_out else SEVERAL
    try:
        base = plan(_settled(resolved, several[0], ""))
    except RecipeError:  # a device that takes one process
        return ONE[:1], plan(_settled(resolved, ONE[0], ""))
    if base.ranks > 1:
        return several, base
    return ONE, plan(_settled(resolved, ONE[0], ""))


def _candidates(resolved: Resolved, plan: Plan, kinds: Sequence[Settings], foresee: Foresee) -> Iterator[Candidate]:
    recomputing = RECOMPUTING if not resolved.given(EVERY) else RECOMPUTING[:1]
    for place, kind in enumerate(kinds):
        try:
            context = plan(_settled(resolved, kind, ""))
        except RecipeError:
            continue
        for level, more in enumerate(recomputing):
            tried = _Sizes(kind, {**more}, context, foresee, place * len(RECOMPUTING) + level)
            fitting, least = tried.largest(_sizes(resolved, context))
            if least is not None:
                yield fitting or least
            if fitting is not None and fitting.context.batch.accumulation == 1:
                break  # the largest fits: recomputing would only take time
            if least is None or (fitting is None and not _recomputing_helps(least)):
                break
        else:
            continue
        if fitting is not None and not any(key.startswith("strategy.offload") for key in kind):
            return  # what is more complicated is not quicker


def _recomputing_helps(found: Candidate) -> bool:
    """Whether it would fit without activations."""
    small = sum(size for name, size in found.foresight.parts if name in ("activations", "temporaries", "loss"))
    return found.foresight.total - small < found.foresight.limit


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Micro batches of one strategy with one way to recompute."""

    kind: Settings
    more: Settings
    context: Context
    foresee: Foresee
    place: int

    def largest(self, sizes: Sequence[Settings]) -> tuple[Candidate | None, Candidate | None]:
        """The largest that fits, and the smallest of all; None for what can neither run nor be told."""
        least = self._tried(sizes[0])
        if least is None or not fits(least.foresight):
            return None, least
        low, high, best = 0, len(sizes), least  # the largest known to fit, and the smallest known not to
        place = high - 1  # at first the largest of all: it may well fit
        while place > low:
            found = self._tried(sizes[place])
            if found is not None and fits(found.foresight):
                low, best = place, found
            else:
                high = place
            place = (low + high) // 2
        return best, least

    def _tried(self, sizes: Settings) -> Candidate | None:
        try:
            other = with_settings(self.context, {**self.more, **sizes})
            found = self.foresee(other) if possible(other) else None
        except (ValueError, RecipeError):
            return None
        return Candidate({**self.kind, **self.more, **sizes}, other, found, self.place) if found else None


def _sizes(resolved: Resolved, context: Context) -> list[Settings]:
    """Micro batches with their accumulation, the smallest first; one alone where the recipe gives it."""
    batch = context.batch
    fixed = isinstance(resolved.recipe.batch.micro, int) or resolved.given("batch.accumulation")
    if fixed or not batch.micro or not batch.accumulation:
        return [{}]
    share = batch.micro * batch.accumulation
    return [
        {"batch.micro": size, "batch.accumulation": share // size} for size in range(1, share + 1) if share % size == 0
    ]


def _ranked(found: Sequence[Candidate]) -> list[Candidate]:
    """The best first: what fits, by its time, and of equal ones the simpler; without any, what takes least."""
    fitting = [each for each in found if fits(each.foresight)]
    if not fitting:
        return sorted(found, key=lambda each: each.foresight.total)
    quickest = min(each.foresight.step or 0.0 for each in fitting)

    def order(each: Candidate) -> tuple[float, int, int]:
        time = each.foresight.step or 0.0
        alike = time <= ALIKE * quickest
        return (0.0 if alike else time, each.place, -(each.context.batch.micro or 0))

    ranked = sorted(fitting, key=order)
    # The runner-up is another strategy, or another way to recompute.
    best = ranked[0]
    return [best, *(each for each in ranked if each.place != best.place)]


def _settled(resolved: Resolved, settings: Settings, why: str) -> Resolved:
    """The recipe with settings, each with why it is so."""
    sections = resolved.recipe.model_dump(mode="json", by_alias=True, exclude_unset=True)
    history, origin = dict(resolved.history), resolved.origin("strategy.kind") or Origin("the defaults", 0, "")
    for key, value in settings.items():
        *path, name = key.split(".")
        target: dict[str, Any] = sections
        for part in path:
            inner = target.get(part)
            target[part] = target = dict(inner) if isinstance(inner, Mapping) else {}
        target[name] = value
        if why:
            history[key] = (*history.get(key, ()), Entry(value, origin, note=why, implied=key != "strategy.kind"))
    return replace(resolved, recipe=Recipe.model_validate(sections), history=history)
