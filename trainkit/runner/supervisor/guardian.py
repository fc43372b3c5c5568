"""The guardian: a small process between trainkit and the launcher that lets nothing of a run outlive it.

It is subreaper of the whole tree and tied to trainkit by a socket. When trainkit, the launcher or a rank goes away in
any manner, it ends what is left: TERM to the ranks, the grace time, then KILL for everything. Stdlib only.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from trainkit.runner.locks import Lock
from trainkit.runner.report.exit_status import Observed, Verdict, judge
from trainkit.runner.rundir.status import Attempt, write_status
from trainkit.runner.supervisor import cleanup
from trainkit.runner.supervisor.channel import Channel, Preparation, Spec
from trainkit.runner.supervisor.process_tree import become_subreaper, descendants
from trainkit.runner.supervisor.ranks import Ranks
from trainkit.runner.supervisor.signals import PASSED_ON, wakeup
from trainkit.runner.supervisor.spawn import SpawnOptions, Streams, spawn
from trainkit.runner.supervisor.termination import Action, Situation, Termination

IGNORED = ("INT", "TERM", "HUP", "QUIT", "TSTP", "TTIN", "TTOU", "USR1", "USR2", "PIPE")
QUICK, SLOW = 0.05, 0.2  # seconds between looks, before and after all ranks have registered
NOT_FOUND = -1  # in the place of the pid of a command that could not be started


class Guardian:
    """One attempt, from the preparations to the last process."""

    def __init__(self, spec: Spec, trainkit: Channel, orders: Iterable[Mapping[str, Any]]) -> None:
        self._spec = spec
        self._trainkit = trainkit
        self._selector = selectors.DefaultSelector()
        self._ranks = Ranks(spec.attempt_dir, self._selector)
        self._termination = Termination(spec.grace, may_restart=spec.max_restarts > 0)
        self._exits: dict[int, int] = {}  # pid -> exit code, minus the signal
        self._launcher_pid = 0
        self._introduced = False
        self._held: set[str] = set()
        self._survivors: tuple[int, ...] = ()
        self._obey(orders)

    def run(self) -> Verdict:
        """The whole attempt; its verdict is in status.json when this returns."""
        self._selector.register(wakeup([signal.SIGCHLD]), selectors.EVENT_READ, "child")
        self._selector.register(self._trainkit, selectors.EVENT_READ, "trainkit")
        self._save("starting")
        failed = self._prepare()
        if failed is None and self._termination.stop is None:
            self._start()
            self._await(self._launcher_pid)
        self._ranks.poll()
        abandoned = self._ranks.alive() if self._launcher_pid and self._termination.stop is None else []
        self._end_rest()
        verdict = self._judge(failed, abandoned)
        cleanup.remove_leftovers(self._ranks.records.values(), self._held)
        self._save("ended", verdict)
        self._report(event="ended", **verdict._asdict())
        return verdict

    def _prepare(self) -> tuple[str, int] | None:
        """Run the preparations; title and exit code of one that failed."""
        for item in self._spec.preparations:
            preparation = Preparation(*item)
            with Lock(preparation.lock) as lock:
                if not lock.acquire():
                    self._report(event="waiting", title=preparation.title, lock=preparation.lock)
                while self._termination.stop is None and not lock.acquire():
                    self._wait(SLOW)
                if self._termination.stop is not None:
                    return None
                code = self._run_preparation(preparation, lock)
            if code != 0 and self._termination.stop is None:
                return preparation.title, code
        return None

    def _run_preparation(self, preparation: Preparation, lock: Lock) -> int:
        self._report(event="preparing", title=preparation.title)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        streams = [os.open(f"{self._spec.attempt_dir}/logs/prepare.{name}", flags, 0o666) for name in ("out", "err")]
        nothing = os.open(os.devnull, os.O_RDONLY)
        try:
            # The child holds the lock too: it stays locked while the child lives, even if the guardian does not.
            options = SpawnOptions(new_session=True, ignore=PASSED_ON)
            pid = self._spawn(preparation.argv, Streams(nothing, *streams), options, (lock.fd,))
        finally:
            for fd in (*streams, nothing):
                os.close(fd)
        return self._await(pid)

    def _start(self) -> None:
        group = self._spec.foreground_group
        # A scheduler may send USR1 to every process of a job (scancel --signal). torchrun and the other launchers would
        # die of it, with all ranks; ignored, it stays so through exec, and each rank's wrapper takes it up again.
        options = SpawnOptions(new_session=group is None, group=group, ignore=(*self._spec.ignore, *PASSED_ON))
        self._launcher_pid = self._spawn(self._spec.argv, Streams(0, 1, 2), options)
        self._save("running")

    def _spawn(self, argv: Sequence[str], streams: Streams, options: SpawnOptions, inherit: Sequence[int] = ()) -> int:
        try:
            return spawn(argv, os.environ, streams, options, inherit)
        except OSError as error:
            os.write(streams.stderr, f"cannot start {argv[0]}: {error.strerror}\n".encode("utf-8", "surrogateescape"))
            self._exits[NOT_FOUND] = 127
            return NOT_FOUND

    def _await(self, pid: int) -> int:
        while pid not in self._exits:
            self._ranks.poll()
            self._introduce()
            if self._termination.is_stuck(self._ranks.first_failure()):
                self._termination.order(f"{self._spec.launcher} did not end the run after a rank had failed")
            self._end_if_ordered()
            starting = len(self._ranks.records) < self._spec.ranks
            self._wait(QUICK if starting or self._termination.stop else SLOW)
        return self._exits[pid]

    def _introduce(self) -> None:
        """On several nodes the global rank of this one's first rank is known only when that has registered."""
        first = next((r.rank for r in self._ranks.records.values() if r.local_rank == 0), None)
        if first is not None and not self._introduced and self._spec.nodes > 1:
            self._introduced = True
            self._report(event="main rank", rank=first)

    def _wait(self, seconds: float) -> None:
        """Until something happens: a message, an ended child, a rank that is gone, or the time to KILL."""
        until_kill = self._termination.kill_at - time.monotonic()
        for key, _ in self._selector.select(max(0.0, min(seconds, until_kill))):
            if key.data == "child":
                os.read(key.fd, 512)
            elif key.data != "trainkit":
                self._ranks.poll()
            elif (orders := self._trainkit.receive()) is not None:
                self._obey(orders)
            else:
                self._selector.unregister(self._trainkit)
                self._termination.order("trainkit was killed")
        self._exits.update(cleanup.reap())

    def _obey(self, orders: Iterable[Mapping[str, Any]]) -> None:
        for order in orders:
            if order["do"] == "stop":
                self._termination.order(order["why"], order["signal"])
            elif order["do"] == "kill":
                self._termination.kill_at = 0.0
            elif order["do"] == "signal":
                self._ranks.signal(order["signal"])

    def _end_if_ordered(self) -> None:
        running = [self._launcher_pid] if self._launcher_pid and self._launcher_pid not in self._exits else []
        situation = Situation(bool(self._ranks.records), bool(self._ranks.alive()), bool(running))
        for action in self._termination.due(situation):
            self._carry_out(action, running)

    def _carry_out(self, action: Action, launcher: Sequence[int] = ()) -> None:
        """launcher: its pid while it runs; later the number may be another process's."""
        if action is Action.TERM_RANKS:
            self._ranks.tell_to_stop()
        elif action is Action.TERM_LAUNCHER:
            cleanup.send(launcher, signal.SIGTERM)
        elif action is not Action.KILL:
            cleanup.send({*descendants(os.getpid()), *launcher}, signal.SIGTERM)
        else:
            groups = [self._launcher_pid, *(record.pid for record in self._ranks.records.values())]
            ended = cleanup.kill_descendants(groups)
            self._exits.update(cleanup.reap())
            self._held |= ended.held
            self._survivors = ended.survivors
            for pid in (self._launcher_pid, *ended.survivors):  # what even KILL does not end is not waited for
                self._exits.setdefault(pid, -signal.SIGKILL)

    def _end_rest(self) -> None:
        """End what is still there after the launcher."""
        while descendants(os.getpid()) and not self._survivors:
            self._ranks.poll()
            alive = bool(self._ranks.alive())
            if alive:
                self._termination.order(f"{self._spec.launcher} ended before its ranks")
            for action in self._termination.end_rest(alive):
                self._carry_out(action)
            self._end_if_ordered()
            self._wait(QUICK)

    def _judge(self, failed: tuple[str, int] | None, abandoned: Sequence[int]) -> Verdict:
        self._ranks.poll()
        return judge(
            Observed(
                launcher=self._spec.launcher,
                launcher_exit=self._exits.get(self._launcher_pid),
                records=tuple(self._ranks.records.values()),
                vanished=self._ranks.vanished,
                abandoned=abandoned,
                stop=self._termination.stop,
                expected_ranks=self._spec.ranks,
                nodes=self._spec.nodes,
                preparation=failed,
            )
        )

    def _save(self, state: str, verdict: Verdict | None = None) -> None:
        pids = {
            "trainkit": self._spec.trainkit_pid,
            "guardian": os.getpid(),
            "launcher": self._launcher_pid or None,
            "ranks": {str(r.rank): r.pid for r in self._ranks.records.values()},
        }
        write_status(Attempt(*self._spec.status), state, pids, verdict, self._survivors)

    def _report(self, **event: object) -> None:
        self._trainkit.send(event)


def main(fd: int) -> NoReturn:
    """Entry point: the socket's descriptor; the environment is the ranks', standard streams are the launcher's."""
    for name in IGNORED:
        signal.signal(getattr(signal, f"SIG{name}"), signal.SIG_IGN)
    become_subreaper()
    os.set_inheritable(fd, False)
    trainkit = Channel(socket.socket(fileno=fd))
    messages: list[dict[str, Any]] = []
    while not messages:
        received = trainkit.receive()
        if received is None:
            os._exit(1)
        messages += received
    try:
        Guardian(Spec(**messages[0]), trainkit, messages[1:]).run()
    except BaseException:
        cleanup.kill_descendants()  # not even a bug here may leave anything; its traceback is in the launcher's log
        raise
    os._exit(0)
