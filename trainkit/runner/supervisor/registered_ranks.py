"""The ranks that have registered with the guardian: read from their wrappers' records, watched by pidfd, signalled.

A record names the process of a rank's wrapper. It is trusted only if that process is below the guardian, or is a
wrapper of this attempt by its command line (if a daemon started its container). No other process is signalled or
inspected.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time

from trainkit.files import is_there, make_folder, publish, read_whole, remove_file
from trainkit.runner.rundir.records import REMOVED, RankRecord, read_records, records_path, run_of
from trainkit.runner.supervisor.processes import (
    LINUX,
    command_line,
    descends_from,
    is_alive,
    module_of,
    open_pidfd,
    started,
)

SETTLED_SECONDS = 0.05
WRAPPER = "trainkit.runner.rank"  # the module that each wrapper runs


class RegisteredRanks:
    """Every rank of this node that has registered in the attempt."""

    def __init__(
        self, attempt_dir: str, selector: selectors.BaseSelector, node: int = 0, expected: int = 0, nodes: int = 1
    ) -> None:
        """expected: the ranks per node in the plan's group of this node; 0 if unknown."""
        self.records: dict[int, RankRecord] = {}
        self.vanished: dict[int, float] = {}  # rank -> when its wrapper ended without finishing its record
        self._attempt_dir = attempt_dir
        self._selector = selector
        self._node, self._expected, self._nodes = node, expected, nodes
        self._folder = records_path(attempt_dir, node)
        if node:
            with contextlib.suppress(OSError):  # reported by `obstacle`
                make_folder(self._folder, below=run_of(attempt_dir))
        self._changed: int | None = None  # time stamp of the folder …
        self._changed_seen = 0.0  # … when it was first seen …
        self._settled = False  # … and whether no change can have gone unnoticed
        self._watched: dict[int, int | None] = {}  # wrapper pid -> pidfd
        self._stopped: set[int] = set()  # wrapper pids that were sent TERM
        self._proved: set[tuple[int, str]] = set()  # processes proved to be wrappers while they ran

    def poll(self) -> None:
        """Read new records, and notice wrappers that have ended."""
        self._read()
        for rank, record in list(self.records.items()):
            if record.ended is None and rank not in self.vanished and not _runs(record):
                self._read()  # the last thing that a wrapper does is to finish its record
                latest = self.records[rank]  # the launcher may just have restarted it
                if latest.wrapper_pid == record.wrapper_pid and latest.ended is None:
                    self.vanished[rank] = time.monotonic()
        for pid in [pid for pid in self._watched if not is_alive(pid)]:
            if (pidfd := self._watched.pop(pid)) is not None:
                self._selector.unregister(pidfd)
                os.close(pidfd)

    def alive(self) -> list[int]:
        """Ranks whose wrappers still run."""
        return [rank for rank, each in self.records.items() if _wrapper(each) in self._proved and _runs(each)]

    def programs(self) -> list[int]:
        """Pids of their programs: each below the wrapper that has started it."""
        records = [self.records[rank] for rank in self.alive()]
        return [each.pid for each in records if each.pid and descends_from(each.wrapper_pid, each.pid)]

    def signal(self, number: int) -> None:
        """Send a signal to every wrapper, which passes it on to its program."""
        for rank in self.alive():
            self._send(self.records[rank].wrapper_pid, number)

    def stop(self) -> None:
        """TERM, once, to every wrapper that has not had it."""
        for pid in {self.records[rank].wrapper_pid for rank in self.alive()} - self._stopped:
            self._stopped.add(pid)
            self._send(pid, signal.SIGTERM)

    def obstacle(self) -> str:
        """Why records cannot be written or read now; empty if they can."""
        folder, run = self._folder, run_of(self._attempt_dir)
        probe = os.path.join(folder, ".probe")
        try:
            if not is_there(os.path.join(self._attempt_dir, "ranks")):  # a folder without permissions may be
                return REMOVED
            publish(probe, " ", below=run)
            remove_file(probe, below=run)
        except OSError as error:
            return f"{folder} cannot be written: {error.strerror}"
        try:
            for name in os.listdir(folder):
                if name.startswith("rank-"):
                    read_whole(os.path.join(folder, name), below=run)
        except OSError as error:
            return f"{folder} cannot be read: {error.strerror}"
        return ""

    def _read(self) -> None:
        # A rename into the folder changes its time stamp: as long as that is the same, nothing is opened.
        try:
            changed = os.stat(self._folder).st_mtime_ns
        except OSError:  # the run directory was removed, or its disk fails: keep what is known
            return
        now = time.monotonic()
        if changed != self._changed:
            self._changed, self._changed_seen, self._settled = changed, now, False
        elif self._settled:
            return
        # A file system's clock is coarse and may be another machine's: the folder is read once more when its time stamp
        # has been the same for a while, so that a second change in the same tick is not missed.
        self._settled = now - self._changed_seen > SETTLED_SECONDS
        try:
            records = list(read_records(self._attempt_dir, self._node))
        except OSError:
            return
        for record in records:
            known = self.records.get(record.rank)
            same = known is not None and _wrapper(known) == _wrapper(record)
            if not same and not self._is_ours(record, known):
                continue
            self.records[record.rank] = record
            if same:
                continue
            self.vanished.pop(record.rank, None)  # the launcher has restarted it
            if record.ended is None and _wrapper(record) in self._proved:
                pidfd = self._watched[record.wrapper_pid] = open_pidfd(record.wrapper_pid)
                if pidfd is not None:
                    self._selector.register(pidfd, selectors.EVENT_READ)

    def _is_ours(self, record: RankRecord, known: RankRecord | None) -> bool:
        """Whether a new record's wrapper is one of this attempt. known: of the same rank before a restart."""
        highest = record.rank if self._nodes == 1 else record.local_rank
        if self._expected and highest >= self._expected:
            return False
        if not _runs(record):  # it has already ended: nothing will be done to it
            return known is None or not _runs(known)
        words = command_line(record.wrapper_pid)
        is_wrapper = module_of(words) == WRAPPER and self._attempt_dir in words
        if is_wrapper or descends_from(os.getpid(), record.wrapper_pid):
            self._proved.add(_wrapper(record))
            return True
        return False

    def _send(self, pid: int, number: int) -> None:
        pidfd = self._watched.get(pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # in a container it may belong to another user
            if pidfd is not None:
                signal.pidfd_send_signal(pidfd, number)  # never another process with a reused pid
            else:
                os.kill(pid, number)


def _wrapper(record: RankRecord) -> tuple[int, str]:
    return record.wrapper_pid, record.wrapper_started


def _runs(record: RankRecord) -> bool:
    """Whether a wrapper runs, rather than another process with its reused number."""
    # Without /proc, ps would have to be started in each poll for each rank.
    return is_alive(record.wrapper_pid) and (not LINUX or started(record.wrapper_pid) == record.wrapper_started)
