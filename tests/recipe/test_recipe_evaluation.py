"""Runs that only evaluate, and what compares evaluation losses."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from trainkit.errors import Diagnostic
from trainkit.recipe.resolved import Resolved

Solve = Callable[..., Resolved]
SHORT = "version: 1\ntrain: {steps: 3}\n"


@pytest.mark.parametrize(
    ("words", "steps", "every"),
    [
        (("--do_eval",), 0, 0),
        (("--do_train",), 3, 0),
        (("--do_train", "--do_eval"), 3, 1_000_000_000),
        (("--do_train", "--do_eval", "--eval_steps=2"), 3, 2),
        (("--do_eval=false",), 3, 0),
        (("--do_train=false",), 0, 0),
        (("train.steps=0",), 0, 0),
    ],
)
def test_do_eval_alone_trains_nothing_and_beside_do_train_evaluates_at_the_end(
    solve: Solve, words: tuple[str, ...], steps: int, every: int
) -> None:
    recipe = solve(SHORT, overrides=words).recipe
    assert (recipe.train.steps, recipe.eval.every_steps) == (steps, every)


@pytest.mark.parametrize("setting", ["eval: {patience: 2}", "checkpoint: {keep_best: true}"])
def test_what_goes_by_the_evaluation_loss_needs_evaluations(
    refuse: Callable[..., list[Diagnostic]], solve: Solve, setting: str
) -> None:
    (error,) = refuse(f"{SHORT}{setting}\n")
    assert "requires eval.every_steps > 0" in error.what
    assert solve(f"{SHORT}{setting}\n", overrides=("eval.every_steps=2",)).recipe.eval.every_steps == 2
