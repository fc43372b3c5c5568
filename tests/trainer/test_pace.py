"""Rates and waiting: what of a run's time is that of its steps, and what a card does while the host waits for data."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from trainkit.trainer.checkpoint.saving import Checkpoints
from trainkit.trainer.loop import Requests, train
from trainkit.trainer.metrics.evaluation import Evaluation
from trainkit.trainer.metrics.predictions import result
from trainkit.trainer.metrics.speed import Totals, Waiting, Work, steady
from trainkit.trainer.metrics.writers import Metrics
from trainkit.trainer.settings import Settings, World
from trainkit.trainer.setup import assemble

MakeSettings = Callable[..., Settings]


class Card:
    """A host and a card that works through what the host launches, with one clock for both, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0  # of the host
        self.free = 0.0  # when the card has done all that it was given
        self.waiting = Waiting(lambda: Event(self), lambda: self.now)

    def step(self, launching: float, computing: float) -> None:
        """The host launches what the card then computes."""
        self.free = max(self.free, self.now) + computing
        self.now += launching
        self.waiting.step_launched()

    def batch(self, seconds: float) -> None:
        """The host waits for a batch."""
        self.waiting.begin()
        self.now += seconds
        self.waiting.end()

    def read(self) -> float:
        """The host waits for the card, as it does where a loss is read; the seconds that are known by then."""
        self.now = max(self.now, self.free)
        return self.waiting.seconds


class Event:
    """As CUDA's: it happens when the card comes to it."""

    def __init__(self, card: Card) -> None:
        self._card, self._at = card, 0.0

    def record(self) -> None:
        self._card.free = self._at = max(self._card.free, self._card.now)

    def query(self) -> bool:
        return self._at <= self._card.now

    def elapsed_time(self, later: Event) -> float:
        assert self.query() and later.query(), "CUDA raises for events that have not happened"
        return (later._at - self._at) * 1000


def test_a_wait_while_the_card_is_busy_is_none() -> None:
    card = Card()
    card.batch(2.0)  # before the first step it has nothing to do
    for _ in range(5):
        card.step(launching=0.1, computing=1.0)
        card.batch(0.5)
    assert card.waiting.seconds == 2.0  # of the others nothing is known yet, and nobody waits to learn it
    assert card.read() == pytest.approx(2.0)


def test_a_wait_counts_from_when_the_card_has_nothing_left_to_do() -> None:
    card = Card()
    card.batch(0.0)
    card.step(launching=0.1, computing=1.0)
    card.batch(1.5)  # from 0.1 to 1.6; the card is done at 1
    assert card.read() == pytest.approx(0.6)
    card.step(launching=0.1, computing=0.2)
    card.now += 3.0  # an evaluation, say: the card stands still, but not for want of data
    card.batch(0.25)
    assert card.read() == pytest.approx(0.85)


def test_on_a_device_that_the_host_waits_for_every_wait_counts() -> None:
    clock = iter((1.0, 3.0, 10.0, 10.5))
    waiting = Waiting(None, lambda: next(clock))
    for _ in range(2):
        waiting.begin()
        waiting.end()
        waiting.step_launched()
    assert waiting.seconds == 2.5


def test_rates_are_of_steps_alone_without_the_first_ones_where_there_are_enough_others() -> None:
    marks = [Totals(100.0, steps=7), Totals(130.0, steps=8, compiled=20.0), Totals(134.0, steps=12, compiled=20.0)]
    end = Totals(154.0, steps=22, tokens=10_000, computed=40_000, compiled=21.0, aside=9.0)
    assert steady(marks, end) == marks[2]
    assert steady(marks, end._replace(steps=16)) == marks[1]
    assert steady(marks[:2], end._replace(steps=8)) == marks[0]
    since = end.since(marks[2]._replace(tokens=5_000, computed=20_000))
    assert since.training == 10.0
    assert since.rates(4, Work(6e9, 24e12), 1) == {
        "samples_per_second": 4.0,
        "tokens_per_second": 500.0,
        "mfu": 0.5,
    }


def test_evaluation_and_saving_are_no_time_of_steps(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge, save = Evaluation.loss, Checkpoints.save

    def slow(function: Callable[..., Any]) -> Callable[..., Any]:
        def slower(*given: Any, **named: Any) -> Any:
            time.sleep(0.5)
            return function(*given, **named)

        return slower

    monkeypatch.setattr(Evaluation, "loss", slow(judge))
    monkeypatch.setattr(Checkpoints, "save", slow(save))
    asked = {"train": {"steps": 6}, "eval": {"every_steps": 2}, "checkpoint": {"every_steps": 3}}
    settings = make_settings(**asked, logging={"every_steps": 1})
    parts, metrics = assemble(settings, World(), torch.device("cpu")), Metrics(settings.run_dir, [], main=True)
    progress = train(parts, 0, metrics, Requests())
    metrics.close()
    outcome = result(parts, progress)
    assert outcome["aside_seconds"] >= 5 * 0.5
    lines = [json.loads(line) for line in (settings.run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert sum(line["seconds"] for line in steps) <= outcome["train_seconds"] - outcome["aside_seconds"]
    assert min(line["eval_seconds"] for line in lines if "eval_loss" in line) >= 0.5
    # Five steps follow the first.
    assert outcome["rates_from_step"] == 2
    later = 5 * settings.batch.global_ / (sum(line["seconds"] for line in steps[1:]))
    assert outcome["samples_per_second"] == pytest.approx(later, rel=0.5)
