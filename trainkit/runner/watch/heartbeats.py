"""The heartbeats of a run's ranks on this machine, read from outside the run: by its console, `watch` and `status`."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from typing import NamedTuple

from trainkit.heartbeat import HeartbeatState, read_heartbeat, read_paces
from trainkit.runner.rundir.layout import AttemptLayout
from trainkit.runner.rundir.records import RankRecord, read_records
from trainkit.runner.supervisor.processes import LINUX, command_line, module_of, started
from trainkit.runner.supervisor.registered_ranks import WRAPPER
from trainkit.runner.watch.dumping import RankView

REFRESH_SECONDS = 1.0  # between looks for ranks that have started or ended
START_SECONDS = 0.2  # while there are none


class RankBeat(NamedTuple):
    """A rank as it is now. paces: seconds of its latest steps, and its own part of each (0 if unknown)."""

    rank: int
    host: str
    state: HeartbeatState
    paces: list[tuple[float, float]]

    @property
    def seconds_per_step(self) -> float | None:
        """The mean of its latest steps; None before the first one."""
        return sum(step for step, _ in self.paces) / len(self.paces) if self.paces else None


class Heartbeats:
    """Reads the heartbeats again and again. A rank of another machine, or of another user, has none here.

    They are read through /proc, so that there are none on other systems than Linux.
    """

    def __init__(self, attempt: AttemptLayout, ranks: Collection[int] | None = None) -> None:
        """ranks: only these; None for all."""
        self._attempt, self._ranks = str(attempt.root), ranks
        self._views: dict[int, RankView] = {}
        self._looked = float("-inf")

    def read(self) -> dict[int, RankBeat]:
        """The ranks whose programs have attached, by their numbers."""
        now = time.monotonic()
        if LINUX and now - self._looked > (REFRESH_SECONDS if self._views else START_SECONDS):
            self._looked = now
            self._find()
        found = {}
        for rank, view in sorted(self._views.items()):
            page = view.bytes()
            if state := read_heartbeat(page):
                found[rank] = RankBeat(rank, view.record.host, state, read_paces(page))
        return found

    def close(self) -> None:
        for view in self._views.values():
            view.close()
        self._views.clear()

    def _find(self) -> None:
        """Open the pages of new ranks, and forget those that have ended."""
        try:
            records = [each for each in read_records(self._attempt) if self._ranks is None or each.rank in self._ranks]
        except OSError:  # no rank has started yet
            records = []
        running = {each.rank: each for each in records if _runs_here(each)}
        for rank, view in list(self._views.items()):
            record = running.get(rank)
            if record is None or record.wrapper_pid != view.record.wrapper_pid:  # it has ended, or was restarted
                self._views.pop(rank).close()
        for rank, record in running.items():
            if rank not in self._views:
                self._views[rank] = RankView(record, alive=True)


def _runs_here(record: RankRecord) -> bool:
    """Whether its wrapper runs on this machine: another user may have written the record, or the number is reused."""
    pid = record.wrapper_pid
    if record.ended is not None or record.host != os.uname().nodename or started(pid) != record.wrapper_started:
        return False
    return module_of(command_line(pid)) == WRAPPER
