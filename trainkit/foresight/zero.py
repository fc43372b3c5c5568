"""ZeRO-1 and 2, and what all stages share: what a DeepSpeed engine takes beside a micro step, as events of memory.

Follows DeepSpeed 0.19; each rule names its file below `deepspeed/runtime`, and its function where that helps. Sizes of
buckets are numbers of values, as in DeepSpeed's JSON.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from trainkit.foresight.strategies import BYTES, Run, Whole
from trainkit.foresight.timeline import Timeline
from trainkit.foresight.trace import (
    COMMUNICATION,
    GRADIENTS,
    PARAMETERS,
    STATE,
    TEMPORARIES,
    Kind,
    Trace,
)
from trainkit.foresight.updates import Tensor, state, temporaries

MASTER = 4  # bytes of a value of the weights that are updated, and of their gradients
NORM = 8  # bytes of a value in a norm (zero/utils.py: get_norm_dtype)
TOGETHER = 500_000_000  # values that the engine reduces at once by itself (engine.py: MEMORY_OPT_ALLREDUCE_SIZE)
ALIGNED = 2  # values of each rank to which a flat group is padded (zero/stage_1_and_2.py: nccl_start_alignment_factor)


@dataclass(frozen=True, slots=True)
class ZeroSettings:
    """What of DeepSpeed's JSON decides memory. Sizes in values; accumulated: bytes of a value of summed gradients."""

    stage: int
    bucket: int
    overlaps: bool
    accumulated: int
    offloads_state: bool
    offloads_parameters: bool
    swaps_parameters: bool
    prefetched: int
    live: int
    reuse: int
    persistent: int
    model_persistent: int
    sub_group: int


def settings_of(planned: Mapping[str, Any], dtype: str) -> ZeroSettings:
    """The settings of a planned JSON, with DeepSpeed's defaults for what it leaves out (zero/config.py)."""
    section = planned.get("zero_optimization")
    zero: Mapping[str, Any] = section if isinstance(section, Mapping) else {"stage": int(bool(section))}

    def size(name: str, default: int) -> int:
        return int(zero.get(f"stage3_{name}", zero.get(name, default)))

    def offloads(name: str) -> bool:
        return bool((zero.get(name) or {}).get("device", "none") != "none")

    stage, overlaps = int(zero.get("stage", 0)), zero.get("overlap_comm")
    accumulated = str((planned.get("data_types") or {}).get("grad_accum_dtype") or dtype)
    return ZeroSettings(
        stage=stage,
        bucket=size("reduce_bucket_size", 500_000_000),
        overlaps=stage == 3 if overlaps is None else bool(overlaps),
        accumulated=2 if "16" in accumulated else 4,
        offloads_state=offloads("offload_optimizer"),
        offloads_parameters=offloads("offload_param"),
        swaps_parameters=(zero.get("offload_param") or {}).get("device") == "nvme",
        prefetched=size("prefetch_bucket_size", 50_000_000),
        live=size("max_live_parameters", 1_000_000_000),
        reuse=size("max_reuse_distance", 1_000_000_000),
        persistent=size("param_persistence_threshold", 100_000),
        model_persistent=size("model_persistence_threshold", 2**63 - 1),
        sub_group=size("sub_group_size", 1_000_000_000),
    )


class Engine(Whole, ABC):
    """What the stages have in common: the engine casts the model, and the optimizer updates flat groups of it.

    A subclass says in :meth:`build` what it makes of the model, and acts at the events of a micro step.
    """

    def __init__(self, trace: Trace, run: Run) -> None:
        super().__init__(trace, run)
        self.settings = settings_of(run.deepspeed, run.dtype)
        self._of = {number: storage for storage, number in trace.gradients.items()}
        self._start_peak = 0, 0
        trained = [number for number, each in enumerate(trace.parameters) if each.trained]
        # Decayed tensors and others are two groups (trainer/optim.py).
        parted = [[number for number in trained if (len(trace.parameters[number].shape) > 1) is decayed]
                  for decayed in (True, False)]  # fmt: skip
        self.groups = [each for each in parted if each]

    @property
    def home(self) -> Timeline:
        """Where the optimizer's state is."""
        return self.host if self.settings.offloads_state else self.device

    def low(self, number: int) -> float:
        """Bytes of a value of a parameter in the engine, which casts it (engine.py: _cast_module_mixed_precision)."""
        item = self.trace.parameters[number].item
        return BYTES[self.run.dtype] if self.run.dtype != "fp32" and item in (2, 4) else item

    def held(self, number: int) -> int:
        """Bytes of a whole parameter in the engine."""
        each = self.trace.parameters[number]
        return int(each.size * self.low(number)) + each.scales

    def size(self, numbers: Iterable[int]) -> int:
        """Values of some parameters."""
        return sum(self.trace.parameters[number].size for number in numbers)

    def start(self) -> None:
        """Build the engine, and go on with what is left of that."""
        self._move()
        self.build()
        shared = self.host is self.device
        self._start_peak = self.device.peak, 0 if shared else self.host.peak
        self.device = self.device.settled()
        self.host = self.device if shared else self.host.settled()
        self._common()

    def start_peak(self) -> tuple[int, int]:
        """Bytes of the device and of the machine at the highest moment before the first step.

        The model is whole then in stages 1 and 2: each tensor is read or drawn into its place.
        """
        return self._start_peak

    def _move(self) -> None:
        """The whole model is made on the device, and is cast there, a parameter at a time (engine.py)."""
        parameters = self.trace.parameters
        self.device.take("buffers", self.trace.buffers, PARAMETERS)
        self.transient(self.drawn, memory=self.host)
        for number, each in enumerate(parameters):
            self.device.take(("whole", number), each.bytes, PARAMETERS)
        for number, each in enumerate(parameters):
            if self.held(number) != each.bytes:
                self.device.take("cast", self.held(number), PARAMETERS)
                self.device.rename("cast", ("whole", number))

    @abstractmethod
    def build(self) -> None:
        """Make the engine's own memory of the whole model."""

    def transient(
        self, size: float, part: int = TEMPORARIES, operator: str = "", memory: Timeline | None = None
    ) -> None:
        """Take memory and give it back at once."""
        memory = memory or self.device
        memory.take("transient", int(size), part, operator=operator)
        memory.drop("transient")

    def exchange(self, size: float) -> None:
        """A gather or a scatter: Gloo works on a copy (c10d/ProcessGroupGloo.cpp), NCCL in place."""
        if self.run.device == "cpu":
            self.transient(size, COMMUNICATION, "gloo")

    def step_group(self, number: int, size: int) -> None:
        """The optimizer's step on a flat group of so many values; state is made in the first one."""
        tensor, memory, run = Tensor((size,), MASTER), self.home, self.run
        for place, each in enumerate(state(run.optimizer, tensor, run.momentum) or ()):
            if not memory.holds(("state", number, place)):
                memory.take(("state", number, place), each, STATE, operator="optimizer")
        device = run.device if memory is self.device else "cpu"
        self.transient(temporaries(run.optimizer, [[tensor]], device), operator="optimizer", memory=memory)

    def gathered_weights(self) -> None:
        """Every rank gets what the others have updated (utils.py: all_gather_into_tensor_dp_groups)."""
        for group in self.groups if self.run.ranks > 1 else ():
            self.exchange(self.padded(group) * self.low(group[0]))

    def padded(self, group: Sequence[int]) -> int:
        """Values of a flat group (utils.py: align_dense_tensors)."""
        unit = ALIGNED * self.run.ranks
        return -(-self.size(group) // unit) * unit

    def share(self, group: Sequence[int]) -> int:
        """Values of a rank's part of a flat group."""
        return self.padded(group) // self.run.ranks

    def flatten(self, group_number: int, group: Sequence[int]) -> None:
        """The group's parameters become parts of one tensor."""
        self.device.take(("flat", group_number), int(self.padded(group) * self.low(group[0])), PARAMETERS)
        for number in group:
            self.device.drop(("whole", number))


def optimizer_states(trace: Trace, run: Run) -> Engine:
    """ZeRO-1: bf16 with sums in fp32 has an optimizer of its own (engine.py: _do_optimizer_sanity_check)."""
    settings = settings_of(run.deepspeed, run.dtype)
    own = run.dtype == "bf16" and settings.accumulated == BYTES["fp32"] and not settings.offloads_state
    return Accumulated(trace, run) if own else Partitioned(trace, run)


class Accumulated(Engine):
    """ZeRO-1 in bf16 (bf16_optimizer.py): gradients of the whole model are summed in fp32, and reduced once."""

    def build(self) -> None:
        for number, group in enumerate(self.groups):
            self.flatten(number, group)
            share = self.share(group)
            self.device.take("clone", int(share * self.low(group[0])), TEMPORARIES)
            self.device.take(("master", number), share * MASTER, STATE)
            self.device.drop("clone")
            self.device.take(("summed", number), self.padded(group) * self.settings.accumulated, GRADIENTS)

    def at(self, kind: int, number: int) -> None:
        super().at(kind, number)
        if kind == Kind.READY and self.device.holds(("gradient", number)):
            self.device.drop(self._of[number])  # added to that of the micro step before, which backward has zeroed
        elif kind == Kind.END:
            self._sum()

    def _sum(self) -> None:
        """Add the 16-bit gradients to the sums; the last micro step reduces those."""
        memory = self.device
        for number, storage in self._of.items():
            self.transient(self.trace.parameters[number].size * self.settings.accumulated)
            if memory.holds(storage):
                memory.rename(storage, ("gradient", number))
        if not self.last:
            return
        together: list[int] = []
        for group in self.groups:  # engine.py: allreduce_no_retain
            together.append(self.padded(group))
            if sum(together) > TOGETHER:
                self._reduce(together)
                together = []
        self._reduce(together)

    def _reduce(self, sizes: Sequence[int]) -> None:
        """Several tensors are made one, which is cast for the exchange (engine.py: allreduce_bucket)."""
        memory, size = self.device, sum(sizes)
        if len(sizes) > 1:
            memory.take("together", size * self.settings.accumulated, COMMUNICATION, operator="all-reduce")
        self.transient(size * BYTES[self.run.dtype], COMMUNICATION, "all-reduce")
        memory.drop("together")

    def update(self) -> None:
        for number, group in enumerate(self.groups):
            self.step_group(number, self.share(group))
        self.gathered_weights()
        for number in self._of:
            self.device.drop(("gradient", number))


@dataclass(frozen=True, slots=True)
class Slice:
    """What of a parameter is in a rank's partition of its group: so many values."""

    parameter: int
    rank: int
    size: int


class Partitioned(Engine):
    """ZeRO-1 and 2 (zero/stage_1_and_2.py): gradients pass through a bucket, and the partition's own are kept.

    In 16 bits they are summed in a flat fp32 partition of each group (`compact`); in fp32 the whole gradients of
    parameters that touch the partition are kept in one buffer.
    """

    def build(self) -> None:
        slices = [each for group in self.groups for each in self._slices(group)]
        self._slices_of: dict[int, list[Slice]] = {}
        for each in slices:
            self._slices_of.setdefault(each.parameter, []).append(each)
        self._rank = self._heaviest(slices)
        self._mine = {each.parameter: each.size for each in slices if each.rank == self._rank}
        self._touched = [self._mine.keys() & set(group) for group in self.groups]
        memory, home, settings = self.device, self.home, self.settings
        for number, group in enumerate(self.groups):
            self.flatten(number, group)
            share, low = self.share(group), int(self.low(group[0]))
            if low != MASTER:
                memory.take("clone", share * low, TEMPORARIES)
            home.take(("master", number), share * MASTER, STATE)
            memory.drop("clone")
            if settings.offloads_state:  # param_buffer_of_bit16_for_cpu_offload_groups
                home.take(("updated", number), share * low, PARAMETERS)
        if settings.offloads_state:
            largest = max(self.trace.parameters[number].size for group in self.groups for number in group)
            size = largest * int(self.low(self.groups[0][0]))
            home.take("passing to the host", size, COMMUNICATION)
            memory.take("passing to the device", size, COMMUNICATION)
        for number, group in enumerate(self.groups):  # initialize_optimizer_states
            home.take(("gradient", number), self.share(group) * MASTER, GRADIENTS)
        if not settings.offloads_state:
            for number in range(len(self.groups)):
                home.drop(("gradient", number))
        self._bucket: list[int] = []
        self._filled = 0
        self._micro = 0  # how many micro steps of the step have been reduced

    @cached_property
    def _separate(self) -> bool:
        """Whether a parameter's gradient is summed beside `grad`, in another format (use_grad_accum_attribute)."""
        return self.settings.stage == 1 and self.settings.accumulated != BYTES[self.run.dtype]

    @cached_property
    def _compact(self) -> bool:
        """_use_compact_grad_partition_buffer."""
        return self.settings.accumulated == MASTER != BYTES[self.run.dtype]

    def _slices(self, group: Sequence[int]) -> Iterator[Slice]:
        """get_partition_info: each parameter by the ranks whose partitions it is in."""
        share, place = self.share(group), 0
        for number in group:
            end = place + self.trace.parameters[number].size
            while place < end:
                rank = place // share
                until = min(end, (rank + 1) * share)
                yield Slice(number, rank, until - place)
                place = until

    def _heaviest(self, slices: Sequence[Slice]) -> int:
        """The rank that takes most: whole gradients of what touches its partition, and the norm of the largest."""
        whole, largest = [0] * self.run.ranks, [0] * self.run.ranks
        for each in slices:
            if not self._compact:
                whole[each.rank] += self.trace.parameters[each.parameter].size * MASTER
            largest[each.rank] = max(largest[each.rank], each.size * NORM)
        return max(range(self.run.ranks), key=lambda rank: whole[rank] + largest[rank])

    def at(self, kind: int, number: int) -> None:
        super().at(kind, number)
        if kind == Kind.READY and number in self._of:
            self._ready(number)
        elif kind == Kind.END:
            if self.settings.stage == 1 and self.last and not self.settings.overlaps:
                for each in (number for group in self.groups for number in group if number in self._of):
                    self._add(each)  # reduce_gradients
            if self.settings.stage == 2 or self.last:  # before, stage 1 leaves gradients where they are
                self._finish()

    def _item(self, number: int) -> int:
        """Bytes of a value of the gradient that is reduced, and of the bucket."""
        return self.settings.accumulated if self._separate else int(self.low(number))

    def _ready(self, number: int) -> None:
        """process_gradients."""
        memory, size, storage = self.device, self.trace.parameters[number].size, self._of[number]
        if not memory.holds(("bucket", 0)):  # setup_buckets
            for place in range(1 + self.settings.overlaps):
                memory.take(("bucket", place), self.settings.bucket * self._item(number), COMMUNICATION)
        if self._separate:
            if memory.holds(("gradient sum", number)):
                self.transient(size * self.settings.accumulated)
            else:
                memory.take(("gradient sum", number), size * self.settings.accumulated, GRADIENTS)
            memory.drop(storage)
        elif memory.holds(("gradient sum", number)):  # autograd has added it to that of an earlier micro step
            memory.drop(storage)
        else:
            memory.rename(storage, ("gradient sum", number))
        if self.settings.stage == 2 or (self.settings.overlaps and self.last):
            self._add(number)

    def _add(self, number: int) -> None:
        """reduce_independent_p_g_buckets_and_remove_grads."""
        size = self.trace.parameters[number].size
        if self._filled + size > self.settings.bucket:
            self._reduce()
        if size <= self.settings.bucket:
            self.device.drop(("gradient sum", number))  # now a part of the bucket
        elif self.settings.offloads_state:
            self.transient(size * self._item(number), GRADIENTS)
        self._bucket.append(number)
        self._filled += size

    def _reduce(self) -> None:
        """reduce_ipg_grads: average what is in the bucket, and keep what is the partition's."""
        if not self._bucket:
            return
        if self._compact:
            self._make_partitions(self._bucket)
        together: list[Slice] = []
        for each in self._merged():
            together.append(each)
            if sum(each.size for each in together) > self.settings.bucket:  # allreduce_and_scatter
                self._average(together)
                together = []
        if together:
            self._average(together)
        for number in self._bucket:
            if number in self._mine:
                self._keep_mine(number)
            elif self.settings.stage == 2:
                self.device.drop(("gradient sum", number))
        self._bucket, self._filled = [], 0

    def _merged(self) -> list[Slice]:
        """Neighbours of the same rank are one, unless each is added to its place in the partition (average_tensor)."""
        merged: list[Slice] = []
        for each in (part for number in self._bucket for part in self._slices_of[number]):
            alone = self._compact and each.rank == self._rank
            if merged and not alone and merged[-1].rank == each.rank:
                merged[-1] = Slice(merged[-1].parameter, each.rank, merged[-1].size + each.size)
            else:
                merged.append(each)
        return merged

    def _average(self, slices: Sequence[Slice]) -> None:
        """allreduce_bucket: several slices are made one tensor, which is cast for the exchange."""
        memory, size = self.device, sum(each.size for each in slices)
        item, low = self._item(slices[0].parameter), BYTES[self.run.dtype]
        if len(slices) > 1:
            memory.take("together", size * item, COMMUNICATION, operator="all-reduce")
        if item != low:
            memory.take("sent", size * low, COMMUNICATION, operator="all-reduce")
        if self._compact:
            mine = max((each.size for each in slices if each.rank == self._rank), default=0)
            self.transient(mine * self.settings.accumulated, operator="all-reduce")
        memory.drop("sent")
        memory.drop("together")

    def _make_partitions(self, numbers: Iterable[int]) -> None:
        """The flat partitions to which gradients of these are added (_get_compact_grad_partition_slice)."""
        for place, group in enumerate(self.groups):
            if not self.device.holds(("partition", place)) and not self._touched[place].isdisjoint(numbers):
                self.device.take(("partition", place), self.share(group) * self.settings.accumulated, GRADIENTS)

    def _keep_mine(self, number: int) -> None:
        """copy_grads_in_partition."""
        memory, size, mine = self.device, self.trace.parameters[number].size, self._mine[number]
        if self._compact:
            if self.settings.offloads_state and self.last:
                self.transient(mine * NORM)
            if self._separate or (self.settings.offloads_state and self.last):
                memory.drop(("gradient sum", number))
            return
        if self.settings.offloads_state:
            if self.settings.stage == 2 and self.run.accumulation > 1 and not self.home.holds(("summed", number)):
                self.home.take(("summed", number), size * int(self.low(number)), GRADIENTS)
            if self.last:
                self.transient(mine * NORM)
                memory.drop(("gradient sum", number))
            return
        if not memory.holds(("kept", self._micro)):
            whole = self.size(self._mine) * int(self.low(number))
            memory.take(("kept", self._micro), whole, GRADIENTS)
        memory.drop(("gradient sum", number))

    def _finish(self) -> None:
        """independent_gradient_partition_epilogue."""
        memory = self.device
        self._reduce()
        if self._compact and not self.settings.offloads_state and self.last:
            self._make_partitions(self._mine)
        if self._micro:  # added to those of the first micro step
            memory.drop(("kept", self._micro))
        self._micro += 1
        # Gradients of other partitions, in a sum of their own, are still parts of the bucket until the update.
        if not (self._separate and self.last):
            self._release()
        for number in self._of:
            if not self._separate:
                memory.drop(("gradient sum", number))

    def _release(self) -> None:
        for place in range(1 + self.settings.overlaps):
            self.device.drop(("bucket", place))

    def _forget(self) -> None:
        """Gradients in sums of their own go, and the bucket that some of them are parts of."""
        self._release()
        for number in self._of:
            self.device.drop(("gradient sum", number))

    def update(self) -> None:
        memory, last = self.device, len(self.groups) - 1
        self._micro = 0
        if not self.settings.offloads_state:
            self.transient(max(self._mine.values(), default=0) * NORM, operator="norm")  # get_grad_norm_direct
        for number, group in enumerate(self.groups):
            if number == last and not self.settings.offloads_state:
                self._forget()
            if not self.settings.offloads_state and not self._compact and self._is_copied(group):
                memory.take("flat gradient", self.share(group) * MASTER, GRADIENTS)
                if number == last:
                    memory.drop(("kept", 0))
            self.step_group(number, self.share(group))
            memory.drop("flat gradient")
            memory.drop(("partition", number))
        memory.drop(("kept", 0))
        self.gathered_weights()
        self._forget()

    def _is_copied(self, group: Sequence[int]) -> bool:
        """Whether the gradients of a partition have to be made one tensor."""
        pieces = [self._mine[each] for each in group if each in self._mine]
        return len(pieces) != 1 or pieces[0] < self.share(group)
