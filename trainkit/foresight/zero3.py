"""ZeRO-3: parameters are partitioned, and gathered around the modules that need them.

Follows DeepSpeed 0.19; each rule names its file below `deepspeed/runtime`, and its function where that helps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from trainkit.foresight.strategies import BYTES
from trainkit.foresight.trace import COMMUNICATION, GRADIENTS, PARAMETERS, STATE, TEMPORARIES, Kind
from trainkit.foresight.zero import MASTER, NORM, Engine


class Gathered(Engine):
    """ZeRO-3 (zero/stage3.py): parameters are partitioned too, and gathered around the modules that need them.

    What is gathered and released when follows zero/partitioned_param_coordinator.py: the first micro step records the
    order of modules, by which the later ones prefetch parameters, and keep those that are soon needed again.
    """

    def build(self) -> None:
        self._persistent = self._find_persistent()
        self._partition()
        self._make_state()
        largest = max((self._whole_bytes(number) for group in self.groups for number in group), default=0)
        self.device.take("hooked", largest, PARAMETERS)  # create_reduce_and_remove_grad_hooks
        self.exchange(largest)
        self.device.drop("hooked")
        self._bucket: list[int] = []
        self._filled = 0
        self._coordinator = Coordinator(self)

    def _move(self) -> None:
        """Each rank has its slices in the machine's memory; one tensor after the other becomes a shard."""
        self.device.take("buffers", self.trace.buffers, PARAMETERS)
        self.transient(self.drawn, memory=self.host)
        for number, each in enumerate(self.trace.parameters):
            self.host.take(("slice", number), -(-each.bytes // self.run.ranks), PARAMETERS)

    def _find_persistent(self) -> set[int]:
        """Small parameters, which stay whole (zero/parameter_offload.py: mark_persistent_parameters)."""
        found: set[int] = set()
        size = 0
        for number, each in enumerate(self.trace.parameters):
            if each.size <= self.settings.persistent and size + each.size <= self.settings.model_persistent:
                found.add(number)
                size += each.size
        return found

    def _partition(self) -> None:
        """Each parameter is cut; then the shards of trained ones become one tensor, by way of the machine's memory."""
        memory, host = self.device, self.host
        where = host if self.settings.offloads_parameters else memory
        for number, each in enumerate(self.trace.parameters):  # zero/partition_parameters.py: _partition_param
            if each.scales or self.settings.swaps_parameters:  # it is put together (trainer/parallel/zero.py)
                memory.take(("whole", number), each.bytes, PARAMETERS)
                host.drop(("slice", number))
                if self.held(number) != each.bytes:
                    memory.take("cast", self.held(number), PARAMETERS)
                    memory.rename("cast", ("whole", number))
            elif self.run.device != "cpu":  # room for it, which a CPU's system gives only where there are values
                memory.take(("whole", number), self.held(number), PARAMETERS)
            place = memory if number in self._persistent and not each.trained else where
            place.take(("shard", number), self._shard_bytes(number), PARAMETERS)
            memory.drop(("whole", number))
            host.drop(("slice", number))
        trained = [number for group in self.groups for number in group]
        size = sum(map(self._shard_bytes, trained))
        host.take("staged", size, TEMPORARIES)  # zero/utils.py: defragment
        for number in trained:
            where.drop(("shard", number))
        where.take("shards", size, PARAMETERS)
        host.drop("staged")

    def _make_state(self) -> None:
        """Weights that are updated, summed gradients, and the bucket (_setup_for_real_optimizer)."""
        home, settings = self.home, self.settings
        for number, size in enumerate(self._sub_groups):  # _create_fp32_partitions
            if BYTES[self.run.dtype] != MASTER:
                home.take("converted", size * MASTER, TEMPORARIES)
            home.take(("master", number), size * MASTER, STATE)
            home.drop("converted")
        home.take("zeros", max(self._sub_groups, default=0) * MASTER, TEMPORARIES)  # initialize_optimizer_states
        if settings.offloads_state:
            for number, size in enumerate(self._sub_groups):
                home.take(("gradient", number), size * MASTER, GRADIENTS)
        home.drop("zeros")
        self.device.take("bucket", settings.bucket * BYTES[self.run.dtype], COMMUNICATION)
        total = self._shards(number for group in self.groups for number in group)
        home.take("summed", total * settings.accumulated, GRADIENTS)

    def shard(self, number: int) -> int:
        """Values of a rank's partition of a parameter, padded (zero/partition_parameters.py: _aligned_size)."""
        return -(-self.trace.parameters[number].size // self.run.ranks)

    def _shards(self, numbers: Iterable[int]) -> int:
        return sum(map(self.shard, numbers))

    def _shard_bytes(self, number: int) -> int:
        return int(self.shard(number) * self.low(number)) + self.trace.parameters[number].scales

    def _whole_bytes(self, number: int) -> int:
        return int(self.shard(number) * self.run.ranks * self.low(number))

    @property
    def uploads(self) -> bool:
        """Whether shards come from the machine's memory."""
        return self.settings.offloads_parameters and self.host is not self.device

    def gathered(self, number: int) -> int:
        """Bytes of a parameter that was gathered alone; of a single rank none, if its shards are on the device."""
        return self._whole_bytes(number) if self.run.ranks > 1 or self.uploads else 0

    def is_persistent(self, number: int) -> bool:
        """Whether every rank keeps the parameter whole between its uses in a step."""
        return number in self._persistent

    @cached_property
    def _sub_groups(self) -> list[int]:
        """Values of what is updated at a time (_create_fp16_sub_groups)."""
        found: list[int] = []
        for group in self.groups:
            size = 0
            for number in group:
                size += self.shard(number)
                if size >= self.settings.sub_group:
                    found.append(size)
                    size = 0
            if size:
                found.append(size)
        return found

    def at(self, kind: int, number: int) -> None:
        super().at(kind, number)
        coordinator = self._coordinator
        if kind == Kind.FORWARD:
            coordinator.begin()
        elif kind == Kind.ENTER:
            coordinator.fetch(number, forward=True)
        elif kind == Kind.LEAVE:
            coordinator.release(number, forward=True)
        elif kind == Kind.BACKWARD:
            coordinator.backward = True
        elif kind == Kind.REACH:
            coordinator.fetch(number, forward=False)
        elif kind == Kind.AFTER:
            coordinator.release(number, forward=False)
        elif kind == Kind.READY and number in self._of:
            self._add(number)
        elif kind == Kind.END:
            self._reduce()
            coordinator.release_rest()

    # -- gradients

    def _add(self, number: int) -> None:
        """reduce_independent_p_g_buckets_and_remove_grads: a gradient that fits becomes a part of the bucket."""
        size = self.trace.parameters[number].size
        if self._filled + size > self.settings.bucket:
            self._reduce()
        if size <= self.settings.bucket:
            self.device.drop(self._of[number])
        self._bucket.append(number)
        self._filled += size

    def _reduce(self) -> None:
        """Average and scatter what is in the bucket (__avg_scatter_grads, partition_grads)."""
        if not self._bucket:
            return
        memory, low, ranks = self.device, BYTES[self.run.dtype], self.run.ranks
        shards, size = self._shards(self._bucket), self.size(self._bucket)
        padded = shards * ranks * low
        if len(self._bucket) > 1 or size % ranks:  # comm/coalesced_collectives.py: reduce_scatter_coalesced
            memory.take("scattered", padded, COMMUNICATION, operator="reduce-scatter")
        self.exchange(padded)
        if low != self.settings.accumulated:
            memory.take("widened", shards * self.settings.accumulated, GRADIENTS, operator="reduce-scatter")
            memory.drop("scattered")
        if self.settings.offloads_state:
            largest = max(map(self.shard, self._bucket))
            if self.host is not memory:
                memory.take("uploaded", largest * self.settings.accumulated, COMMUNICATION)
            if self.last:
                self.transient(largest * NORM, operator="norm")
            memory.drop("uploaded")
        memory.drop("widened")
        memory.drop("scattered")
        for number in self._bucket:
            memory.drop(self._of[number])
        self._bucket, self._filled = [], 0

    def update(self) -> None:
        memory, settings = self.device, self.settings
        self._coordinator.release_all()
        mine = [self.shard(number) for group in self.groups for number in group]
        if self.run.dtype == "fp16":  # has_overflow: magnitudes, and whether each is infinite
            self.transient(sum(mine) * (settings.accumulated + 1), operator="isinf", memory=self.home)
        if not settings.offloads_state:
            self.transient(max(mine, default=0) * NORM, operator="norm")  # get_grad_norm_direct
        for number, size in enumerate(self._sub_groups):
            if not settings.offloads_state:
                memory.take("flat gradient", size * MASTER, GRADIENTS)
            self.step_group(number, size)
            memory.drop("flat gradient")
        self._coordinator.gather_persistent()


AWAY, FLYING, THERE = range(3)  # zero/partition_parameters.py: ZeroParamStatus


@dataclass(eq=False, slots=True)
class Flight:
    """Parameters that are gathered at once. waiting: those that nobody has needed yet, while the buffer is there."""

    parameters: Sequence[int]
    waiting: set[int]
    landed: bool = False

    @property
    def alone(self) -> bool:
        """Whether it is only one, and so needs no buffer."""
        return len(self.parameters) == 1


class Coordinator:
    """Gathers parameters for modules and releases them (zero/partitioned_param_coordinator.py).

    Several parameters are gathered into one buffer, from which they are copied when the first of them is needed; it
    lives until all of them have been.
    """

    def __init__(self, engine: Gathered) -> None:
        self.engine, self.backward = engine, False
        self._parameters = engine.trace.parameters
        self._modules = engine.trace.modules
        self._status = dict.fromkeys(range(len(self._parameters)), AWAY)
        self._users: dict[int, set[int]] = {number: set() for number in self._status}
        self._flights: dict[int, Flight] = {}  # of parameters in flight
        self._order: list[int] = []  # modules by step; complete from the second micro step on
        self._complete = False
        self._step = self._available = 0
        self._queue: deque[tuple[int, int]] = deque()
        self._fetched: dict[int, int] = {}  # parameter -> step for which it was fetched last
        self._open: dict[int, set[int]] = {}  # module in backward -> frozen parameters that it recomputes with

    def begin(self) -> None:
        """reset_step, at the start of each forward pass."""
        self._land_all()
        if self._order and not self._complete:
            self._complete = True
            self._prepare()
        self.backward = False
        self._queue = deque(self._uses) if self._complete else deque()
        self._fetched = {}
        self._step = self._available = 0

    def _prepare(self) -> None:
        """What is looked up in a complete order: the uses of parameters by step."""
        self._uses = [(number, step) for step, module in enumerate(self._order)
                      for number in sorted(set(self._modules[module].own))]  # fmt: skip
        self._steps: dict[int, list[int]] = {}
        for number, step in self._uses:
            self._steps.setdefault(number, []).append(step)
        sizes = (self.engine.size(set(self._modules[module].own)) for module in self._order)
        self._before = [0, *accumulate(sizes)]  # values of all modules before a step

    def fetch(self, module: int, *, forward: bool) -> None:
        """fetch_sub_module: gather what a module needs, wait for it, and prefetch what follows."""
        if not forward:
            self._open.setdefault(module, set())
        if not self._complete:
            self._order.append(module)
        own = sorted(set(self._modules[module].own))
        self._gather([number for number in own if self._status[number] == AWAY])
        for number in own:
            self._users[number].add(module)
            if forward and self.backward and self._open and not self._parameters[number].trained:
                owner = next(reversed(self._open))
                self._open[owner].add(number)
                self._users[number].add(owner)
            if number in self._flights:
                self._land(number)
        if self._complete:
            self._prefetch(own)
        self._step += 1

    def _prefetch(self, own: Sequence[int]) -> None:
        fresh = {number for number in own if self._fetched.get(number, -1) < self._step}
        taken: set[int] = set()
        while self._queue and len(taken) < len(fresh):
            number, step = self._queue.popleft()
            self._fetched[number] = step
            taken.add(number)
        settings, chosen, size = self.engine.settings, list[int](), 0
        while self._queue and size < min(settings.live - self._available, settings.prefetched):
            number, step = self._queue.popleft()
            self._fetched[number] = max(self._fetched.get(number, -1), step)
            if self._status[number] == AWAY and number not in chosen:
                chosen.append(number)
                size += self._parameters[number].size
        self._gather(chosen)

    def _gather(self, numbers: Sequence[int]) -> None:
        """Begin to gather parameters (zero/partition_parameters.py: all_gather_coalesced)."""
        engine = self.engine
        if not numbers:
            return
        self._available += engine.size(numbers)
        memory, ranks = engine.device, engine.run.ranks
        if ranks == 1:  # NoGatherHandle
            for number in numbers:
                self._depart([number], engine.gathered(number))
            return
        total = sum(map(engine.gathered, numbers))
        if engine.uploads:
            memory.take("uploaded", total // ranks, COMMUNICATION)
        self._depart(sorted(numbers), total)
        engine.exchange(total)
        memory.drop("uploaded")

    def _depart(self, numbers: Sequence[int], size: int) -> None:
        """size: bytes of the buffer; that of one parameter is the parameter (_all_gather_sequential)."""
        flight = Flight(numbers, set(numbers))
        for number in numbers:
            self._status[number] = FLYING
            self._flights[number] = flight
        name, part = (("gathered", numbers[0]), PARAMETERS) if flight.alone else (flight, COMMUNICATION)
        self.engine.device.take(name, size, part, operator="all-gather")

    def _land(self, number: int) -> None:
        """Wait for a gather, which copies all parameters out of its buffer (AllGatherCoalescedHandle.wait)."""
        memory, flight = self.engine.device, self._flights.pop(number)
        flight.waiting.discard(number)
        if not flight.landed:
            flight.landed = True
            for each in flight.parameters:
                self._status[each] = THERE
                if not flight.alone:
                    memory.take(("gathered", each), self.engine.held(each), PARAMETERS, operator="all-gather")
        if not flight.waiting:
            memory.drop(flight)

    def _land_all(self) -> None:
        for number in list(self._flights):
            self._land(number)
            self._let_go(number)

    def release(self, module: int, *, forward: bool) -> None:
        """release_sub_module."""
        own = set(self._modules[module].own)
        released = {number for number in own if self._is_released(number)} if self._complete else set(own)
        if not forward:
            recomputed = self._open.pop(module, set())
            own |= recomputed
            released |= {number for number in recomputed if not self.engine.is_persistent(number)}
        for number in own:
            self._users[number].discard(module)
            if number in released:
                self._let_go(number)

    def _is_released(self, number: int) -> bool:
        """__params_to_release: not if it stays for good, or is needed again soon."""
        if self.engine.is_persistent(number) or self._fetched.get(number, -1) > self._step:
            return False
        following = next((step for step in self._steps[number] if step >= self._step), None)
        if following is None:
            return True
        return self._before[following] - self._before[self._step] >= self.engine.settings.reuse

    def _let_go(self, number: int) -> None:
        if self._status[number] == THERE and not self._users[number]:
            self.engine.device.drop(("gathered", number))
            self._available -= self._parameters[number].size
            self._status[number] = AWAY

    def release_rest(self) -> None:
        """release_backward_leftovers: of modules whose inputs have no gradient."""
        while self._open:
            module, recomputed = self._open.popitem()
            for number in {*self._modules[module].own, *recomputed}:
                self._users[number].discard(module)
                if not self.engine.is_persistent(number):
                    self._let_go(number)

    def release_all(self) -> None:
        """release_and_reset_all, before the update."""
        for number in self._status:
            if number in self._flights:
                self._land(number)
            self._users[number].clear()
            self._let_go(number)

    def gather_persistent(self) -> None:
        """After the update, what stays whole is gathered anew (stage3.py: _post_step)."""
        engine = self.engine
        for number in self._status:
            if engine.is_persistent(number):
                size = engine.gathered(number)
                engine.device.take(("gathered", number), size, PARAMETERS, operator="all-gather")
                engine.exchange(size)
                self._status[number] = THERE
