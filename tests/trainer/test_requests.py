"""Signals as requests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from trainkit.trainer.loop import WATCHED, SignalRequests


@pytest.fixture
def requests() -> Iterator[SignalRequests]:
    before = {number: signal.getsignal(number) for number in WATCHED}
    made = SignalRequests()
    made.listen(*WATCHED)
    yield made
    for number, handler in before.items():
        signal.signal(number, handler)


def test_terminate_wins_over_interrupt_and_repetition_changes_nothing(requests: SignalRequests) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
        os.kill(os.getpid(), number)
    assert requests.settle(requests.votes()) == (signal.SIGTERM, False)


def test_a_request_to_save_is_granted_once(requests: SignalRequests) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)
    assert requests.settle(requests.votes()) == (None, True)
    assert requests.settle(requests.votes()) == (None, False)


def test_a_request_that_reached_another_rank_counts_here_too(requests: SignalRequests) -> None:
    assert requests.settle([0, 1, 0]) == (signal.SIGINT, False)
    assert requests.settle([0, 0, 1]) == (None, True)


def test_a_signal_that_came_after_the_vote_waits_for_the_next(requests: SignalRequests) -> None:
    votes = requests.votes()
    os.kill(os.getpid(), signal.SIGTERM)
    assert requests.settle(votes) == (None, False)
    assert requests.settle(requests.votes()) == (signal.SIGTERM, False)
