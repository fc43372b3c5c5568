"""The time of a step: an operator takes as long as its arithmetic, its memory traffic or its start, whatever is most.

The roofline model (Williams, Waterman and Patterson 2009), with the share of each peak that large kernels reach.
Collectives are as a ring of NCCL moves them: (n - 1) / n of the bytes for a gather or a scatter, twice that for an
all-reduce (NVIDIA nccl-tests, doc/PERFORMANCE.md). On GPUs they run beside the computation; on a CPU, whose cores do
both, after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from trainkit.foresight.strategies import BYTES, Run, offloadable
from trainkit.foresight.trace import Trace, Work
from trainkit.foresight.updates import Tensor, orthogonalizing_flops, state
from trainkit.machine.accelerators import Accelerator
from trainkit.optimizers import optimizer

ARITHMETIC, TRAFFIC, CONNECTION = 0.7, 0.85, 0.75  # shares of the peaks of data sheets that are reached
DISPATCH = 6e-6  # seconds that an operator takes to start on a GPU at least
HOST_LINK = 20e9  # bytes a second between a GPU and the machine's memory (PCIe 4, 16 lanes)
BETWEEN_NODES = 25e9  # bytes a second of a GPU to another machine, of an adapter of 200 Gbit/s
# What one core of a CPU reaches, until it is measured: operations and bytes a second, seconds of an operator.
CORE = (40e9, 8e9, 4e-6)
# Seconds that a collective takes to start: NCCL's on a machine, and Gloo's, which hands it to a thread of its own.
START = {"cuda": 30e-6, "cpu": 2e-3}
GLOO = 1e9  # bytes a second between the ranks of a machine
WORK = ("FLOPs", "16-bit FLOPs", "bytes", "operators")


@dataclass(frozen=True, slots=True)
class Pace:
    """What a device reaches. flops: operations a second by format; bandwidth, link: bytes a second.

    dispatch: seconds of an operator at least. adds: whether arithmetic, traffic and starts follow one another, as on a
    CPU, and do not overlap. measured: whether it was, on this very device.
    """

    flops: Mapping[str, float] = field(default_factory=dict)
    bandwidth: float = 1.0
    link: float = BETWEEN_NODES
    dispatch: float = DISPATCH
    adds: bool = False
    measured: bool = False

    @classmethod
    def of(cls, card: Accelerator, *, tf32: bool = False) -> Pace:
        """By the data sheet."""
        full = (card.tf32 or card.fp32) if tf32 else card.fp32
        half = card.half or card.fp32
        rates = {"fp32": full, "bf16": half if card.tf32 else card.fp32, "fp16": half}
        flops = {name: rate * 1e12 * ARITHMETIC for name, rate in rates.items()}
        return cls(flops, card.bandwidth * 1e9 * TRAFFIC, card.link * 1e9 * CONNECTION)

    @classmethod
    def of_cores(cls, cores: int) -> Pace:
        """Of a CPU that was never measured, by its number of cores."""
        arithmetic, bandwidth, dispatch = CORE
        flops = dict.fromkeys(("fp32", "bf16", "fp16"), arithmetic * cores)
        return cls(flops, bandwidth * min(cores, 4), link=GLOO, dispatch=dispatch, adds=True)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of an optimizer step. waiting: of these for other ranks, where computation does not cover it."""

    computing: float
    updating: float
    waiting: float

    @property
    def total(self) -> float:
        return self.computing + self.updating + self.waiting


def seconds(work: tuple[Work, ...], pace: Pace) -> float:
    """Of operators one after the other."""
    total = 0.0
    for each in work:
        rate = pace.flops.get(each.format) or pace.flops["fp32"]
        parts = each.flops / rate, each.bytes / pace.bandwidth, pace.dispatch
        total += each.count * (sum(parts) if pace.adds else max(parts))
    return total


def work_of(trace: Trace, run: Run) -> tuple[tuple[str, float], ...]:
    """What the time of a step is reckoned from, by the names of WORK."""
    full = sum(each.count * each.flops for each in trace.work if each.format == "fp32")
    half = sum(each.count * each.flops for each in trace.work if each.format != "fp32")
    moved = sum(each.count * each.bytes for each in trace.work)
    operators = sum(each.count for each in trace.work)
    update = updated(trace, run)
    sums = (full, half, moved, operators)
    found = [run.accumulation * each for each in sums]
    found[2] += update
    return tuple(zip(WORK, (float(f"{each:.4g}") for each in found), strict=True))


def updated(trace: Trace, run: Run) -> float:
    """Bytes that the optimizer's step reads and writes on a rank."""
    divides = run.strategy in ("fsdp", "zero1", "zero2", "zero3")
    mine = states = 0.0
    for each in trace.trained:
        ranks = run.shards // each.sharers if divides else 1
        mine += each.bytes / ranks
        states += sum(state(run.optimizer, Tensor.of(each), run.momentum) or ()) / ranks
    # Gradients are read twice (the norm), weights and state are read and written.
    return 2 * mine + 2 * mine + 2 * states


def step_time(trace: Trace, run: Run, pace: Pace) -> StepTime:
    """An optimizer step of a rank."""
    computing = run.accumulation * seconds(trace.work, pace)
    offloads = {name for name in ("offload", "offload_optimizer", "offload_param")
                if run.options.get(name) not in (None, False, "none")}  # fmt: skip
    if run.device == "cpu":  # where all of it lies in the same memory
        offloads.clear()
    updating = updated(trace, run) / (HOST_LINK if offloads else pace.bandwidth)
    if optimizer(run.optimizer).by_matrix:
        half = pace.flops.get("bf16") or pace.flops["fp32"]
        updating += orthogonalizing_flops([Tensor.of(each) for each in trace.trained]) / half
    updating += moved(trace, run, offloads) / HOST_LINK
    if run.offloads_activations and run.device != "cpu":  # copies run beside the computation, there and back
        away = sum(trace.sizes[each] for each in offloadable(trace, trace.first))
        computing = max(computing, 2 * run.accumulation * away / HOST_LINK)
    talking = traffic(trace, run) / _link(run, pace, run.shards * run.tensor) + between_copies(trace, run, pace)
    talking += collectives(trace, run) * START[run.device]
    waiting = talking if pace.adds else max(0.0, talking - computing)
    return StepTime(computing, updating, waiting + inside_blocks(trace, run, pace))


def moved(trace: Trace, run: Run, offloads: Set[str]) -> float:
    """Bytes that pass between a GPU and the machine's memory in a step. Nothing is counted on to hide them.

    What offloads parameters fetches them for each forward and backward pass; what offloads the optimizer sends each
    micro step's gradients (DeepSpeed and FSDP add them up on the host), and gets the new weights once.
    """
    if not offloads:
        return 0.0
    low = BYTES[run.dtype]
    weights = sum(each.size for each in trace.parameters) * low / run.ranks
    gradients = sum(each.size for each in trace.trained) * low / run.ranks
    found = run.accumulation * gradients
    if offloads & {"offload", "offload_param"}:
        return found + 2 * run.accumulation * weights
    return found + weights


def collectives(trace: Trace, run: Run) -> int:
    """How many a rank takes part in, in a step."""
    if run.shards == 1:
        return 0
    if run.strategy == "ddp":
        return 1 + int(4 * sum(each.size for each in trace.trained) / (run.options.get("bucket_mb", 25) * 2**20))
    if run.strategy == "fsdp":
        return (1 + _gathers(run)) * run.accumulation * (1 + sum(each.unit for each in trace.modules))
    if run.strategy == "zero3":
        return 3 * run.accumulation * len(trace.modules)
    return 2 + run.accumulation


def between_copies(trace: Trace, run: Run, pace: Pace) -> float:
    """Seconds in which the copies of a model add up their shards' gradients."""
    if run.copies == 1:
        return 0.0
    low = BYTES[run.dtype] if run.options.get("reduce_dtype") == "same" else 4
    shard = sum(each.size for each in trace.trained) * low / run.shards
    reductions = run.accumulation if run.options.get("reduce_gradients", "each_micro_step") != "once" else 1
    return reductions * 2 * (run.copies - 1) / run.copies * shard / _link(run, pace, run.ranks)


def inside_blocks(trace: Trace, run: Run, pace: Pace) -> float:
    """Seconds in which blocks wait for sums over parts of matrices, for tokens at other ranks, and for their keys."""
    sharers = max((each.sharers for each in trace.parameters), default=1)
    # What is whole on each rank of a group has gradients that are averaged there, once a step.
    alike = sum(4 * each.size / run.shards for each in trace.trained if each.parts == 1) if run.tensor > 1 else 0.0
    seconds = 2 * (run.tensor - 1) / run.tensor * alike / _link(run, pace, run.tensor)
    # Of a sum each rank sends what it has twice; of the rest, once what belongs to others.
    for name, ranks, times in (
        ("all_reduce", run.tensor, 2),
        ("all_to_all_single", sharers, 1),
        ("all_gather_into_tensor", run.context, 1),
        ("reduce_scatter_tensor", run.context, run.context),
    ):
        if ranks > 1:
            made = {number for number, each in enumerate(trace.names) if each.startswith(name)}
            sizes = [trace.sizes[place] for place, each in enumerate(trace.operators) if each in made]
            span = run.tensor * (1 if name == "all_reduce" else ranks)
            sent = times * (ranks - 1) / ranks * sum(sizes)
            seconds += run.accumulation * (sent / _link(run, pace, span) + len(sizes) * START[run.device])
    return seconds


def traffic(trace: Trace, run: Run) -> float:
    """Bytes that a rank sends in a step to those with which it shards a copy, or shares out gradients."""
    if run.shards == 1:
        return 0.0
    share = (run.shards - 1) / run.shards
    low = BYTES[run.dtype]
    weights = sum(each.size for each in trace.parameters) * low
    values = sum(each.size for each in trace.trained)
    reduced = values * (low if run.options.get("reduce_dtype") == "same" else 4)
    if run.strategy == "ddp":
        return 2 * share * reduced
    if run.strategy == "fsdp":
        reductions = run.accumulation if run.options.get("reduce_gradients", "each_micro_step") != "once" else 1
        whole = [Tensor.of(each) for each in trace.trained] if optimizer(run.optimizer).by_matrix else ()
        directions = 2 * sum(each.size for each in whole if each.hidden)  # which are gathered in bf16
        return share * (run.accumulation * _gathers(run) * weights + reductions * reduced + directions)
    if run.strategy == "zero3":
        return share * run.accumulation * (2 * weights + values * low)
    reductions = 1 if run.strategy == "zero1" else run.accumulation
    return share * (2 * reductions * values * low + values * low)


def _gathers(run: Run) -> int:
    """How often FSDP gathers a unit in a micro step."""
    return 1 if run.options.get("sharding") in ("shard_grad_op", "hybrid_shard_zero2") else 2


def _link(run: Run, pace: Pace, ranks: int) -> float:
    """Bytes a second among so many neighbouring ranks."""
    return pace.link if run.local >= ranks else min(pace.link, BETWEEN_NODES)
