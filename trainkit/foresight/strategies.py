"""What a strategy adds to a micro step: shards, gathered weights, buckets, reduced gradients; as events of memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from math import prod
from typing import Any

from trainkit.foresight.timeline import Timeline
from trainkit.foresight.trace import (
    ACTIVATIONS,
    BATCH,
    COMMUNICATION,
    COPIES,
    GRADIENTS,
    PARAMETERS,
    STATE,
    TEMPORARIES,
    Events,
    Kind,
    Parameter,
    Trace,
    pairs,
)
from trainkit.foresight.updates import Tensor, state, temporaries
from trainkit.machine.capability import HOPPER

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
GATHER, REDUCE = 1, 2  # streams of FSDP's collectives: their memory is not the computation's to reuse
# cuBLAS's own memory, one in each of the two threads that compute (aten/src/ATen/cuda/CublasHandlePool.cpp)
WORKSPACE = {True: 32 * 2**20 + 1024, False: 4096 * 1024 * 2 + 16 * 8 * 1024}  # from Hopper on, and before

# trainkit/trainer/perf/offloading.py: bytes from which a saved tensor is offloaded, and copies under way at a time.
SMALLEST_OFFLOADED, OFFLOADS_UNDER_WAY = 2**20, 2


@dataclass(frozen=True, slots=True)
class Run:
    """What of a plan decides a rank's memory, beside the trace.

    ranks: of the world; local: of a machine; copies: of the model, each over its part of the ranks. dtype: of the
    computation, weights: of the parameters. options: the recipe's strategy section. deepspeed: the planned settings of
    its engine. capability: of the GPU; HOPPER for all later ones, which do not differ here.
    """

    strategy: str = "single"
    ranks: int = 1
    local: int = 1
    copies: int = 1
    accumulation: int = 1
    dtype: str = "fp32"
    weights: str = "fp32"
    device: str = "cuda"
    capability: tuple[int, int] = (9, 0)
    optimizer: str = "adamw_torch"
    momentum: float = 0.9
    offloads_activations: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    deepspeed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tensor(self) -> int:
        """Over how many ranks each matrix is divided."""
        return int(self.options.get("tensor", 1))

    @property
    def context(self) -> int:
        """Into how many parts each sample is divided."""
        return int(self.options.get("context", 1))

    @property
    def shards(self) -> int:
        """Over how many ranks a copy, or what a rank's group has of it, is sharded."""
        return max(1, self.ranks // (self.copies * self.tensor))


def offloadable(trace: Trace, events: Events) -> Set[int]:
    """The storages that a micro step's forward pass leaves to its backward, large enough to be offloaded."""
    found: set[int] = set()
    for kind, number in pairs(events):
        if kind == Kind.BACKWARD:
            break
        if kind == Kind.TAKE and trace.parts[number] == ACTIVATIONS and trace.sizes[number] >= SMALLEST_OFFLOADED:
            found.add(number)
        elif kind == Kind.FREE:
            found.discard(number)
    return found


class OffloadedActivations:
    """What `efficiency.offload_activations` moves in a micro step: saved tensors, of a size, with some under way.

    saved: their storages. The order and the number of copies are those of trainkit/trainer/perf/offloading.py.
    """

    def __init__(self, whole: Whole, events: Events) -> None:
        self._whole, self._order, self._away = whole, list[int](), dict[int, None]()
        moves = whole.run.offloads_activations and whole.host is not whole.device
        self.saved = offloadable(whole.trace, events) if moves else frozenset()

    def taken(self, number: int) -> None:
        """One of the saved storages was taken: the one of some before has left the device."""
        self._order.append(number)
        if len(self._order) > OFFLOADS_UNDER_WAY:
            leaves, trace = self._order[-1 - OFFLOADS_UNDER_WAY], self._whole.trace
            self._whole.device.drop(leaves)
            self._whole.host.take(("offloaded", leaves), trace.sizes[leaves], ACTIVATIONS)
            self._away[leaves] = None

    def freed(self, number: int) -> None:
        """One was freed, in backward: with the host's copy, and those before it come back."""
        self._whole.host.drop(("offloaded", number))
        self._away.pop(number, None)
        trace = self._whole.trace
        for each in list(self._away)[-OFFLOADS_UNDER_WAY:]:
            if not self._whole.device.holds(each):
                self._whole.device.take(each, trace.sizes[each], ACTIVATIONS)


class Whole:
    """Every rank holds the whole model: `single`.

    `host` is the memory of the machine that the rank takes beside its GPU; on a CPU both are one.
    """

    def __init__(self, trace: Trace, run: Run) -> None:
        self.trace, self.run = trace, run
        self.device = Timeline()
        self.host = self.device if run.device == "cpu" else Timeline()
        self.last = True  # whether the micro step is the last of its step

    def start(self) -> None:
        """What is there before the first step."""
        for number, each in enumerate(self.trace.parameters):
            self.device.take(("parameter", number), each.bytes, PARAMETERS)
        self._common()

    def _common(self) -> None:
        self.device.take("buffers", self.trace.buffers, PARAMETERS)
        if self.run.device == "cuda":
            for thread in ("forward", "backward"):
                size = WORKSPACE[self.run.capability >= HOPPER]
                self.device.take(("cublas", thread), size, TEMPORARIES, operator="cuBLAS")

    def start_peak(self) -> tuple[int, int]:
        """Bytes of the device and of the machine's memory that a rank takes at most before the first step.

        Values are read or drawn into their place, one tensor at a time (trainer/models/weights.py).
        """
        whole = sum(each.bytes for each in self.trace.parameters)
        return (whole + self.drawn, 0) if self.host is self.device else (whole, self.drawn)

    @property
    def drawn(self) -> int:
        """Bytes of the largest tensor as it is drawn, in 32 bits."""
        return max((4 * each.size * each.of for each in self.trace.parameters), default=0)

    def step(self, micro_steps: int) -> None:
        """An optimizer step."""
        self.device.take("batch", self.trace.batch * self.run.accumulation, BATCH)
        for number in range(micro_steps):
            self.last = number == micro_steps - 1
            self.micro_step(self.trace.further if number else self.trace.first)
        for storage, part in enumerate(self.trace.parts):
            if part == COPIES:
                self.device.drop(storage)
        self.device.begin("update")
        self.update()

    def micro_step(self, events: Events) -> None:
        """Play the events of a micro step, and act at those that a strategy waits for."""
        memory, trace = self.device, self.trace
        sizes, parts, operators, names = trace.sizes, trace.parts, trace.operators, trace.names
        take, free = int(Kind.TAKE), int(Kind.FREE)  # looked up once: there are tens of thousands of events
        taken: set[int] = set()
        offloaded = OffloadedActivations(self, events)
        for kind, number in pairs(events):
            if kind == take:
                memory.take(number, sizes[number], parts[number], 0, names[operators[number]])
                taken.add(number)
                if number in offloaded.saved:
                    offloaded.taken(number)
            elif kind == free:
                memory.drop(number)
                taken.discard(number)
                if number in offloaded.saved:
                    offloaded.freed(number)
            else:
                self.at(kind, number)
        for number in taken:
            if parts[number] not in (GRADIENTS, COPIES):
                memory.drop(number)

    def at(self, kind: int, number: int) -> None:
        """Act at an event that takes no memory by itself."""
        if kind == Kind.FORWARD:
            self.device.begin("forward")
        elif kind == Kind.BACKWARD:
            self.device.begin("backward")

    def gradients(self) -> Iterable[int]:
        """The storages of gradients."""
        return self.trace.gradients

    def update(self) -> None:
        """The optimizer's step; gradients are given back."""
        self.optimize(self.device, self.tensors())
        for storage in self.gradients():
            self.device.drop(storage)

    def tensors(self) -> list[Tensor]:
        """What this rank updates."""
        return [Tensor.of(each) for each in self.trace.trained]

    def optimize(self, memory: Timeline, tensors: Sequence[Tensor]) -> None:
        """State is made in the first step, and stays."""
        run = self.run
        if not memory.holds("stepped"):
            memory.take("stepped", 1, STATE)
            for number, each in enumerate(tensors):
                for place, size in enumerate(state(run.optimizer, each, run.momentum) or ()):
                    memory.take(("state", number, place), size, STATE, operator="optimizer")
        # Decayed tensors and others are two groups.
        groups = [[each for each in tensors if (len(each.shape) > 1) is decayed] for decayed in (True, False)]
        size = temporaries(run.optimizer, groups, "cpu" if memory is not self.device else run.device)
        memory.take("stepping", size, TEMPORARIES, operator="optimizer")
        memory.drop("stepping")


class Replicated(Whole):
    """`ddp`: gradients lie in buckets, which stay; until the last micro step they are beside those that accumulate."""

    def start(self) -> None:
        super().start()
        for number, each in enumerate(self.trace.parameters):
            if each.trained:
                self.device.take(("bucket", number), each.bytes, GRADIENTS)
        self._of = {number: storage for storage, number in self.trace.gradients.items()}

    def at(self, kind: int, number: int) -> None:
        super().at(kind, number)
        if kind == Kind.READY and self.last and number in self._of:
            self.device.drop(self._of[number])  # copied into its bucket
        elif kind == Kind.END and self.last and self.run.options.get("reduce_dtype") == "same":
            bucket = min(self.run.options.get("bucket_mb", 25) * 2**20, sum(each.bytes for each in self.trace.trained))
            self.device.take("sent", int(bucket * BYTES[self.run.dtype] / 4), COMMUNICATION)
            self.device.drop("sent")


ROOT = -1  # the unit of what no other holds


class Sharded(Whole):
    """`fsdp` (FSDP2): torch/distributed/fsdp/_fully_shard, _fsdp_param_group.py and _fsdp_collectives.py.

    A unit is gathered into one buffer, from which its parameters are copied. In forward the buffer lives until the next
    unit's copy; in backward the next unit's buffer is filled while one computes.
    """

    def start(self) -> None:
        trace, run = self.trace, self.run
        units = [each for each in trace.modules if each.unit]
        self._numbers = {number: place for place, number in
                         enumerate(number for number, each in enumerate(trace.modules) if each.unit)}  # fmt: skip
        taken: set[int] = set()
        self._units: dict[int, list[int]] = {}
        # An outer unit holds what its inner ones leave.
        for place, unit in sorted(enumerate(units), key=lambda each: len(each[1].all)):
            self._units[place] = [number for number in unit.all if number not in taken]
            taken.update(unit.all)
        self._units[ROOT] = [number for number in range(len(trace.parameters)) if number not in taken]
        self._keeps = run.options.get("sharding") in ("shard_grad_op", "hybrid_shard_zero2")
        self._casts = run.dtype != "fp32" and run.weights == "fp32"
        self._each = run.options.get("reduce_gradients", "each_micro_step") == "each_micro_step"
        self._offloads = bool(run.options.get("offload")) and self.host is not self.device
        self._wide = run.dtype != "fp32" and run.options.get("reduce_dtype", "fp32") == "fp32"
        self._of = {number: storage for storage, number in trace.gradients.items()}
        self._order: list[int] = []  # of the forward pass
        self._gathered_last: int | None = None
        self._reduced_last: int | None = None
        self._backward = False
        self._finished: set[int] = set()
        home = self.host if self._offloads else self.device
        for number, each in enumerate(trace.parameters):
            home.take(("shard", number), self._shard(each) * int(each.item) + each.scales, PARAMETERS)
        self._common()

    def start_peak(self) -> tuple[int, int]:
        # Each rank has its slices in the machine's memory, from where they go to the device, or stay.
        parameters, own = self.trace.parameters, self.run.shards == self.run.ranks
        slices = sum(-(-each.bytes * each.of // self.run.ranks) for each in parameters)
        shards = sum(self._shard(each) * int(each.item) + each.scales for each in parameters)
        if self.host is self.device:
            return (slices if own else slices + shards) + self.drawn, 0
        # Where these are not the shards, each is put together, to be cut again.
        moved = 0 if own else max((each.bytes * each.of for each in parameters), default=0)
        return (0, slices + shards) if self._offloads else (shards + moved, slices + self.drawn)

    def _shard(self, parameter: Parameter) -> int:
        """Values of a rank's share, padded to that of the first."""
        return prod(parameter.share(self._over(parameter)))

    def _over(self, parameter: Parameter) -> int:
        """Over how many ranks it is sharded: experts over those that have the same ones."""
        return self.run.shards // parameter.sharers

    def _whole(self, sizes: Mapping[int, float]) -> int:
        """Bytes of all ranks' shares, by the bytes of this rank's."""
        return int(sum(size * self._over(self.trace.parameters[number]) for number, size in sizes.items()))

    def _low(self, number: int) -> float:
        """Bytes of a value in the computation."""
        item = self.trace.parameters[number].item
        return BYTES[self.run.dtype] if self._casts and item == 4 else item

    def _gather(self, unit: int) -> None:
        """Fill a unit's buffer."""
        memory, parameters = self.device, self.trace.parameters
        if memory.holds(("gathered", unit)) or self._is_whole(unit):
            return
        mine = {number: self._shard(parameters[number]) for number in self._units[unit]}
        if self._offloads:
            own = sum(size * int(parameters[number].item) for number, size in mine.items())
            memory.take("uploaded", own, COMMUNICATION, GATHER)
        low = {number: size * self._low(number) for number, size in mine.items()}
        if self._casts:
            memory.take("cast", int(sum(low.values())), COMMUNICATION, GATHER)
        memory.take(("gathered", unit), self._whole(low), COMMUNICATION, GATHER, "all-gather")
        self._exchange(self._whole(low))
        memory.drop("cast")
        memory.drop("uploaded")

    def _exchange(self, size: int) -> None:
        """Gloo works on a copy (c10d/ProcessGroupGloo.cpp), NCCL in place."""
        if self.run.device == "cpu":
            self.device.take("exchanged", size, COMMUNICATION, operator="gloo")
            self.device.drop("exchanged")

    def _is_whole(self, unit: int) -> bool:
        return any(self.device.holds(("whole", number)) for number in self._units[unit])

    def _unshard(self, unit: int) -> None:
        """Gather a unit if need be, and copy its parameters out of the buffer."""
        memory = self.device
        if self._is_whole(unit) or not self._units[unit]:
            return
        self._gather(unit)
        if not self._backward and self._gathered_last is not None:
            memory.drop(("gathered", self._gathered_last))
        for number in self._units[unit]:
            each = self.trace.parameters[number]
            size = self._shard(each) * self._over(each) * self._low(number)
            memory.take(("whole", number), int(size), PARAMETERS, operator="all-gather")
        if self._backward:
            memory.drop(("gathered", unit))
        else:
            self._gathered_last = unit

    def _reshard(self, unit: int) -> None:
        for number in self._units[unit]:
            self.device.drop(("whole", number))

    def at(self, kind: int, number: int) -> None:
        super().at(kind, number)
        unit = self._numbers.get(number, ROOT)
        if kind == Kind.FORWARD:
            self._backward, self._order, self._finished = False, [], set()
            self._unshard(ROOT)
        elif kind == Kind.ENTER and not self._backward and unit != ROOT:
            self._unshard(unit)
            ahead = self.run.options.get("prefetch", 1)
            if ahead > 1:
                for following in range(unit + 1, min(unit + 1 + ahead, len(self._units) - 1)):
                    self._gather(following)
        elif kind == Kind.LEAVE and not self._backward and unit != ROOT:
            if not self._keeps:
                self._reshard(unit)
            self._order.append(unit)
        elif kind == Kind.BACKWARD:
            if self._gathered_last is not None:
                self.device.drop(("gathered", self._gathered_last))
                self._gathered_last = None
            self._backward = True
            self._ahead(len(self._order))
        elif kind == Kind.REACH and unit != ROOT:
            self._unshard(unit)
            self._ahead(self._order.index(unit) if unit in self._order else 0)
        elif kind == Kind.AFTER and unit != ROOT:
            self._scatter(unit)
        elif kind == Kind.END:
            for each in (ROOT, *self._order):
                if each not in self._finished:
                    self._scatter(each)
            if self._reduced_last is not None:
                self.device.drop(("reduced", self._reduced_last))
                self._reduced_last = None
            for each in self._units:
                self.device.drop(("gathered", each))

    def _ahead(self, place: int) -> None:
        """Fill the buffers of the units before one in the order of forward."""
        for each in self._order[max(0, place - int(self.run.options.get("prefetch", 1))) : place][::-1]:
            self._gather(each)

    def _scatter(self, unit: int) -> None:
        """A unit's gradients are whole: its parameters go, and the gradients are reduced to shards of them."""
        memory, parameters = self.device, self.trace.parameters
        self._finished.add(unit)
        trained = [number for number in self._units[unit] if number in self._of]
        reduces = self.last or self._each
        if not reduces:
            for number in trained:
                if self._wide:
                    if not memory.holds(("summed", number)):
                        memory.take(("summed", number), parameters[number].size * 4, GRADIENTS)
                    memory.drop(self._of[number])
                elif memory.holds(("summed", number)):
                    memory.drop(self._of[number])
                else:
                    memory.take(("summed", number), int(parameters[number].size * self._low(number)), GRADIENTS)
                    memory.drop(self._of[number])
            self._reshard(unit)
            return
        self._reshard(unit)
        if self._reduced_last is not None:
            memory.drop(("reduced", self._reduced_last))
        if not trained:
            return
        sizes = {number: self._shard(parameters[number]) for number in trained}
        low = {number: 4 if self._wide else self._low(number) for number in trained}
        whole = self._whole({number: sizes[number] * low[number] for number in trained})
        mine = int(sum(sizes[number] * low[number] for number in trained))
        memory.take(("reduced", unit), whole, COMMUNICATION, operator="reduce-scatter")
        for number in trained[:-1]:
            memory.drop(self._of[number])
            memory.drop(("summed", number))
        self._reduced_last = unit
        final = int(sum(sizes[number] * parameters[number].item for number in trained))
        name = ("gradient", unit)
        home = self.host if self._offloads else memory
        memory.take("scattered", mine, GRADIENTS, REDUCE, "reduce-scatter")
        self._exchange(whole)
        if final != mine:
            memory.take("widened", final, GRADIENTS, REDUCE)
            memory.drop("scattered")
        # foreach_reduce goes over the gradients, and its variable holds the last until it ends.
        memory.drop(self._of[trained[-1]])
        memory.drop(("summed", trained[-1]))
        memory.drop("widened")
        memory.drop("scattered")
        if not home.holds(name):  # else it is added to those of earlier micro steps
            home.take(name, final, GRADIENTS, REDUCE, "reduce-scatter")

    def update(self) -> None:
        shares = [Tensor.of(each, self._over(each)) for each in self.trace.trained]
        home = self.host if self._offloads else self.device
        self.optimize(home, shares)
        for unit in self._units:
            home.drop(("gradient", unit))
