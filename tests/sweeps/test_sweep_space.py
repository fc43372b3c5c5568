"""The space of a sweep: which overrides have several values, and what is wrong with those that cannot be read."""

from __future__ import annotations

import pytest

from trainkit.errors import UsageError
from trainkit.sweeps.space import Interval, named, overrides_of, read_space


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("optimizer.lr=1e-4,3e-4,1e-3", ("1e-4", "3e-4", "1e-3")),
        ("optimizer.lr=[1e-4, 3e-4]", ("1e-4", "3e-4")),
        ("--optimizer.lr=1e-4,3e-4", ("1e-4", "3e-4")),
        ("train.seed=range(3)", ("0", "1", "2")),
        ("train.seed=range(1, 4)", ("1", "2", "3")),
        ("train.steps=range(10,50,20)", ("10", "30")),
        ("optimizer.betas=[0.9,0.95],[0.9,0.99]", ("[0.9,0.95]", "[0.9,0.99]")),
        ("optimizer.name=adamw_torch, lion", ("adamw_torch", "lion")),
        ("data.path='a,b',c", ("'a,b'", "c")),
    ],
)
def test_several_values_are_an_axis(text: str, values: tuple[str, ...]) -> None:
    space = read_space([text])
    (axis,) = space.axes
    assert (axis.values, space.fixed, space.size) == (values, (), len(values))


def test_one_value_stays_a_fixed_override_with_commas_in_quotes_or_a_list_of_its_setting() -> None:
    fixed = ["--bf16", "--save_steps", "10", 'data.path="a,b"', "logging.report_to=[wandb,trackio]", "train.steps=5"]
    space = read_space([*fixed, "train.seed=0,1"])
    assert space.fixed == tuple(fixed)
    assert [axis.name for axis in space.axes] == ["train.seed"]


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        ("optimizer.lr=log(1e-5, 1e-3)", Interval("log", 1e-5, 1e-3)),
        ("optimizer.weight_decay=uniform(0,0.3)", Interval("uniform", 0.0, 0.3)),
        ("model.layers=int(1,8)", Interval("int", 1, 8)),
    ],
)
def test_an_interval_has_no_size_and_is_validated_at_its_ends(text: str, interval: Interval) -> None:
    space = read_space([text, "train.seed=0,1"])
    assert (space.axes[0].interval, space.size) == (interval, None)
    assert space.axes[0].ends == (interval.low, interval.high)
    assert len([*space.corners()]) == 3  # of both axes the first; the other end; the other seed


def test_a_grid_has_every_point_once_and_the_last_axis_changes_fastest() -> None:
    points = [*read_space(["optimizer.lr=1e-4,3e-4", "train.seed=range(2)"]).grid()]
    assert [overrides_of(each) for each in points] == [
        ["optimizer.lr=1e-4", "train.seed=0"],
        ["optimizer.lr=1e-4", "train.seed=1"],
        ["optimizer.lr=3e-4", "train.seed=0"],
        ["optimizer.lr=3e-4", "train.seed=1"],
    ]


def test_every_value_of_every_axis_is_in_a_corner() -> None:
    corners = [*read_space(["optimizer.lr=1e-4,3e-4", "train.seed=range(3)"]).corners()]
    assert len(corners) == 4
    assert {each["optimizer.lr"] for each in corners} == {"1e-4", "3e-4"}
    assert {each["train.seed"] for each in corners} == {"0", "1", "2"}


def test_points_are_named_by_the_last_part_of_a_key_where_that_is_clear() -> None:
    assert named({"optimizer.lr": 0.00012345678, "train.seed": "1"}) == "lr=0.0001235 seed=1"
    assert named({"model.kind": "a", "data.kind": "b"}) == "model.kind=a data.kind=b"


@pytest.mark.parametrize(
    ("words", "what", "hint"),
    [
        (["train.seed=range(x)"], "range(x) is not a range of whole numbers", "range(3)"),
        (["train.seed=range(1)"], "range(1) has one value", "range(3)"),
        (["optimizer.lr=log(0, 1)"], "has no logarithm", "uniform"),
        (["optimizer.lr=log(1e-3, 1e-5)"], "no numbers between its ends", "lower one first"),
        (["optimizer.lr=uniform(1)"], "needs two numbers", "uniform(0, 0.3)"),
        (["model.layers=int(1.5, 3)"], "needs two whole numbers", "int(1, 8)"),
        (["optimizer.lr=1e-3,0.001"], "optimizer.lr has 0.001 twice", "nothing is trained twice"),
        (["optimizer.lr=1,,2"], "an empty value between commas", "a,b,c"),
        (["optimizer.lr=1,2", "optimizer.lr=3"], "optimizer.lr is given twice", "a,b,c"),
        (["optimizer.lr=1e-3"], "no setting has several values", "trainkit run"),
    ],
)
def test_what_is_no_space_is_refused_with_what_to_write(words: list[str], what: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_space(words)
    assert what in str(caught.value)
    assert hint in "".join(caught.value.hints)


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        read_space(["train.seed=range(x)", "optimizer.lr=log(0,1)"])
    assert len(caught.value.diagnostics) == 2
