"""What a plan takes on each rank, whether that fits, and how long it takes."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any

from trainkit import __version__
from trainkit.data.formats import packing_of
from trainkit.decode import decode
from trainkit.foresight.allocator import OutOfMemoryError, replay
from trainkit.foresight.calibration import Record, calibrated
from trainkit.foresight.memory import STRATEGIES, simulate
from trainkit.foresight.own import as_builtin
from trainkit.foresight.speed import Pace, StepTime, step_time, work_of
from trainkit.foresight.strategies import Run, Whole
from trainkit.foresight.trace import PARAMETERS, PARTS, STATE, Trace, Wanted
from trainkit.foresight.updates import Tensor, state
from trainkit.launch_plan.context import Context
from trainkit.launch_plan.model import Foresight
from trainkit.lazy import call
from trainkit.machine.accelerators import accelerator
from trainkit.machine.capability import AMPERE, HOPPER
from trainkit.recipe.grid import HYBRID, grid_sizes
from trainkit.recipe.schema import DatasetData, Recipe
from trainkit.tasks import CAUSAL, task_of

if TYPE_CHECKING:
    from trainkit.foresight.use import Use

Tree = Mapping[str, Any]
# The trace of what is wanted and how it was come by: `traced` or `formula`; None where there is none.
Tracing = Callable[[Wanted], tuple[Trace, str] | None]
Foresee = Callable[[Context], Foresight | None]  # the estimate of a plan; None where none can be made
formula: Callable[..., Any] = call("trainkit.foresight.formula:formula")
segments_grow: Callable[[Context], bool] = call("trainkit.planner.env:segments_grow")
deepspeed_config: Callable[..., Any] = call("trainkit.tools.deepspeed.config:deepspeed_config")  # few plans need it

MIB, GIB = 2**20, 2**30
MARGINS: Mapping[str, float] = {"traced": 0.05, "remembered": 0.02, "formula": 0.08}
UNMEASURED = 0.01  # more, of a card whose context was never measured
# What a process takes on a GPU before torch allocates anything: CUDA's context, kernels, libraries. It differs by card
# and driver; a measured one takes its place.
CONTEXT = 520 * MIB
# What a rank takes of the machine's memory beside tensors: Python, torch, and the libraries of CUDA on a GPU.
PROCESS: Mapping[str, int] = {"cpu": 450 * MIB, "cuda": 1800 * MIB}
WORKER = 300 * MIB  # of a process that loads data
SOFTWARE = ("torch", "transformers", "peft", "bitsandbytes")  # whose versions a trace depends on
SECTIONS = ("model", "data", "precision", "efficiency", "peft", "strategy")  # of a recipe, that a trace depends on
LENGTH = 2048  # tokens of a sample, where the data decide it and have not been prepared


def wanted_of(context: Context, micro: int | None = None) -> Wanted:
    """The trace that a plan's estimate is made from. micro: another micro batch than the plan's."""
    recipe, card = settled(context), context.cards[0] if context.cards else None
    sections = recipe.model_dump(mode="json", by_alias=True)
    given = {name: sections[name] for name in SECTIONS}
    if recipe.train.loss is not None:
        given["train"] = {"loss": recipe.train.loss, "loss_reduction": recipe.train.loss_reduction}
    if given["strategy"]["kind"] in ("single", "ddp"):  # they differ in nothing that a model sees
        given["strategy"] = {"kind": "single"}
    elif given["strategy"]["kind"] in ("zero1", "zero2"):
        given["strategy"] = {"kind": "zero1"}
    elif given["strategy"]["kind"] == "zero3":
        given["strategy"] = {"kind": "zero3"}
    packed = recipe.data.kind == "dataset" and packing_of(recipe, context.model_type) == "isolated"
    padded = recipe.data.kind == "dataset" and task_of(recipe) != CAUSAL
    versions = {name: context.facts.packages[name] for name in SOFTWARE if name in context.facts.packages}
    return Wanted(
        recipe=given,
        micro=micro or context.batch.micro or 1,
        device="cuda" if context.cards else "cpu",
        dtype=context.dtype,
        capability=min(card.compute_capability, AMPERE) if card else (0, 0),
        packed=packed,
        padded=padded,
        software=versions,
    )


def settled(context: Context) -> Recipe:
    """The recipe with a length of samples where it leaves that to data which nobody has prepared yet.

    Of a script of one's own, what takes as much; `why_not` tells where nothing is known.
    """
    if context.program != "builtin":
        found = as_builtin(context)
        return found if isinstance(found, Recipe) else context.recipe
    recipe, data = context.recipe, context.recipe.data
    if getattr(data, "sequence_length", None) != "auto":
        return recipe
    length = context.seen.length or LENGTH
    changed: dict[str, Any] = {"sequence_length": length}
    if getattr(data, "target_length", None) == "auto":
        changed["target_length"] = length
    return recipe.model_copy(update={"data": data.model_copy(update=changed)})


def run_of(context: Context) -> Run:
    """What of a plan decides a rank's memory."""
    recipe, card = settled(context), context.cards[0] if context.cards else None
    return Run(
        strategy=recipe.strategy.kind,
        ranks=context.ranks,
        local=context.processes,
        copies=_copies(context, recipe),
        accumulation=context.batch.accumulation or 1,
        dtype=context.dtype,
        weights=recipe.precision.weights,
        device="cuda" if context.cards else "cpu",
        capability=min(card.compute_capability, HOPPER) if card else (0, 0),
        optimizer=recipe.optimizer.name,
        momentum=recipe.optimizer.beta1,
        offloads_activations=recipe.efficiency.offload_activations,
        options=recipe.strategy.model_dump(mode="json"),
        deepspeed=deepspeed_config(context, "builtin")[0] if context.zero else {},
    )


def _copies(context: Context, recipe: Recipe) -> int:
    """How many copies of the model are kept. Own scripts of FSDP's first version keep one on each node."""
    own = context.program != "builtin" and getattr(recipe.strategy, "sharding", "") in HYBRID
    return context.topology.nodes if own else grid_sizes(recipe).copies


def why_not(context: Context) -> str:
    """Why nothing can be told of a plan; empty where it can."""
    recipe, device = context.recipe, context.topology.device
    if recipe.program.kind != "builtin" and isinstance(why := as_builtin(context), str):
        return why
    if device not in ("cpu", "cuda") or (device == "cuda" and not context.cards):
        return f"the memory of {device} is not modelled" if device != "cuda" else "the machine has no such GPU"
    if recipe.strategy.kind not in STRATEGIES:
        return f"strategy.kind {recipe.strategy.kind} is not modelled"
    if context.batch.micro is None:
        return "the micro batch is not known"
    return ""


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured on this very device. outside: bytes of a process beside what torch allocates."""

    records: tuple[Record, ...] = ()
    outside: int | None = None


def by_formula(context: Context) -> Foresight | None:
    """The estimate of a plan from the sizes of its model's architecture: in milliseconds, or a second for 80 layers."""
    return foreseen(context, partial(_formula, context))


def known_or_formula(context: Context, known: Callable[[Wanted], Trace | None]) -> Tracing:
    """A trace that was made before, else one by the architecture's sizes."""

    def tracing(wanted: Wanted) -> tuple[Trace, str] | None:
        trace = known(wanted)
        return (trace, "traced") if trace else _formula(context, wanted)

    return tracing


def _formula(context: Context, wanted: Wanted) -> tuple[Trace, str] | None:
    trace = _kept_formula(json.dumps(asdict(wanted)), json.dumps(dict(context.resolved.described.model), default=str))
    return (trace, "formula") if trace else None


@lru_cache(maxsize=8)  # strategies and limits are compared on the same traces
def _kept_formula(wanted: str, model: str) -> Trace | None:
    found: Trace | None = formula(decode(Wanted, json.loads(wanted)), json.loads(model))
    return found


def foreseen(context: Context, tracing: Tracing, measured: Measured | None = None) -> Foresight | None:
    """The estimate of a plan; None where none can be made."""
    found = estimated(context, tracing, measured)
    return found.foresight() if found else None


def estimated(context: Context, tracing: Tracing, measured: Measured | None = None) -> Estimate | None:
    """The same with its timelines."""
    found = None if why_not(context) else tracing(wanted_of(context))
    return Estimate(context, found[0], found[1], measured or Measured()) if found else None


def digest_of(context: Context, measured: Measured, *, traced: bool) -> str:
    """SHA-256 of all that an estimate follows from. traced: whether it is made from a trace."""
    recipe, facts = context.recipe, context.facts
    follows = (
        __version__,
        wanted_of(context).key,
        asdict(run_of(context)),
        asdict(measured),
        traced,
        context.resolved.described.model,
        [recipe.checkpoint.model_dump(mode="json"), recipe.train.steps, recipe.train.epochs, recipe.env],
        [asdict(context.batch), context.seen.rows, context.processes, context.topology.nodes],
        [limit_of(context), facts.memory_total, facts.cpu_cores, facts.price_per_hour, facts.allocator],
        [each.name for each in context.cards],
    )
    return hashlib.sha256(json.dumps(follows, sort_keys=True, default=str).encode()).hexdigest()


def limit_of(context: Context) -> int:
    """Bytes that a rank may take on its device."""
    if context.cards:
        return min(each.memory_total - each.memory_reserved for each in context.cards)
    return context.facts.memory_total // context.processes


class Estimate:
    """The estimate of one plan, and the timelines that it is made from."""

    def __init__(self, context: Context, trace: Trace, basis: str, measured: Measured) -> None:
        self.context, self.trace, self.run, self.basis = context, trace, run_of(context), basis
        self.strategy: Whole = simulate(trace, self.run)
        card = accelerator(context.cards[0].name) if context.cards else None
        sheet = Pace.of(card, tf32=bool(context.recipe.precision.tf32)) if card else None
        cores = max(1, context.facts.cpu_cores // context.processes)
        rates = sheet if context.cards else Pace.of_cores(cores)
        self.pace = calibrated(rates, measured.records) if rates else None
        self.outside = measured.outside or (CONTEXT if context.cards else PROCESS["cpu"])
        self.margin = MARGINS[basis] + (UNMEASURED if context.cards and measured.outside is None else 0)

    def foresight(self) -> Foresight:
        """As the plan has it."""
        context, device = self.context, self.strategy.device
        limit, reserved = limit_of(context), self.reserved
        parts = dict(device.parts())
        if reserved > device.peak:
            parts["fragmentation"] = reserved - device.peak
        parts["process" if self.run.device == "cpu" else "context"] = self.outside
        time = step_time(self.trace, self.run, self.pace) if self.pace else None
        start, start_verdict = self.start()
        tokens = self.tokens()
        steps = self.steps()
        hours = time.total * steps / 3600 if time and steps else None
        price = context.facts.price_per_hour
        return Foresight(
            basis=self.basis,
            margin=self.margin,
            parts=tuple(parts.items()),
            total=reserved + self.outside,
            limit=limit,
            verdict=self.verdict(limit),
            moment=device.peak_moment,
            operator=device.peak_operator,
            allocated=device.peak,
            reserved=reserved,
            host=self.host(),
            host_limit=context.facts.memory_total,
            start=start,
            start_verdict=start_verdict,
            step=rounded(time.total) if time else None,
            tokens_per_second=rounded(tokens * context.batch.ranks / time.total) if time and tokens else None,
            peak_share=self.peak_share(time) if time else None,
            hours=rounded(hours) if hours else None,
            price=rounded(hours * price * context.topology.nodes) if hours and price else None,
            disk=self.disk(),
            checkpoint=self.checkpoint(),
            work=work_of(self.trace, self.run),
            notes=self.notes(),
        )

    @cached_property
    def reserved(self) -> int:
        """What the allocator holds at its highest; what the tensors take on a CPU, and where these are too many."""
        peak = self.strategy.device.peak
        if self.run.device == "cpu" or peak + self.outside > limit_of(self.context):
            return peak
        return replay(self.strategy.device, expandable=self.expandable).peak_reserved

    @cached_property
    def expandable(self) -> bool:
        """Whether the allocator's segments grow."""
        return segments_grow(self.context)

    def verdict(self, limit: int) -> str:
        """Whether it fits, with the margin of what is foreseen or without it.

        An allocator that is short gives back what is free. What is offloaded must fit in the machine's memory, too.
        """
        if self.run.device != "cpu" and self.host() > self.context.facts.memory_total > 0:
            return "too large"
        for word, share in (("fits", 1 + self.margin), ("tight", 1.0)):
            if self._within(int((limit - self.outside) / share)):
                return word
        return "too large"

    def _within(self, room: int) -> bool:
        if self.reserved <= room:
            return True
        if self.run.device == "cpu" or self.strategy.device.peak > room:
            return False
        try:
            replay(self.strategy.device, room, expandable=self.expandable)
        except OutOfMemoryError:
            return False
        return True

    def start(self) -> tuple[tuple[int, int], str]:
        """Bytes before the first step, on the device and on the machine, where these are more than a step takes."""
        device, host = self.strategy.start_peak()
        room = limit_of(self.context) - self.outside
        memory = self.context.facts.memory_total - self.context.processes * PROCESS[self.run.device]
        all_of_host = host * self.context.processes
        verdict = "too large" if device > room or all_of_host > memory > 0 else "fits"
        shown = device if device > self.strategy.device.peak else 0, all_of_host
        return (shown if verdict != "fits" or shown[0] else (0, all_of_host)), verdict

    def host(self) -> int:
        """Bytes of the machine's memory that its ranks take together while they train."""
        context, workers = self.context, getattr(self.context.recipe.data, "workers", 0) or 0
        own = 0 if self.strategy.host is self.strategy.device else self.strategy.host.peak
        mine = PROCESS[self.run.device] + workers * WORKER + own + self.copy()
        if self.run.device == "cpu":
            mine += self.strategy.device.peak
        return mine * context.processes

    def copy(self) -> int:
        """Bytes of a rank's copy of weights and optimizer state, where checkpoints are written behind the training.

        Where the recipe leaves it open, memory that does not hold the copy is not asked for it: nothing is counted.
        """
        asked = self.context.recipe.checkpoint
        if not (asked.every_steps and asked.asynchronous):
            return 0
        timelines = {id(each): each for each in (self.strategy.device, self.strategy.host)}.values()
        left = [each.left() for each in timelines]  # by a step
        return sum(each.get(PARTS[part], 0) for each in left for part in (PARAMETERS, STATE))

    def tokens(self) -> int:
        """Tokens of an optimizer step of a rank."""
        length = getattr(settled(self.context).data, "sequence_length", 0)
        return int(length) * (self.context.batch.micro or 1) * self.run.accumulation if isinstance(length, int) else 0

    def steps(self) -> int | None:
        """Optimizer steps of the whole run, where they are known."""
        recipe, rows = self.context.recipe, self.context.seen.rows
        if recipe.train.steps is not None or self.context.program != "builtin":  # whose data nobody has looked at
            return recipe.train.steps
        if isinstance(recipe.data, DatasetData):
            packed = packing_of(recipe, self.context.model_type) != "none"
            count = None if packed or rows is None else rows * (1 - recipe.data.validation_fraction)
        else:
            count = getattr(recipe.data, "samples", None)
        if count is None or not self.context.batch.global_:
            return None
        return max(1, math.ceil((recipe.train.epochs or 1.0) * count / self.context.batch.global_))

    def peak_share(self, time: StepTime) -> float | None:
        """Model FLOPs utilisation: recomputed operators are none of the model's."""
        card = accelerator(self.context.cards[0].name) if self.context.cards else None
        if card is None:
            return None
        tf32 = self.context.dtype == "fp32" and self.context.recipe.precision.tf32
        rate = (card.tf32 if tf32 else card.fp32 if self.context.dtype == "fp32" else card.half) or card.fp32
        own = (self.trace.flops - self.trace.recomputed) * self.run.accumulation
        return round(own / (time.total * rate * 1e12), 3)

    def disk(self) -> int:
        """Bytes of the checkpoints that are kept, and of the one that is written beside them."""
        asked = self.context.recipe.checkpoint
        kept = (asked.keep or 2) + asked.keep_best + 1 if asked.every_steps else 1
        return kept * self.checkpoint()

    def checkpoint(self) -> int:
        """Bytes of a checkpoint: weights, or the adapters alone, and the optimizer's state. 0 where none is saved."""
        asked = self.context.recipe.checkpoint
        if self.context.program != "builtin" or not (asked.at_end or asked.every_steps):
            return 0
        adapts = self.context.recipe.peft.kind != "none"
        held = self.trace.trained if adapts else self.trace.parameters
        return sum(each.bytes * each.of for each in held) + self._state()

    def _state(self) -> int:
        """Bytes of the optimizer's state of all ranks, with the 32-bit weights that an engine keeps beside others."""
        kept = ((each.of, state(self.run.optimizer, Tensor.of(each), self.run.momentum)) for each in self.trace.trained)
        return sum(of * sum(sizes or ()) for of, sizes in kept)

    def use(self) -> Use:
        """What the trained model takes when it answers."""
        from trainkit.foresight.use import use_of

        return use_of(settled(self.context), self.trace, self.context.resolved.described.model)

    def notes(self) -> tuple[str, ...]:
        """What was assumed."""
        found = []
        recipe = self.context.recipe
        if self.context.program != "builtin":
            like, task = settled(self.context), task_of(settled(self.context)).replace("_", " ")
            length = getattr(like.data, "sequence_length", 0)
            found.append(
                f"a script of your own is counted as trainkit's trainer on the same model ({task}), with the "
                f"{length:,} tokens a sample and the {like.optimizer.name} that its arguments say or leave"
            )
        if getattr(recipe.data, "sequence_length", None) == "auto" and self.context.seen.length is None:
            found.append(f"samples of {LENGTH:,} tokens are assumed, for the data decide that and are not prepared yet")
        if recipe.efficiency.compile.enabled:
            found.append("efficiency.compile is counted as if it were off: it takes less")
        if getattr(getattr(recipe.model, "moe", None), "experts", 0):
            found.append("tokens are routed evenly to the experts")
        return tuple(found)


def rounded(value: float) -> float:
    """Three digits, so that the same plan says the same."""
    return float(f"{value:.3g}")
