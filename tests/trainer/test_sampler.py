"""The order of samples."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainkit.launch_plan.model import SolvedBatch
from trainkit.trainer.data.sampler import Permutation, SampleOrder, positions_of_rank


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**63 - 1))
def test_a_permutation_visits_every_sample_once(size: int, seed: int) -> None:
    permutation = Permutation(size, seed)
    assert sorted(permutation[index] for index in range(size)) == list(range(size))


def test_seeds_and_epochs_give_different_orders() -> None:
    orders = [
        SampleOrder(seed, samples=500, global_batch=500).indices(step, 0, 500) for seed in (0, 1) for step in (0, 1)
    ]
    assert all(sorted(order) == list(range(500)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    # Neighbours stay neighbours about twice in 500 places of a random order.
    assert sum(abs(a - b) == 1 for a, b in zip(orders[0], orders[0][1:], strict=False)) < 12


@given(step=st.integers(0, 50), micro=st.integers(1, 3), accumulation=st.integers(1, 3), ranks=st.integers(1, 4))
def test_the_ranks_together_see_the_global_batch_whatever_their_number(
    step: int, micro: int, accumulation: int, ranks: int
) -> None:
    batch = SolvedBatch(micro * accumulation * ranks, micro, accumulation, ranks, micro)
    order = SampleOrder(3, samples=40, global_batch=batch.global_)
    seen = [
        index
        for rank in range(ranks)
        for index in order.indices(step, positions_of_rank(batch, rank).start, positions_of_rank(batch, rank).stop)
    ]
    assert seen == order.indices(step, 0, batch.global_)


def test_an_epoch_ends_in_the_middle_of_a_batch_without_losing_or_repeating_a_sample() -> None:
    order = SampleOrder(0, samples=10, global_batch=4)
    seen = [index for step in range(5) for index in order.indices(step, 0, 4)]
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))


@pytest.mark.parametrize("samples", [10**12, 2**40])
def test_a_huge_corpus_needs_no_list_of_its_samples(samples: int) -> None:
    indices = SampleOrder(0, samples, global_batch=8).indices(10**9, 0, 8)
    assert len(set(indices)) == 8
    assert all(0 <= index < samples for index in indices)
