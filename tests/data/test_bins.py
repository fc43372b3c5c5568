"""Whole texts in bins: none over its width, each text once, full, and in other company in each epoch."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from trainkit.data.packing import GROUP, best_fit, bins_needed, epoch_bins, groups_of, in_group

pytestmark = pytest.mark.torch  # NumPy comes with the libraries around torch

WIDTH = 128
SIZES = some.lists(some.integers(1, WIDTH), min_size=1, max_size=200)


def slow_best_fit(sizes: Sequence[int], order: Sequence[int], width: int) -> int:
    """As many bins as best fit takes when every bin is looked at."""
    rooms: list[int] = []
    for place in order:
        fitting = [room for room in rooms if room >= sizes[place]]
        if fitting:
            rooms.remove(min(fitting))
            rooms.append(min(fitting) - sizes[place])
        else:
            rooms.append(width - sizes[place])
    return len(rooms)


def falling(sizes: Sequence[int]) -> list[int]:
    return sorted(range(len(sizes)), key=lambda place: -sizes[place])


def lognormal(count: int, median: float, spread: float, seed: int, width: int = WIDTH) -> list[int]:
    chance = random.Random(seed)
    return [min(width, max(1, round(median * chance.lognormvariate(0, spread)))) for _ in range(count)]


@given(SIZES, some.randoms())
def test_it_is_best_fit_whatever_the_order(sizes: list[int], chance: random.Random) -> None:
    order = list(range(len(sizes)))
    chance.shuffle(order)
    bins = best_fit(sizes, order, WIDTH)
    assert sorted(itertools.chain.from_iterable(bins)) == sorted(order)
    assert all(0 < sum(sizes[place] for place in each) <= WIDTH for each in bins)
    assert len(bins) == slow_best_fit(sizes, order, WIDTH)


@given(SIZES, some.integers(0, 2**32))
def test_every_epoch_has_each_text_once_in_as_many_bins_nearly_as_full_as_they_can_be(
    sizes: list[int], seed: int
) -> None:
    count = bins_needed(np.array(sizes), WIDTH)
    bins = epoch_bins(np.array(sizes), WIDTH, count, seed)
    assert len(bins) == count
    assert sorted(itertools.chain.from_iterable(bins)) == list(range(len(sizes)))
    assert all(0 < sum(sizes[place] for place in each) <= WIDTH for each in bins)
    assert slow_best_fit(sizes, falling(sizes), WIDTH) >= 0.99 * count
    assert epoch_bins(np.array(sizes), WIDTH, count, seed) == bins


WIDE = 1024


@given(some.integers(600, 1500), some.floats(8, WIDE / 4), some.floats(0.5, 1.2), some.integers(0, 999))
def test_bins_are_97_of_100_full_where_half_of_the_texts_fill_no_more_than_a_quarter(
    count: int, median: float, spread: float, seed: int
) -> None:
    sizes = lognormal(count, median, spread, seed, WIDE)
    if statistics.median(sizes) <= WIDE / 4 and sum(sizes) > 40 * WIDE:
        assert sum(sizes) >= 0.97 * WIDE * bins_needed(np.array(sizes), WIDE)


def neighbours(bins: Sequence[Sequence[int]]) -> set[tuple[int, ...]]:
    return {pair for each in bins for pair in itertools.combinations(sorted(each), 2)}


@pytest.mark.parametrize("spread", [0.0, 0.4, 0.9])
def test_texts_have_other_neighbours_in_each_epoch(spread: float) -> None:
    sizes = np.array(lognormal(2000, 25, spread, 0))
    count = bins_needed(sizes, WIDTH)
    epochs = [neighbours(epoch_bins(sizes, WIDTH, count, seed)) for seed in range(4)]
    for one, other in itertools.combinations(epochs, 2):
        assert len(one & other) < 0.1 * len(one)


def test_the_order_of_bins_is_another_in_each_epoch_even_where_each_text_fills_one() -> None:
    sizes = np.full(50, WIDTH)
    orders = [tuple(each[0] for each in epoch_bins(sizes, WIDTH, 50, seed)) for seed in range(3)]
    assert len(set(orders)) == 3
    assert all(sorted(each) == list(range(50)) for each in orders)


def test_more_texts_than_a_group_has_are_packed_in_groups_that_have_of_everything() -> None:
    count = 2 * GROUP + 5
    groups = groups_of(count)
    assert groups == 3
    places = np.arange(count)  # a file that is sorted by length
    parts = [places[in_group(each, groups, count)] for each in range(groups)]
    assert sorted(np.concatenate(parts).tolist()) == places.tolist()
    assert all(len(part) <= GROUP for part in parts)
    assert max(part.mean() for part in parts) - min(part.mean() for part in parts) < 4
    assert (groups_of(1), groups_of(GROUP), groups_of(GROUP + 1)) == (1, 1, 2)


def test_a_large_group_is_packed_within_seconds() -> None:
    sizes = np.array(lognormal(GROUP, 25, 0.9, 1))
    count = bins_needed(sizes, WIDTH)
    bins = epoch_bins(sizes, WIDTH, count, 7)
    assert len(bins) == count
    assert sizes.sum() > 0.97 * WIDTH * count
