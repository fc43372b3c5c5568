"""How a run is ended: TERM to its ranks, the grace time, then KILL. Decides only; the guardian carries it out."""

from __future__ import annotations

import time
from enum import Enum, auto

from trainkit.runner.report.exit_status import Stop

STUCK_SECONDS = 5.0  # beyond the grace time, for a launcher that does not notice a dead rank
RESTART_SECONDS = 120.0  # the same where the launcher may be restarting the ranks
IDLE_SECONDS = 2.0  # for a launcher that does not notice that all of its ranks are gone
SETTLE_SECONDS = 0.5  # for helpers of a program (trackers, writers) that are just ending by themselves
REST_SECONDS = 3.0  # between TERM and KILL for processes that are not ranks, at most the grace time


class Action(Enum):
    """Something to be done now."""

    TERM_RANKS = auto()  # those that have not had it yet: a launcher may still be starting some
    TERM_ALL = auto()  # the whole tree: no rank has registered yet
    TERM_LAUNCHER = auto()
    TERM_REST = auto()  # what the launcher left behind
    KILL = auto()  # everything


class Termination:
    """From the order to stop until nothing is left."""

    def __init__(self, grace: float, *, may_restart: bool) -> None:
        self.stop: Stop | None = None
        self.kill_at = float("inf")  # of the monotonic clock
        self._grace = grace
        self._may_restart = may_restart
        self._done: set[Action] = set()
        self._gone_since: float | None = None
        self._rest_since: float | None = None

    def order(self, why: str, number: int | None = None, failure: str = "trainkit", blamed: str = "") -> None:
        """End the run; the first order counts.

        number: of the signal that trainkit received. failure, blamed: as in Verdict.
        """
        if self.stop is None:
            self.stop = Stop(time.monotonic(), why, number, failure, blamed)
            self.kill_at = time.monotonic() + self._grace

    def is_stuck(self, failed_at: float | None) -> bool:
        """Whether the launcher should have noticed by now that a rank failed. failed_at: of the monotonic clock."""
        patience = self._grace + (RESTART_SECONDS if self._may_restart else STUCK_SECONDS)
        return failed_at is not None and time.monotonic() - failed_at > patience

    def due(self, *, ranks_known: bool, ranks_alive: bool, launcher_runs: bool) -> list[Action]:
        """What is to be done now. ranks_known: whether any rank has registered."""
        now = time.monotonic()
        if now >= self.kill_at:
            self.kill_at = float("inf")
            return [Action.KILL]
        if self.stop is None:
            return []
        actions = [Action.TERM_RANKS]
        if not ranks_known:
            actions += self._once(Action.TERM_ALL)
        if ranks_alive or not ranks_known:
            self._gone_since = None
        elif self._gone_since is None:
            self._gone_since = now
        idle = self._gone_since is not None and now - self._gone_since > IDLE_SECONDS
        # At once to a launcher that would restart what is being ended; any other ends by itself with its ranks.
        if launcher_runs and (idle or self._may_restart):
            actions += self._once(Action.TERM_LAUNCHER)
        return actions

    def end_rest(self, *, ranks_alive: bool) -> list[Action]:
        """The same for what is still there after the launcher: ranks have the full grace time, others a short one."""
        now = time.monotonic()
        if ranks_alive or self._rest_since is None:
            self._rest_since = now
        # What ends by itself within a moment needs no signal.
        actions = self._once(Action.TERM_REST) if now - self._rest_since > SETTLE_SECONDS else []
        if actions:
            self.kill_at = min(self.kill_at, now + min(self._grace, REST_SECONDS))
        return actions

    def _once(self, action: Action) -> list[Action]:
        again = action in self._done
        self._done.add(action)
        return [] if again else [action]
