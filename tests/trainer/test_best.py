"""What the evaluation loss decides: which checkpoint stays, when a run stops, and runs that only evaluate."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from tests.trainer.training import MakeSettings, parts_of, trained
from trainkit.trainer.checkpoint.resuming import resume
from trainkit.trainer.metrics.evaluation import Best, Evaluation
from trainkit.trainer.settings import Settings
from trainkit.trainer.setup import Parts


class Told:
    """An evaluation that finds what the test says, one loss after another."""

    def __init__(self, *losses: float) -> None:
        self._losses = iter(losses)

    writes = False

    def measured(self, strategy: object, autocast: object, tell: Callable[[], object]) -> dict[str, float]:
        """The next loss."""
        tell()
        return {"loss": next(self._losses)}

    def decisive(self, measured: dict[str, float]) -> float:
        return measured["loss"]


def evaluating(settings: Settings, *told: float) -> Parts:
    return dataclasses.replace(parts_of(settings), evaluation=cast("Evaluation", Told(*told)))


def saved(settings: Settings) -> list[int]:
    return sorted(int(path.name[-8:]) for path in (settings.run_dir / "checkpoints").glob("step-*"))


def test_the_checkpoint_of_the_lowest_loss_outlives_newer_ones(make_settings: MakeSettings) -> None:
    changes: dict[str, Any] = {"train": {"steps": 6}, "eval": {"every_steps": 1}}
    checkpoint = {"every_steps": 2, "keep": 1}
    losses = (3.0, 2.5, 2.0, 2.1, 2.2, 2.3)
    keeping = make_settings(**changes, checkpoint={**checkpoint, "keep_best": True})
    trained(evaluating(keeping, *losses))
    assert saved(keeping) == [3, 6]  # step 3 is no multiple of 2: it was saved for its loss alone
    newest_only = make_settings(**changes, checkpoint=checkpoint)
    trained(evaluating(newest_only, *losses))
    assert saved(newest_only) == [6]


def test_a_run_stops_when_its_patience_is_over_and_saves_where_it_stopped(make_settings: MakeSettings) -> None:
    settings = make_settings(
        train={"steps": 50}, eval={"every_steps": 1, "patience": 2}, checkpoint={"every_steps": 40, "keep": 0}
    )
    found = trained(evaluating(settings, 3.0, 2.0, 2.5, 1.9, 2.0, 2.1))
    progress, outcome = found.progress, found.result
    assert (progress.step, progress.stopped_early, progress.stopped_by) == (6, True, None)
    assert saved(settings) == [6]
    assert (outcome["best_value"], outcome["best_step"], outcome["stopped_early"]) == (1.9, 4, True)


def test_patience_goes_on_where_the_checkpoint_left_it(make_settings: MakeSettings) -> None:
    changes: dict[str, Any] = {"eval": {"every_steps": 1, "patience": 2}, "checkpoint": {"every_steps": 2}}
    first = make_settings(**changes, train={"steps": 2})
    trained(evaluating(first, 2.0, 2.5))
    second = dataclasses.replace(
        make_settings(**changes, train={"steps": 9}), resume=first.run_dir / "checkpoints/step-00000002"
    )
    parts = evaluating(second, 2.4, 2.3)
    assert resume(parts, restarted=False) == 2
    assert parts.best == Best(value=2.0, step=1, since=1)
    assert trained(parts).progress.step == 3


def test_a_loss_that_is_no_number_is_never_the_lowest() -> None:
    best = Best()
    assert not best.note(1, float("nan"))
    assert best.note(2, 5.0)
    assert not best.note(3, float("nan"))
    assert best == Best("loss", True, 5.0, 2, 1)


def test_a_run_of_no_steps_evaluates_what_it_resumes_and_changes_nothing(make_settings: MakeSettings) -> None:
    whole = make_settings(train={"steps": 4}, eval={"every_steps": 4}, checkpoint={"every_steps": 4})
    (expected,) = [line["eval_loss"] for line in trained(whole).lines if "eval_loss" in line]
    settings = dataclasses.replace(
        make_settings(train={"steps": 0}), resume=whole.run_dir / "checkpoints/step-00000004"
    )
    found = trained(settings)
    (line,), outcome = found.lines, found.result
    assert (line["step"], line["eval_loss"]) == (4, expected)
    assert (outcome["steps"], outcome["samples"], outcome["final_loss"]) == (4, 0, None)
    assert not Path(settings.run_dir / "checkpoints").exists()


def test_a_run_of_no_steps_evaluates_the_untrained_model(make_settings: MakeSettings) -> None:
    settings = make_settings(train={"steps": 0}, eval={"every_steps": 0})
    assert trained(settings).lines[-1]["eval_loss"] == pytest.approx(
        5.55, abs=0.1
    )  # as good as guessing among 256 bytes
