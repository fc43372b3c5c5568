"""What a change of the recipe would do to memory and time: one setting after the other, in the guides' order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainkit.errors import RecipeError
from trainkit.foresight.estimate import Foresee
from trainkit.launch_plan.context import Context
from trainkit.launch_plan.model import BatchArithmetic, Foresight
from trainkit.lazy import call, load
from trainkit.optimizers import OPTIMIZERS
from trainkit.planner.rules import compatibility_rules
from trainkit.recipe.grid import grid_sizes
from trainkit.recipe.schema import HfModel, Recipe
from trainkit.rule import check
from trainkit.text import join_names
from trainkit.tools.registry import choose_launcher

Settings = Mapping[str, Any]  # by dotted key
RECOMPUTING = "efficiency.gradient_checkpointing"
own_flags: Callable[..., Mapping[str, Any]] = call("trainkit.tools.hf.argv_reader:own_flags")  # few plans need it


@dataclass(frozen=True, slots=True)
class Change:
    """Settings to change. same: whether the same numbers are trained; costs: what it takes, in words."""

    settings: Settings
    same: bool = True
    costs: str = ""

    @property
    def words(self) -> str:
        """As they are typed behind a command."""
        told = dict(self.settings)
        if told.get(f"{RECOMPUTING}.selective") is False:  # which it is by itself
            every = told.pop(f"{RECOMPUTING}.every")
            del told[f"{RECOMPUTING}.selective"]
            told[RECOMPUTING] = bool(every)
        return " ".join(f"{key}={_typed(value)}" for key, value in told.items())


@dataclass(frozen=True, slots=True)
class Changed:
    """A change and what it would come to."""

    change: Change
    foresight: Foresight


def _typed(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def with_settings(context: Context, settings: Settings) -> Context:
    """The same plan with other settings, as far as an estimate looks at it. ValueError where they contradict."""
    sections = context.recipe.model_dump(mode="json", by_alias=True)
    batch = context.batch
    for key, value in settings.items():
        section, _, name = key.partition(".")
        if section == "batch":
            batch = replace(batch, **{name: value}, search=())
        elif name == "kind" and section == "strategy":
            sections[section] = {"kind": value}
        else:
            inner, *deeper = name.split(".")
            target = sections[section]
            if deeper:
                target, inner = target.setdefault(inner, {}), deeper[0]
            target[inner] = value
    recipe = Recipe.model_validate(sections)
    dtype = settings.get("precision.dtype", context.dtype)
    other = replace(context, resolved=replace(context.resolved, recipe=recipe), batch=batch, dtype=dtype)
    if "nodes.count" in settings:
        (group,) = other.topology.groups
        topology = replace(other.topology, groups=(replace(group, count=settings["nodes.count"]),))
        other = replace(other, topology=topology, launcher=choose_launcher(recipe, topology).kind)
    return replace(other, batch=_spread(other))


def _spread(context: Context) -> BatchArithmetic:
    """The same global batch over the ranks that have samples of their own. ValueError where it has no share of each."""
    batch, ranks = context.batch, context.topology.world_size // grid_sizes(context.recipe).alike
    if ranks == batch.ranks or not (batch.global_ and batch.micro):
        return replace(batch, ranks=ranks)
    accumulation, rest = divmod(batch.global_, batch.micro * max(1, ranks))
    if rest or not ranks:
        raise ValueError(f"{batch.global_} samples are no multiple of {ranks} micro batches of {batch.micro}")
    return replace(batch, ranks=ranks, accumulation=accumulation)


def candidates(context: Context) -> Iterator[Change]:
    """Changes that are not in force yet and that the program takes, in the order in which the guides take them."""
    if context.program == "builtin":
        yield from _candidates(context)
        return
    # Of a script on Trainer, what the recipe hands to TrainingArguments, where its own arguments do not decide it.
    said = own_flags(context.resolved)
    fields = load("trainkit.tools.hf.fields:FIELDS")
    takes = {key for field in fields if field.name not in said for key in field.keys}
    for change in _candidates(context):
        if {key for key in change.settings if change.settings[key] is not False} <= takes:
            yield change


def _candidates(context: Context) -> Iterator[Change]:
    recipe, batch = context.recipe, context.batch
    micro, accumulation = batch.micro or 1, batch.accumulation or 1
    smaller = [each for each in range(micro - 1, 0, -1) if micro % each == 0]
    for less in sorted({*smaller[:1], *smaller[2:3], *smaller[-1:]}, reverse=True):  # as a half, an eighth, and one
        step = {"batch.micro": less, "batch.accumulation": accumulation * micro // less}
        yield Change(step, costs="more passes in a step")
    if context.dtype == "fp32" and (not context.cards or context.cards[0].compute_capability >= (8, 0)):
        yield Change({"precision.dtype": "bf16"}, same=False, costs="rounds products to 16 bits")
    yield from _recomputing(recipe)
    strategy = recipe.strategy.kind
    own = OPTIMIZERS.get(recipe.optimizer.name)
    for name, each in OPTIMIZERS.items() if own and own.keeps == "moments" else ():
        refused = any(strategy in one.strategies or _device(context) in one.devices for one in each.unsupported)
        if each.lighter and not refused and (context.cards or not each.requires):
            yield Change({"optimizer.name": name}, same=False, costs=each.lighter)
    if accumulation > 1 and (reduces := getattr(recipe.strategy, "reduce_gradients", "")):
        if reduces == "once":
            yield Change({"strategy.reduce_gradients": "each_micro_step"}, costs="more traffic")
        else:
            yield Change({"strategy.reduce_gradients": "once"}, costs="whole gradients on each rank, less traffic")
    parts = max((each for each in (2, 4, 8) if context.processes % each == 0), default=1)
    if strategy == "fsdp" and context.program == "builtin" and parts > 1 == grid_sizes(recipe).context:
        yield Change({"strategy.context": parts}, costs="waits for others' keys and values")
    if context.ranks > 1:
        for kind in ("zero2", "fsdp", "zero3"):
            if kind != strategy and not (strategy in ("fsdp", "zero3") and kind == "zero2"):
                yield Change({"strategy.kind": kind}, costs="traffic between ranks")
    if recipe.peft.kind == "none" and isinstance(recipe.model, HfModel):
        yield Change({"peft.kind": "lora"}, same=False, costs="trains adapters alone")
    plain = context.cards and strategy in ("single", "ddp") and isinstance(recipe.model, HfModel)
    if recipe.peft.kind == "lora" and plain and not recipe.model.quantize.bits:  # type: ignore[union-attr]
        yield Change({"model.quantize.bits": 4}, same=False, costs="frozen weights in 4 bits")
    yield from _offloading(context)
    length = getattr(recipe.data, "sequence_length", None)
    if isinstance(length, int) and length >= 256:
        yield Change({"data.sequence_length": length // 2}, same=False, costs="shorter samples")


def _device(context: Context) -> str:
    return context.topology.device


def _recomputing(recipe: Recipe) -> Iterator[Change]:
    asked = recipe.efficiency.gradient_checkpointing
    if not asked.every:
        yield Change(
            {f"{RECOMPUTING}.every": 1, f"{RECOMPUTING}.selective": True}, costs="computes again what is quick"
        )
    if not asked.every or asked.selective or int(asked.every) > 1:
        yield Change({f"{RECOMPUTING}.every": 1, f"{RECOMPUTING}.selective": False}, costs="computes each block twice")


def _offloading(context: Context) -> Iterator[Change]:
    if not context.cards:
        return
    strategy, kind = context.recipe.strategy, context.recipe.strategy.kind
    efficiency = context.recipe.efficiency
    if not efficiency.offload_activations and not efficiency.compile.enabled:
        yield Change({"efficiency.offload_activations": True}, costs="waits for the machine's memory")
    if kind == "fsdp" and not strategy.offload:  # type: ignore[union-attr]
        yield Change({"strategy.offload": True}, costs="waits for the machine's memory")
    for name in ("offload_optimizer", "offload_param"):
        if getattr(strategy, name, None) == "none":
            yield Change({f"strategy.{name}": "cpu"}, costs="waits for the machine's memory")
    if kind in ("single", "ddp"):
        settings = {"strategy.kind": "zero3", "strategy.offload_optimizer": "cpu", "strategy.offload_param": "cpu"}
        yield Change(settings, costs="waits for the machine's memory")


def possible(context: Context) -> bool:
    """Whether the choices of a plan can run together."""
    return not check(compatibility_rules(context), context)


def made(context: Context, change: Change, foresee: Foresee) -> Changed | None:
    """What a change comes to; None where it contradicts the rest, or nothing can be told of it."""
    try:
        other = with_settings(context, change.settings)
        found = foresee(other) if possible(other) else None
    except (ValueError, RecipeError):  # it contradicts the rest, or a file of the user's
        return None
    return Changed(change, found) if found else None


def what_if(context: Context, foresee: Foresee) -> list[Changed]:
    """Each change that is possible, with what it comes to: the greatest saving first."""
    found = (made(context, change, foresee) for change in candidates(context))
    return sorted((each for each in found if each), key=lambda each: each.foresight.total)


def fits(found: Foresight) -> bool:
    """Whether a run fits, from its start on, with the margin."""
    return found.verdict == found.start_verdict == "fits"


def remedy(context: Context, foresee: Foresee) -> Changed | None:
    """The change with which a plan fits: the quickest that trains the same numbers, else the first that does not.

    Where no single one suffices they are taken together, in the guides' order. None where nothing helps.
    """
    single = [each for change in candidates(context) if (each := made(context, change, foresee))]
    enough = [each for each in single if fits(each.foresight)]
    same = [each for each in enough if each.change.same]
    if same:
        return min(same, key=lambda each: each.foresight.step or 0.0)
    together: dict[str, Any] = {}
    for change in _escalation(context):
        wider = Change({**together, **change.settings}, costs=change.costs)
        found = made(context, wider, foresee)
        if found is None:
            continue
        together = dict(wider.settings)
        if fits(found.foresight):
            return _relaxed(context, found, foresee)
    if enough:
        return enough[0]
    for change in candidates(context):
        if not change.same:
            found = made(context, Change({**together, **change.settings}, same=False, costs=change.costs), foresee)
            if found is not None and fits(found.foresight):
                return found
    return None


def _relaxed(context: Context, found: Changed, foresee: Foresee) -> Changed:
    """The same with less of what turns out not to be needed: without checkpointing, and with a larger micro batch."""
    settings = found.change.settings

    def tried(other: Settings) -> Changed | None:
        changed = made(context, Change(other, found.change.same, found.change.costs), foresee)
        return changed if changed and fits(changed.foresight) else None

    plain = {key: value for key, value in settings.items() if not key.startswith(RECOMPUTING)}
    best = (tried(plain) if plain.keys() != settings.keys() else None) or found
    if "batch.micro" not in settings:
        return best
    micro, whole = context.batch.micro or 1, settings["batch.accumulation"]
    for size in (each for each in range(2, micro + 1) if micro % each == 0):
        sizes = {"batch.micro": size, "batch.accumulation": whole // size}
        if size == micro:
            sizes = {}
        kept = {key: value for key, value in best.change.settings.items() if not key.startswith("batch.")}
        larger = tried({**sizes, **kept})
        if larger is None:
            break
        best = larger
    return best


def _escalation(context: Context) -> Iterator[Change]:
    """What is taken together, one after the other, where one change does not suffice."""
    micro, accumulation, strategy = context.batch.micro or 1, context.batch.accumulation or 1, context.strategy
    if micro > 1:
        yield Change({"batch.micro": 1, "batch.accumulation": accumulation * micro})
    yield from (each for each in _recomputing(context.recipe) if not each.settings[f"{RECOMPUTING}.selective"])
    if context.ranks > 1 and strategy not in ("fsdp", "zero3"):
        yield Change({"strategy.kind": "fsdp"})
    if not context.cards:
        return
    if context.ranks > 1:
        yield Change({"strategy.kind": "fsdp", "strategy.offload": True})
    for kind in ("zero2", "zero3"):
        yield Change({"strategy.kind": kind, "strategy.offload_optimizer": "cpu"})
    settings = {"strategy.kind": "zero3", "strategy.offload_optimizer": "cpu", "strategy.offload_param": "cpu"}
    yield Change(settings)


def on_more_nodes(context: Context, foresee: Foresee) -> Changed | None:
    """The fewest nodes like these on which a plan fits that divides the model over all of its ranks; doubled in turn.

    None where none do: a strategy that does not, or more ranks than the global batch has micro batches.
    """
    batch, nodes = context.batch, context.topology.nodes
    if context.program != "builtin" or context.strategy not in ("fsdp", "zero3"):
        return None
    if not (batch.global_ and batch.micro):
        return None
    counts, alike = list[int](), grid_sizes(context.recipe).alike
    while batch.global_ * alike % (batch.micro * context.processes * nodes * 2) == 0:
        counts.append(nodes := nodes * 2)
    best: Changed | None = None
    low, high = 0, len(counts) - 1
    place = high  # where the most do not suffice, none do
    while low <= high:
        change = Change({"nodes.count": counts[place]}, costs=f"{counts[place]} such machines")
        found = made(context, change, foresee)
        if found is not None and fits(found.foresight):
            best, high = found, place - 1
        else:
            low = place + 1
        place = (low + high) // 2
    return best


def needless(context: Context, foresee: Foresee) -> Iterator[tuple[str, Changed]]:
    """Techniques without which a plan fits too, each with what it is like without: they only cost time."""
    recipe, strategy = context.recipe, context.recipe.strategy
    batch = context.batch
    offloads = [name for name in ("offload", "offload_optimizer", "offload_param")
                if getattr(strategy, name, None) not in (None, False, "none")]  # fmt: skip
    plain = "ddp" if context.ranks > 1 else "single"
    asked: list[tuple[str, Settings]] = []
    if strategy.kind not in ("single", "ddp"):
        asked.append((f"strategy.kind {strategy.kind}", {"strategy.kind": plain}))
    if offloads:
        without = {f"strategy.{name}": False if name == "offload" else "none" for name in offloads}
        asked.append((join_names([f"strategy.{name}" for name in offloads]), without))
    if recipe.efficiency.gradient_checkpointing.every:
        asked.append((RECOMPUTING, {f"{RECOMPUTING}.every": False, f"{RECOMPUTING}.selective": False}))
    if (batch.accumulation or 1) > 1 and batch.micro:
        whole = {"batch.micro": batch.micro * batch.accumulation, "batch.accumulation": 1}  # type: ignore[operator]
        asked.append((f"batch.accumulation {batch.accumulation}", whole))
    for what, settings in asked:
        found = made(context, Change(settings), foresee)
        if found is not None and fits(found.foresight):
            yield what, found
