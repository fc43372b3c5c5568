"""The guardian: a small process between trainkit and the launcher that lets nothing of a run outlive it.

It is subreaper of the whole tree and tied to trainkit by a socket. When trainkit, the launcher or a rank goes away in
any manner, it ends what is left: TERM to the ranks, the grace time, then KILL for everything. Stdlib only.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Sequence
from typing import NoReturn

from trainkit.runner.locks import Lock
from trainkit.runner.report.exit_status import Observed, Stop, Verdict, judge
from trainkit.runner.rundir.status import Attempt, write_status
from trainkit.runner.supervisor import cleanup
from trainkit.runner.supervisor.ending import kill_descendants, reap, send
from trainkit.runner.supervisor.process_tree import become_subreaper, descendants
from trainkit.runner.supervisor.ranks import Ranks
from trainkit.runner.supervisor.spawn import Standing, Streams, spawn
from trainkit.runner.supervisor.spec import Preparation, Spec

IGNORED = ("INT", "TERM", "HUP", "QUIT", "TSTP", "TTIN", "TTOU", "USR1", "USR2", "PIPE")
QUICK, SLOW = 0.05, 0.2  # seconds between looks, before and after all ranks have registered
STUCK_SECONDS = 5.0  # beyond the grace time, for a launcher that does not notice a dead rank
RESTART_SECONDS = 120.0  # the same where the launcher may be restarting the ranks
SETTLE_SECONDS = 0.5  # helpers of a program (trackers, writers) that are just ending by themselves
REST_SECONDS = 3.0  # between TERM and KILL for processes that are no ranks, at most the grace time


class Guardian:
    """One attempt, from the preparations to the last process."""

    def __init__(self, spec: Spec, trainkit: socket.socket, early: bytes) -> None:
        self.spec = spec
        self._trainkit = trainkit
        self._received = early
        self._selector = selectors.DefaultSelector()
        self._ranks = Ranks(spec.attempt_dir, self._selector)
        self._exits: dict[int, int] = {}
        self._stop: Stop | None = None
        self._kill_at = float("inf")
        self._launcher_pid = 0
        self._told_launcher = self._told_tree = self._introduced = False
        self._gone_since: float | None = None
        self._held: set[str] = set()
        self._survivors: tuple[int, ...] = ()

    def run(self) -> Verdict:
        """The whole attempt; its verdict is in status.json when this returns."""
        self._listen()
        self._save("starting")
        failed = self._prepare()
        if failed is None and self._stop is None:
            self._start()
            self._await(self._launcher_pid)
        self._ranks.poll()
        abandoned = self._ranks.alive() if self._launcher_pid and self._stop is None else []
        self._end_rest()
        verdict = self._judge(failed, abandoned)
        self._clean()
        self._save("ended", verdict)
        self._report(event="ended", **verdict._asdict())
        return verdict

    def _listen(self) -> None:
        reader, writer = os.pipe()
        for fd in (reader, writer):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _noticed)
        self._selector.register(reader, selectors.EVENT_READ, "child")
        self._selector.register(self._trainkit, selectors.EVENT_READ, "trainkit")
        self._obey()

    def _prepare(self) -> tuple[str, int] | None:
        for item in self.spec.preparations:
            preparation = Preparation(*item)
            with Lock(preparation.lock) as lock:
                if not lock.acquire():
                    self._report(event="waiting", title=preparation.title, lock=preparation.lock)
                while self._stop is None and not lock.acquire():
                    self._wait(SLOW)
                if self._stop is not None:
                    return None
                code = self._run_preparation(preparation, lock)
            if code != 0 and self._stop is None:
                return preparation.title, code
        return None

    def _run_preparation(self, preparation: Preparation, lock: Lock) -> int:
        self._report(event="preparing", title=preparation.title)
        begin = time.monotonic()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        streams = [os.open(f"{self.spec.attempt_dir}/logs/prepare.{name}", flags, 0o666) for name in ("out", "err")]
        nothing = os.open(os.devnull, os.O_RDONLY)
        try:
            # The child holds the lock too: it stays locked while the child lives, even if the guardian does not.
            pid = self._spawn(preparation.argv, Streams(nothing, *streams), Standing(new_session=True), (lock.fd,))
        finally:
            for fd in (*streams, nothing):
                os.close(fd)
        code = self._await(pid)
        self._report(event="prepared", title=preparation.title, seconds=time.monotonic() - begin)
        return code

    def _start(self) -> None:
        group = self.spec.foreground_group
        standing = Standing(new_session=group is None, group=group, ignore=tuple(self.spec.ignore))
        self._launcher_pid = self._spawn(self.spec.argv, Streams(0, 1, 2), standing)
        self._save("running")
        self._report(event="started", pid=self._launcher_pid)

    def _spawn(self, argv: Sequence[str], streams: Streams, standing: Standing, inherit: Sequence[int] = ()) -> int:
        try:
            return spawn(argv, os.environ, streams, standing, inherit)
        except OSError as error:
            os.write(streams.stderr, f"cannot start {argv[0]}: {error.strerror}\n".encode("utf-8", "surrogateescape"))
            self._exits[-1] = 127
            return -1

    def _await(self, pid: int) -> int:
        while pid not in self._exits:
            self._ranks.poll()
            self._introduce()
            self._end_if_stuck()
            self._press()
            self._wait(QUICK if len(self._ranks.records) < self.spec.ranks or self._stop else SLOW)
        return self._exits[pid]

    def _introduce(self) -> None:
        """On several nodes nobody knows beforehand which global rank is the first of this one."""
        first = next((r.rank for r in self._ranks.records.values() if r.local_rank == 0), None)
        if first is not None and not self._introduced and self.spec.nodes > 1:
            self._introduced = True
            self._report(event="main rank", rank=first)

    def _wait(self, seconds: float) -> None:
        for key, _ in self._selector.select(max(0.0, min(seconds, self._kill_at - time.monotonic()))):
            if key.data == "child":
                os.read(key.fd, 512)
            elif key.data == "trainkit":
                self._listen_to_trainkit()
            else:
                self._ranks.poll()
        self._exits.update(reap())

    def _listen_to_trainkit(self) -> None:
        data = b""
        with contextlib.suppress(ConnectionResetError):  # it ended before it had read all that we said
            data = self._trainkit.recv(4096)
        if not data:
            self._selector.unregister(self._trainkit)
            self._order_stop("trainkit was killed")
        self._received += data
        self._obey()

    def _obey(self) -> None:
        *lines, self._received = self._received.split(b"\n")
        for line in lines:
            order = json.loads(line)
            if order["do"] == "stop":
                self._order_stop(order["why"], order["signal"])
            elif order["do"] == "kill":
                self._kill_at = 0.0
            elif order["do"] == "signal":
                self._ranks.signal(order["signal"])

    def _order_stop(self, why: str, number: int | None = None) -> None:
        if self._stop is None:
            self._stop = Stop(time.time(), why, number)
            self._kill_at = time.monotonic() + self.spec.grace

    def _end_if_stuck(self) -> None:
        failed = self._ranks.first_failure()
        patience = self.spec.grace + (RESTART_SECONDS if self.spec.max_restarts else STUCK_SECONDS)
        if failed is not None and time.time() - failed > patience:
            self._order_stop(f"{self.spec.launcher} did not end the run after a rank had failed")

    def _press(self) -> None:
        """Carry out a stop: TERM to those who should have it by now, KILL when the grace time is over."""
        if self._stop is None:
            return
        if time.monotonic() >= self._kill_at:
            self._kill_everything()
            return
        self._ranks.tell_to_stop()
        if not self._ranks.records and not self._told_tree:
            self._told_tree = True
            send([*descendants(os.getpid()), self._launcher_pid], signal.SIGTERM)
        self._tell_launcher()

    def _tell_launcher(self) -> None:
        """A launcher that may restart ranks is told at once, another when it does not notice that all are gone."""
        if self._ranks.alive() or not self._ranks.records:
            self._gone_since = None
        elif self._gone_since is None:
            self._gone_since = time.monotonic()
        idle = self._gone_since is not None and time.monotonic() - self._gone_since > 2.0
        running = self._launcher_pid > 0 and self._launcher_pid not in self._exits
        if running and not self._told_launcher and (idle or self.spec.max_restarts):
            self._told_launcher = True
            send([self._launcher_pid], signal.SIGTERM)

    def _kill_everything(self) -> None:
        groups = [self._launcher_pid, *(record.pid for record in self._ranks.records.values())]
        ended = kill_descendants(groups)
        self._exits.update(reap())
        self._held |= ended.held
        self._survivors = ended.survivors
        self._kill_at = float("inf")
        for pid in (self._launcher_pid, *ended.survivors):
            self._exits.setdefault(pid, -signal.SIGKILL)

    def _end_rest(self) -> None:
        """End what is still there after the launcher: ranks get the full grace time, anything else a short one."""
        begin = time.monotonic()
        told = False
        while (left := descendants(os.getpid())) and not self._survivors:
            self._ranks.poll()
            if self._ranks.alive():
                self._order_stop(f"{self.spec.launcher} ended before its ranks")
                begin = time.monotonic()
            elif time.monotonic() - begin > SETTLE_SECONDS and not told:
                told = True
                send(left, signal.SIGTERM)
                self._kill_at = min(self._kill_at, time.monotonic() + min(self.spec.grace, REST_SECONDS))
            if self._stop is not None:
                self._press()
            elif time.monotonic() >= self._kill_at:
                self._kill_everything()
            self._wait(QUICK)

    def _judge(self, failed: tuple[str, int] | None, abandoned: Sequence[int]) -> Verdict:
        self._ranks.poll()
        return judge(
            Observed(
                launcher=self.spec.launcher,
                launcher_exit=self._exits.get(self._launcher_pid),
                records=tuple(self._ranks.records.values()),
                vanished=self._ranks.vanished,
                abandoned=abandoned,
                stop=self._stop,
                expected_ranks=self.spec.ranks,
                nodes=self.spec.nodes,
                preparation=failed,
            )
        )

    def _clean(self) -> None:
        records = self._ranks.records.values()
        for rendezvous in {record.rendezvous for record in records}:
            ranks = [record.rank for record in records if record.rendezvous == rendezvous]
            self._held.update(cleanup.deepspeed_buffers(rendezvous, ranks))
        cleanup.remove(self._held)

    def _save(self, state: str, verdict: Verdict | None = None) -> None:
        pids = {
            "trainkit": self.spec.trainkit_pid,
            "guardian": os.getpid(),
            "launcher": self._launcher_pid or None,
            "ranks": {str(r.rank): r.pid for r in self._ranks.records.values()},
        }
        write_status(Attempt(*self.spec.status), state, pids, verdict, self._survivors)

    def _report(self, **event: object) -> None:
        with contextlib.suppress(OSError):
            self._trainkit.sendall(json.dumps(event).encode() + b"\n")


def _noticed(_number: int, _frame: object) -> None:
    """The wakeup descriptor wakes the loop; a handler must only exist."""


def main(fd: int) -> NoReturn:
    """Entry point: the socket's descriptor; the environment is the ranks', standard streams are the launcher's."""
    for name in IGNORED:
        signal.signal(getattr(signal, f"SIG{name}"), signal.SIG_IGN)
    become_subreaper()
    os.set_inheritable(fd, False)
    trainkit = socket.socket(fileno=fd)
    data = b""
    while b"\n" not in data:
        more = trainkit.recv(65536)
        if not more:
            os._exit(1)
        data += more
    line, _, early = data.partition(b"\n")
    try:
        Guardian(Spec(**json.loads(line)), trainkit, early).run()
    except BaseException:
        kill_descendants()  # not even a bug of ours may leave anything behind; its traceback is in the launcher's log
        raise
    os._exit(0)
