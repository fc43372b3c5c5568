"""Cards by index, UUID and prefix, inside what the caller's CUDA_VISIBLE_DEVICES allows."""

from __future__ import annotations

import pytest

from trainkit.machine.facts import Facts, Gpu
from trainkit.machine.selection import allocation, duplicates, matching, ordered, pick, take

UUIDS = ("GPU-aa11", "GPU-ab22", "GPU-cc33", "GPU-0d44")
CARDS = tuple(Gpu(index, uuid, "card", 1, 1, (8, 0)) for index, uuid in enumerate(UUIDS))


def facts(visible: str | None = None) -> Facts:
    return Facts("linux", "x86_64", "h", "3.11", "/p", 8, 1, gpus=CARDS[::-1], visible_devices=visible)


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("-1", []),
        ("2", [2]),
        ("3, 1", [3, 1]),
        ("GPU-cc33,0", [2, 0]),
        ("GPU-c", [2]),
        ("GPU-a", []),  # names two cards
        ("1,GPU-zz,2", [1]),
        ("1,9,2", [1]),
        ("1,-1,2", [1]),
        ("1,1", []),
        ("1,GPU-ab22", []),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(visible: str | None, indices: list[int]) -> None:
    assert [gpu.index for gpu in allocation(facts(visible))] == indices


@pytest.mark.parametrize(
    ("entry", "indices"),
    [(0, [0]), ("0", [0]), ("GPU-aa", [0]), ("aa", [0]), ("GPU-a", [0, 1]), ("zz", []), (9, []), ("", [])],
)
def test_an_index_a_uuid_or_a_prefix_names_a_card(entry: int | str, indices: list[int]) -> None:
    assert [gpu.index for gpu in matching(entry, CARDS)] == indices


def test_a_pick_keeps_its_order_and_reports_everything_that_is_missing() -> None:
    found = pick([3, "GPU-aa", 7, "GPU-a", 1], facts("3,0"))
    assert [gpu.index for gpu in found.cards] == [3, 0, 0]
    assert len(found.missing) == 2


def test_a_count_takes_the_first_of_the_allocation() -> None:
    assert [gpu.index for gpu in take(2, allocation(facts("3,1,0"))).cards] == [3, 1]
    assert take(3, allocation(facts("3,1"))).missing == ("3 GPUs are requested, 2 available",)


def test_the_same_card_by_two_names_is_a_duplicate() -> None:
    assert duplicates([0, "GPU-aa", 1, 1, "7", 7], facts()) == ("GPU-aa", "1", "7")


def test_fastest_first_puts_newer_architectures_and_more_memory_first() -> None:
    cards = (
        Gpu(0, "GPU-0", "old and big", 80, 80, (7, 0)),
        Gpu(1, "GPU-1", "new and small", 16, 16, (9, 0)),
        Gpu(2, "GPU-2", "new and big", 80, 80, (9, 0)),
    )
    assert [gpu.index for gpu in ordered(cards, "fastest")] == [2, 1, 0]
    assert [gpu.index for gpu in ordered(cards, "pci")] == [0, 1, 2]
