"""The batch triangle: any two sides give the third, and three that disagree are settled by their layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainkit.errors import RecipeError
from trainkit.planner.batch import solve_batch
from trainkit.recipe.resolved import Resolved
from trainkit.recipe.schema import Recipe

Layered = Callable[..., Resolved]


def solved(resolved: Resolved, ranks: int) -> tuple[int | None, int | None, int | None]:
    batch = solve_batch(resolved, ranks)
    return batch.global_, batch.micro, batch.accumulation


@pytest.mark.parametrize(
    ("batch", "ranks", "expected"),
    [
        ({}, 2, (16, 8, 1)),
        ({"micro": 4}, 2, (8, 4, 1)),
        ({"accumulation": 3}, 2, (48, 8, 3)),
        ({"micro": 4, "accumulation": 3}, 2, (24, 4, 3)),
        ({"global": 64, "micro": 4}, 2, (64, 4, 8)),
        ({"global": 64, "accumulation": 8}, 2, (64, 4, 8)),
        ({"global": 64}, 2, (64, 8, 4)),
        ({"global": 10}, 2, (10, 5, 1)),
        ({"global": 26}, 2, (26, 1, 13)),
        ({"global": 64, "micro": 4, "accumulation": 8}, 2, (64, 4, 8)),
    ],
)
def test_any_two_sides_give_the_third(
    layered: Layered, batch: dict[str, Any], ranks: int, expected: tuple[int, int, int]
) -> None:
    assert solved(layered({"batch": batch}), ranks) == expected


@pytest.mark.parametrize(
    ("batch", "ranks", "nearest"),
    [
        ({"global": 63, "micro": 4}, 2, "56 or 64"),
        ({"global": 3, "micro": 4}, 2, "set batch.global to 8"),
        ({"global": 10, "accumulation": 4}, 2, "8 or 16"),
        ({"global": 7}, 2, "6 or 8"),
    ],
)
def test_numbers_that_do_not_divide_are_refused_with_the_nearest_that_do(
    layered: Layered, batch: dict[str, Any], ranks: int, nearest: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        solve_batch(layered({"batch": batch}), ranks)
    (diagnostic,) = caught.value.diagnostics
    assert nearest in diagnostic.hint
    assert diagnostic.origin is not None
    assert diagnostic.origin.place == "layer0.yaml:1:3"


@pytest.mark.parametrize(
    ("weak", "strong", "expected", "loser"),
    [
        ({"global": 64}, {"micro": 4, "accumulation": 2}, (16, 4, 2), "global"),
        ({"micro": 16}, {"global": 64, "accumulation": 4}, (64, 8, 4), "micro"),
        ({"accumulation": 7}, {"global": 64, "micro": 4}, (64, 4, 8), "accumulation"),
        ({"global": 64, "accumulation": 7}, {"micro": 4}, (64, 4, 8), "accumulation"),
        ({"global": 64, "micro": 3}, {"accumulation": 2}, (12, 3, 2), "global"),
        ({"micro": 3, "accumulation": 5}, {"global": 64}, None, "accumulation"),
    ],
)
def test_of_three_that_disagree_the_weakest_layer_gives_way(
    layered: Layered,
    weak: dict[str, int],
    strong: dict[str, int],
    expected: tuple[int, int, int] | None,
    loser: str,
) -> None:
    resolved = layered({"batch": weak}, {"batch": strong})
    if expected is None:  # accumulation gives way, and 64 cannot be divided by 3 x 2
        with pytest.raises(RecipeError, match="cannot be divided"):
            solve_batch(resolved, 2)
        return
    batch = solve_batch(resolved, 2)
    assert (batch.global_, batch.micro, batch.accumulation) == expected
    assert batch.note.startswith(f"batch.{loser} gives way")
    assert "layer0.yaml" in batch.note


def test_three_in_one_layer_that_disagree_are_an_error_that_names_all_three(layered: Layered) -> None:
    with pytest.raises(RecipeError) as caught:
        solve_batch(layered({"batch": {"global": 64, "micro": 4, "accumulation": 2}}), 2)
    (diagnostic,) = caught.value.diagnostics
    for place in ("global 64 (layer0.yaml:1:3)", "micro 4 (layer0.yaml:2:3)", "accumulation 2 (layer0.yaml:3:3)"):
        assert place in diagnostic.what
    assert "set batch.global to 16" in diagnostic.hint


def test_evaluation_takes_the_micro_batch_unless_told_otherwise(layered: Layered) -> None:
    assert solve_batch(layered({"batch": {"micro": 4}}), 2).eval_micro == 4
    assert solve_batch(layered({"batch": {"micro": 4, "eval_micro": 32}}), 2).eval_micro == 32


def test_a_micro_batch_left_to_the_trainer_has_the_divisors_of_a_ranks_share_to_choose_from(layered: Layered) -> None:
    batch = solve_batch(layered({"batch": {"global": 48, "micro": "auto"}}), 2)
    assert batch.search == (1, 2, 3, 4, 6, 8, 12, 24)
    assert (batch.global_, batch.micro, batch.accumulation, batch.eval_micro) == (48, 1, 24, 8)


def test_a_micro_batch_that_the_other_sides_settle_is_not_searched_for(layered: Layered) -> None:
    batch = solve_batch(layered({"batch": {"global": 48, "micro": "auto", "accumulation": 4}}), 2)
    assert (batch.micro, batch.search) == (6, ())
    assert solve_batch(layered({"batch": {"global": 2, "micro": "auto"}}), 2).search == ()


def test_a_search_without_a_global_batch_is_refused(layered: Layered) -> None:
    with pytest.raises(RecipeError, match=r"batch.micro is auto, and batch.global is not given"):
        solve_batch(layered({"batch": {"micro": "auto"}}), 2)


side = st.none() | st.integers(1, 200)


@given(global_=side, micro=side, accumulation=side, ranks=st.integers(1, 16))
def test_a_solution_always_satisfies_the_equation_and_keeps_what_was_given(
    global_: int | None, micro: int | None, accumulation: int | None, ranks: int
) -> None:
    batch = {"global": global_, "micro": micro, "accumulation": accumulation}
    given_sides = {name: value for name, value in batch.items() if value is not None}
    recipe = Recipe.model_validate({"batch": given_sides})
    try:
        found = solve_batch(Resolved(recipe, {}, {}), ranks)
    except RecipeError as error:
        assert error.diagnostics[0].hint
        return
    assert found.micro
    assert found.accumulation
    assert found.global_ == found.micro * found.accumulation * ranks
    sides = {"global": found.global_, "micro": found.micro, "accumulation": found.accumulation}
    assert all(sides[name] == value for name, value in given_sides.items())


@pytest.mark.parametrize(
    ("kind", "batch", "args", "sides"),
    [
        ("hf", {}, [], (None, None, None)),
        ("hf", {"micro": 4}, [], (None, 4, None)),
        ("hf", {"accumulation": 3}, ["--per_device_train_batch_size", "4"], (24, 4, 3)),
        ("hf", {"global": 64}, [], (64, 8, 4)),
        ("hf", {"global": 64}, ["--per_device_train_batch_size=2"], (64, 2, 16)),
        ("accelerate", {}, ["--per_device_train_batch_size", "4"], (None, None, None)),
        ("torch", {}, [], (None, None, None)),
        ("deepspeed", {"micro": 4}, [], (8, 4, 1)),  # as DeepSpeed's own engine takes it
    ],
)
def test_of_a_program_of_the_users_own_a_side_that_nobody_gives_stays_open(
    layered: Layered,
    kind: str,
    batch: dict[str, Any],
    args: list[str],
    sides: tuple[int | None, int | None, int | None],
) -> None:
    recipe = {"program": {"kind": kind, "script": "train.py", "args": args}, "batch": batch}
    found = solve_batch(layered(recipe), 2)
    assert (found.global_, found.micro, found.accumulation) == sides
    assert found.eval_micro is None
