"""Batch arithmetic: any three sides give the fourth, and sides that cannot fit give nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainkit.batch import Sides, solve

SIZE = st.integers(1, 1000)


@given(SIZE, SIZE, SIZE, st.sampled_from(Sides._fields))
def test_any_three_sides_give_the_fourth(micro: int, accumulation: int, ranks: int, missing: str) -> None:
    whole = Sides(micro * accumulation * ranks, micro, accumulation, ranks)
    assert solve(whole) == whole
    assert solve(whole._replace(**{missing: None})) == whole


@given(SIZE, SIZE, SIZE, st.integers(1, 10**9))
def test_sides_that_contradict_one_another_give_nothing(micro: int, accumulation: int, ranks: int, total: int) -> None:
    fits = total == micro * accumulation * ranks
    assert (solve(Sides(total, micro, accumulation, ranks)) is not None) == fits


@pytest.mark.parametrize(
    ("known", "solved"),
    [
        (Sides(12, 4), Sides(12, 4)),
        (Sides(12, ranks=4), Sides(12, ranks=4)),
        (Sides(micro=4), Sides(micro=4)),
        (Sides(12, 5), None),
        (Sides(2, ranks=4), None),
    ],
)
def test_two_sides_must_fit_and_give_no_third(known: Sides, solved: Sides | None) -> None:
    assert solve(known) == solved
