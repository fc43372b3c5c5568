"""The ranks as the guardian sees them: registered by their wrappers' records, watched by pidfd, reached by signal."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time

from trainkit.files import is_there, publish
from trainkit.runner.rundir.records import REMOVED, RankRecord, read_records, records_path, refuse_replaced
from trainkit.runner.supervisor.processes import is_alive, open_pidfd

SETTLED_SECONDS = 0.05


class Ranks:
    """Every rank of this node that has registered in the attempt."""

    def __init__(self, attempt_dir: str, selector: selectors.BaseSelector, node: int = 0) -> None:
        self.records: dict[int, RankRecord] = {}
        self.vanished: dict[int, float] = {}  # rank -> when its wrapper ended without finishing its record
        self._attempt_dir = attempt_dir
        self._selector = selector
        self._node = node
        self._folder = records_path(attempt_dir, node)
        if node:
            with contextlib.suppress(OSError):  # it is there already, or cannot be: the first look says so
                os.mkdir(self._folder)
        self._stamp: int | None = None  # of the folder …
        self._stamp_seen = 0.0  # … since when it is that …
        self._settled = False  # … and whether nothing can have changed unseen
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
                    self.vanished[rank] = time.monotonic()
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

    def obstacle(self) -> str:
        """Why records cannot be written or read now; empty where they can."""
        folder = self._folder
        probe = os.path.join(folder, ".probe")
        try:
            refuse_replaced(self._attempt_dir)
            if not is_there(os.path.join(self._attempt_dir, "ranks")):  # a closed one may be
                return REMOVED
            publish(probe, " ")
            os.unlink(probe)
        except OSError as error:
            return f"{folder} cannot be written: {error.strerror}"
        try:
            for name in os.listdir(folder):
                if name.startswith("rank-"):
                    with open(os.path.join(folder, name), "rb") as file:
                        file.read()
        except OSError as error:
            return f"{folder} cannot be read: {error.strerror}"
        return ""

    def _read(self) -> None:
        # A rename into the folder changes its time stamp: nothing is opened while nothing happens.
        try:
            stamp = os.stat(self._folder).st_mtime_ns
        except OSError:  # the run directory was removed, or its disk fails: what is known stays known
            return
        now = time.monotonic()
        if stamp != self._stamp:
            self._stamp, self._stamp_seen, self._settled = stamp, now, False
        elif self._settled:
            return
        # A file system's clock is coarse, and may be another than ours: what changes in the same tick is not missed
        # where the folder is read once more when the stamp has been the same for a while.
        self._settled = now - self._stamp_seen > SETTLED_SECONDS
        try:
            records = list(read_records(self._attempt_dir, self._node))
        except OSError:
            return
        for record in records:
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
        with contextlib.suppress(ProcessLookupError, PermissionError):  # in a container it may be another user's
            if pidfd is not None:
                signal.pidfd_send_signal(pidfd, number)  # never another process that got the same pid
            else:
                os.kill(pid, number)
