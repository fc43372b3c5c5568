"""Learning rates."""

from __future__ import annotations

import pytest

from trainkit.recipe.schema import Optimizer, Schedule
from trainkit.trainer.optim import learning_rate

LAST = {"cosine": 0.1, "linear": 0.1, "constant": 1.0, "constant_with_warmup": 1.0}


def rates(steps: int = 20, **schedule: object) -> list[float]:
    rate = learning_rate(Optimizer(lr=1.0), Schedule.model_validate(schedule), steps)
    return [rate(step) for step in range(steps)]


@pytest.mark.parametrize("name", LAST)
def test_a_schedule_warms_up_to_the_peak_and_ends_where_it_should(name: str) -> None:
    found = rates(name=name, warmup_steps=4)
    assert found[-1] == pytest.approx(LAST[name])
    assert max(found) == 1.0
    assert found[:4] == ([1.0] * 4 if name == "constant" else pytest.approx([0.2, 0.4, 0.6, 0.8]))
    assert found[4:] == sorted(found[4:], reverse=True)


def test_a_cosine_is_halfway_in_the_middle() -> None:
    assert rates(steps=11, name="cosine", min_lr_ratio=0.0)[5] == pytest.approx(0.5)


def test_no_step_is_taken_at_rate_zero_before_the_end() -> None:
    assert min(rates(name="linear", warmup_steps=19, min_lr_ratio=0.1)) > 0


def test_a_run_shorter_than_its_warm_up_stays_below_the_peak() -> None:
    assert max(rates(steps=3, warmup_steps=10)) < 0.5
