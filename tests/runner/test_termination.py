"""What is done when to end a run: decided without a process, on a clock of the test."""

from __future__ import annotations

import time

import pytest

from trainkit.runner.supervisor.guardian import Action, Termination

RUNNING = {"ranks_known": True, "ranks_alive": True, "launcher_runs": True}
GONE = {**RUNNING, "ranks_alive": False}
GRACE = 10.0


class Clock:
    """Both clocks of the time module."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "time", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_without_an_order_nothing_is_done(clock: Clock) -> None:
    assert Termination(GRACE, may_restart=False).due(**RUNNING) == []


def test_ranks_get_term_and_after_the_grace_time_everything_gets_kill_once(clock: Clock) -> None:
    ending = Termination(GRACE, may_restart=False)
    ending.order("first", 15)
    ending.order("second", 2)
    assert ending.stop is not None
    assert (ending.stop.why, ending.stop.signal) == ("first", 15)
    clock.now += GRACE - 0.1
    assert ending.due(**RUNNING) == [Action.TERM_RANKS]
    clock.now += 0.1
    assert ending.due(**RUNNING) == [Action.KILL]
    assert ending.due(**RUNNING) == [Action.TERM_RANKS]


def test_before_any_rank_has_registered_the_whole_tree_gets_term_once(clock: Clock) -> None:
    ending, starting = Termination(GRACE, may_restart=False), {**GONE, "ranks_known": False}
    ending.order("stop")
    assert ending.due(**starting) == [Action.TERM_RANKS, Action.TERM_ALL]
    assert ending.due(**starting) == [Action.TERM_RANKS]


def test_a_launcher_gets_term_only_when_it_does_not_notice_that_its_ranks_are_gone(clock: Clock) -> None:
    ending = Termination(GRACE, may_restart=False)
    ending.order("stop")
    assert ending.due(**GONE) == [Action.TERM_RANKS]
    clock.now += 1.9
    assert ending.due(**GONE) == [Action.TERM_RANKS]
    clock.now += 0.2
    assert ending.due(**GONE) == [Action.TERM_RANKS, Action.TERM_LAUNCHER]
    assert ending.due(**GONE) == [Action.TERM_RANKS]


def test_a_launcher_that_may_restart_ranks_gets_term_at_once(clock: Clock) -> None:
    ending = Termination(GRACE, may_restart=True)
    ending.order("stop")
    assert ending.due(**RUNNING) == [Action.TERM_RANKS, Action.TERM_LAUNCHER]


@pytest.mark.parametrize(("may_restart", "seconds"), [(False, 5.0), (True, 120.0)])
def test_a_launcher_is_stuck_some_time_after_a_failed_rank(clock: Clock, may_restart: bool, seconds: float) -> None:
    ending = Termination(GRACE, may_restart=may_restart)
    assert not ending.is_stuck(None)
    assert not ending.is_stuck(clock.now - GRACE - seconds)
    assert ending.is_stuck(clock.now - GRACE - seconds - 0.1)


def test_what_a_launcher_left_behind_gets_term_after_a_moment_and_kill_soon_after(clock: Clock) -> None:
    ending, ended = Termination(GRACE, may_restart=False), {**GONE, "launcher_runs": False}
    assert ending.end_rest(ranks_alive=False) == []
    clock.now += 0.6
    assert ending.end_rest(ranks_alive=False) == [Action.TERM_REST]
    assert ending.end_rest(ranks_alive=False) == ending.due(**ended) == []
    clock.now += 3.0
    assert ending.due(**ended) == [Action.KILL]


def test_a_rank_that_a_launcher_left_behind_has_the_full_grace_time(clock: Clock) -> None:
    ending = Termination(GRACE, may_restart=False)
    ending.order("the launcher ended before its ranks")
    for _ in range(9):
        assert ending.end_rest(ranks_alive=True) == []
        assert ending.due(**RUNNING) == [Action.TERM_RANKS]
        clock.now += 1.0
    assert ending.end_rest(ranks_alive=False) == [Action.TERM_REST]
    clock.now = 1000.0 + GRACE
    assert ending.due(**GONE) == [Action.KILL]
