"""The ranks as the guardian sees them: registered by their wrappers' records, watched by pidfd, reached by signal."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time

from trainkit.runner.rundir.records import RankRecord, read_records
from trainkit.runner.supervisor.processes import is_alive, open_pidfd

YOUNG_NANOSECONDS = 50_000_000


class Ranks:
    """Every rank of this node that has registered in the attempt."""

    def __init__(self, attempt_dir: str, selector: selectors.BaseSelector) -> None:
        self.records: dict[int, RankRecord] = {}
        self.vanished: dict[int, float] = {}  # rank -> when its wrapper ended without finishing its record
        self._attempt_dir = attempt_dir
        self._selector = selector
        self._host = os.uname().nodename
        self._stamp: int | None = None
        self._watched: dict[int, int | None] = {}  # wrapper pid -> pidfd
        self._stopped: set[int] = set()  # wrapper pids that have had TERM

    def poll(self) -> None:
        """Take in new records and ends."""
        self._read()
        for rank, record in list(self.records.items()):
            if record.ended is None and rank not in self.vanished and not is_alive(record.wrapper_pid):
                self._read()  # the last thing that a wrapper does is to finish its record
                latest = self.records[rank]  # the launcher may have restarted it meanwhile
                if latest.wrapper_pid == record.wrapper_pid and latest.ended is None:
                    self.vanished[rank] = time.time()
        for pid in [pid for pid in self._watched if not is_alive(pid)]:
            if (pidfd := self._watched.pop(pid)) is not None:
                self._selector.unregister(pidfd)
                os.close(pidfd)

    def alive(self) -> list[int]:
        """Ranks whose wrappers still run."""
        return [rank for rank, record in self.records.items() if is_alive(record.wrapper_pid)]

    def signal(self, number: int) -> None:
        """A signal to every wrapper, which passes it on to its program."""
        for rank in self.alive():
            self._send(self.records[rank].wrapper_pid, number)

    def stop(self) -> None:
        """TERM, once, to every wrapper that has not had it."""
        for pid in {self.records[rank].wrapper_pid for rank in self.alive()} - self._stopped:
            self._stopped.add(pid)
            self._send(pid, signal.SIGTERM)

    def _read(self) -> None:
        # A rename into the folder changes its time stamp: nothing is opened while nothing happens.
        try:
            stamp = os.stat(os.path.join(self._attempt_dir, "ranks")).st_mtime_ns
        except FileNotFoundError:  # the run directory was removed: what is known stays known
            return
        if stamp == self._stamp:
            return
        # Clock ticks are coarse: a change in the same tick must not be missed, so a young stamp is not trusted.
        self._stamp = stamp if time.time_ns() - stamp > YOUNG_NANOSECONDS else None
        for record in read_records(self._attempt_dir):
            if record.host == self._host:
                known = self.records.get(record.rank)
                self.records[record.rank] = record
                if known is not None and known.wrapper_pid == record.wrapper_pid:
                    continue
                self.vanished.pop(record.rank, None)  # the launcher has restarted it
                if record.ended is None:
                    pidfd = self._watched[record.wrapper_pid] = open_pidfd(record.wrapper_pid)
                    if pidfd is not None:
                        self._selector.register(pidfd, selectors.EVENT_READ)

    def _send(self, pid: int, number: int) -> None:
        pidfd = self._watched.get(pid)
        with contextlib.suppress(ProcessLookupError):
            if pidfd is not None:
                signal.pidfd_send_signal(pidfd, number)  # never another process that got the same pid
            else:
                os.kill(pid, number)
