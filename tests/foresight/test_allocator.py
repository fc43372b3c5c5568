"""torch's caching allocator on paper: how sizes are rounded, split, merged, and given back to the driver."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from trainkit.foresight.allocator import Block, CachingAllocator, OutOfMemoryError, replay
from trainkit.foresight.timeline import Timeline

MIB = 1 << 20


def test_small_blocks_share_a_segment_and_large_ones_are_rounded() -> None:
    allocator = CachingAllocator()
    allocator.take(1)
    allocator.take(1000)
    assert (allocator.allocated, allocator.reserved) == (512 + 1024, 2 * MIB)
    allocator.take(3 * MIB)  # of a segment of 20 MiB
    allocator.take(4 * MIB)
    assert allocator.reserved == 22 * MIB
    allocator.take(14 * MIB + 1)  # one of its own, to 2 MiB
    assert allocator.reserved == 38 * MIB


def test_what_is_given_back_is_taken_again_and_neighbours_merge() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.take(5 * MIB) for _ in range(4)]
    assert allocator.reserved == 20 * MIB
    for block in (blocks[0], blocks[2], blocks[1], blocks[3]):
        allocator.give_back(block)
    assert allocator.allocated == 0
    allocator.take(18 * MIB)  # the whole segment, put together again
    assert allocator.reserved == 20 * MIB


def test_memory_of_one_stream_is_not_anothers() -> None:
    allocator = CachingAllocator()
    allocator.give_back(allocator.take(15 * MIB))
    allocator.take(15 * MIB, stream=1)
    assert allocator.reserved == 32 * MIB


def test_at_the_limit_what_is_free_goes_back_to_the_driver() -> None:
    allocator = CachingAllocator(limit=40 * MIB)
    allocator.give_back(allocator.take(30 * MIB))
    allocator.take(36 * MIB)
    assert allocator.reserved == 36 * MIB
    with pytest.raises(OutOfMemoryError) as error:
        allocator.take(11 * MIB)
    assert error.value.wanted == 11 * MIB


def test_expandable_segments_lose_nothing_between_blocks() -> None:
    def steps(*, expandable: bool) -> int:
        timeline = Timeline()
        for number in range(20):
            timeline.take("activations", (number + 12) * MIB, 3)
        return replay(timeline, expandable=expandable).peak_reserved

    assert steps(expandable=True) < steps(expandable=False)


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("limit", [None, 400 * MIB])
def test_no_order_of_calls_loses_or_doubles_memory(expandable: bool, limit: int | None) -> None:
    chance, allocator = random.Random(7), CachingAllocator(limit, expandable=expandable)
    held: list[Block] = []
    for _ in range(3000):
        if held and chance.random() < 0.5:
            allocator.give_back(held.pop(chance.randrange(len(held))))
            continue
        try:
            held.append(allocator.take(int(2 ** chance.uniform(8, 25)), stream=chance.randrange(2)))
        except OutOfMemoryError:
            assert limit is not None
            while held:
                allocator.give_back(held.pop())
        assert allocator.allocated == sum(block.size for block in held) <= allocator.reserved
        places = sorted((block.address, block.address + block.size) for block in held)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(places))
    for block in held:
        allocator.give_back(block)
    assert allocator.allocated == 0
