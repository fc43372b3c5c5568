"""CUDA's caching allocator of torch, on paper: what it reserves for a timeline of memory taken and given back.

Rules of c10/cuda/CUDACachingAllocator.cpp (torch 2.13): sizes rounded to 512 bytes; pools of small and large blocks for
each stream; a free block is the smallest that suffices, split where enough is left; free neighbours merge.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from trainkit.foresight.timeline import Timeline

ROUND = 512
SMALL = 1 << 20  # up to this size a block is of the small pool
SMALL_SEGMENT, LARGE_SEGMENT = 2 << 20, 20 << 20  # what is asked of the driver at least
LARGE = 10 << 20  # from this size on a segment is for one block, rounded to 2 MiB
ROUND_LARGE = 2 << 20


class OutOfMemoryError(Exception):
    """What is wanted does not fit. at: number of the change in the timeline."""

    def __init__(self, wanted: int, reserved: int, allocated: int) -> None:
        super().__init__(wanted, reserved, allocated)
        self.wanted, self.reserved, self.allocated, self.at = wanted, reserved, allocated, 0


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment, with its neighbours."""

    address: int
    size: int
    pool: tuple[int, bool]  # stream, and whether it is of the small pool
    before: Block | None = None
    after: Block | None = None
    free: bool = True


class CachingAllocator:
    """limit: bytes that the driver can give; None for no limit. expandable: `expandable_segments:True`."""

    def __init__(self, limit: int | None = None, *, expandable: bool = False) -> None:
        self.limit, self.expandable = limit, expandable
        self.reserved = self.peak_reserved = self.allocated = self.peak_allocated = 0
        self._free: dict[tuple[int, bool], list[tuple[int, int]]] = {}  # sizes and addresses, ascending
        self._at: dict[int, Block] = {}
        self._last: dict[tuple[int, bool], Block] = {}  # of the expandable segment of each pool
        self._next = 1 << 40  # address of the next segment

    def take(self, size: int, stream: int = 0) -> Block:
        """A block. Raises OutOfMemoryError."""
        size = max(ROUND, -(-size // ROUND) * ROUND)
        pool = stream, size <= SMALL
        free = self._free.setdefault(pool, [])
        place = bisect_left(free, (size, 0))
        block = self._at[free.pop(place)[1]] if place < len(free) else self._grown(size, pool)
        rest = block.size - size
        if rest >= ROUND if pool[1] or self.expandable else rest > SMALL:
            split = Block(block.address + size, rest, pool, block, block.after)
            if split.after is not None:
                split.after.before = split
            elif self._last.get(pool) is block:
                self._last[pool] = split
            block.after, block.size = split, size
            self._at[split.address] = split
            insort(free, (rest, split.address))
        block.free = False
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def give_back(self, block: Block) -> None:
        """The block may be taken again, with the free ones beside it."""
        self.allocated -= block.size
        free = self._free[block.pool]
        for other in (block.before, block.after):
            if other is None or not other.free:
                continue
            del free[bisect_left(free, (other.size, other.address))]
            first, second = (other, block) if other is block.before else (block, other)
            first.size, first.after = first.size + second.size, second.after
            if first.after is not None:
                first.after.before = first
            if self._last.get(block.pool) is second:
                self._last[block.pool] = first
            del self._at[second.address]
            block = first
        block.free = True
        insort(free, (block.size, block.address))

    def _grown(self, size: int, pool: tuple[int, bool]) -> Block:
        """A block of memory that is new from the driver."""
        if self.expandable:
            page = SMALL_SEGMENT if pool[1] else LARGE_SEGMENT
            last = self._last.get(pool)
            missing = size - (last.size if last is not None and last.free else 0)
            length = -(-missing // page) * page
            self._reserve(size, length)
            if last is not self._last.get(pool):  # it went back to the driver, for want of memory
                self.reserved -= length
                return self._grown(size, pool)
            if last is None:
                return self._segment(length, pool)
            if last.free:
                free = self._free[pool]
                del free[bisect_left(free, (last.size, last.address))]
                last.size += length
                return last
            block = Block(last.address + last.size, length, pool, last)
            last.after = self._last[pool] = self._at[block.address] = block
            return block
        large = LARGE_SEGMENT if size < LARGE else -(-size // ROUND_LARGE) * ROUND_LARGE
        length = SMALL_SEGMENT if pool[1] else large
        self._reserve(size, length)
        return self._segment(length, pool)

    def _segment(self, length: int, pool: tuple[int, bool]) -> Block:
        block = Block(self._next, length, pool)
        self._at[block.address] = block
        if self.expandable:
            self._last[pool] = block
        self._next += 1 << 44
        return block

    def _reserve(self, size: int, length: int) -> None:
        if self.limit is not None and self.reserved + length > self.limit:
            self._give_up_cached()
            if self.reserved + length > self.limit:
                raise OutOfMemoryError(size, self.reserved, self.allocated)
        self.reserved += length
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _give_up_cached(self) -> None:
        """Whole segments that are free go back to the driver."""
        for pool, free in self._free.items():
            kept = []
            for size, address in free:
                block = self._at[address]
                if block.before is None and block.after is None:
                    self.reserved -= size
                    del self._at[address]
                    if self._last.get(pool) is block:
                        del self._last[pool]
                else:
                    kept.append((size, address))
            free[:] = kept


def replay(timeline: Timeline, limit: int | None = None, *, expandable: bool = False) -> CachingAllocator:
    """The allocator after the timeline. Raises OutOfMemoryError."""
    allocator, blocks = CachingAllocator(limit, expandable=expandable), dict[int, Block]()
    for place, (identity, size) in enumerate(timeline.changes):
        if not size:
            allocator.give_back(blocks.pop(identity))
            continue
        try:
            blocks[identity] = allocator.take(size, timeline.stream[identity])
        except OutOfMemoryError as error:
            error.at = place
            raise
    return allocator
