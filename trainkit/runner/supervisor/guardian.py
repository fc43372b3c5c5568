"""The guardian: a process beside trainkit that runs one attempt and ends all of it, even if trainkit is killed."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum, auto
from typing import Any, NoReturn

from trainkit.files import open_regular, try_lock
from trainkit.runner.nodes.control import Control, Neighbour, has_lost_peer
from trainkit.runner.report.exit_status import (
    TRAINKIT_KILLED,
    Evidence,
    Stop,
    Verdict,
    decide_verdict,
    first_failure,
    write_status,
)
from trainkit.runner.rundir.records import Pids, log_path, run_of, unwritten
from trainkit.runner.supervisor import cleanup
from trainkit.runner.supervisor.channel import Channel, Spec
from trainkit.runner.supervisor.processes import (
    LINUX,
    PASSED_ON,
    ProcessId,
    become_subreaper,
    descendants,
    end_tree,
    memory_kills,
    reap,
    send_signal,
    spawn,
    tree_of,
    wakeup,
)
from trainkit.runner.supervisor.registered_ranks import RegisteredRanks
from trainkit.runner.watch.dumping import awake
from trainkit.runner.watch.timing import Limits, save_paces
from trainkit.runner.watch.watch import Watch

LOOK_SECONDS = 1.0
MARGIN_SECONDS = 5.0  # beyond the grace time: for wrappers to notice, and to end


def watch(target: int, watchers: Iterable[int], grace: float) -> int:
    """Start a process that kills a target and its descendants when no watcher is left; its pid, 0 without /proc.

    If trainkit and its guardian are killed together, the ranks' wrappers notice it and end the ranks within the grace
    time. Before there are ranks, only this process can end the launcher. It ends with its target.
    """
    known, others = ProcessId.of(target), [found for pid in watchers if (found := ProcessId.of(pid))]
    if not LINUX or known is None:
        return 0
    pid = os.fork()
    if pid == 0:
        try:
            signal.set_wakeup_fd(-1)
            # If these stayed open here, trainkit and other nodes would not see the guardian's end, and its locks would
            # stay.
            for fd in map(int, os.listdir("/proc/self/fd")):
                with contextlib.suppress(OSError):
                    os.close(fd)
            while known.runs and any(each.runs for each in others):
                time.sleep(LOOK_SECONDS)
            # A wrapper may still be ending its program's processes: killed before that, it would leave them running.
            until = time.monotonic() + grace + MARGIN_SECONDS
            while known.runs and time.monotonic() < until:
                time.sleep(LOOK_SECONDS)
            if known.runs:
                end_tree(tree_of(known))
        finally:
            os._exit(0)
    return pid


STUCK_SECONDS = 5.0  # beyond the grace time: for a launcher that does not notice a dead rank
RESTART_SECONDS = 120.0  # the same if the launcher may be restarting the ranks
IDLE_SECONDS = 2.0  # for a launcher that does not notice that all of its ranks are gone
SETTLE_SECONDS = 0.5  # for a program's helpers (trackers, writers) that are just ending by themselves
REST_SECONDS = 3.0  # between TERM and KILL for processes other than ranks; at most the grace time


class Action(Enum):
    TERM_RANKS = auto()  # to ranks without one so far: a launcher may still be starting some
    TERM_ALL = auto()  # to the whole tree: no rank has registered yet
    TERM_LAUNCHER = auto()
    TERM_REST = auto()  # processes that the launcher left behind
    KILL = auto()  # everything


class Termination:
    """From the order to stop until no process is left."""

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

        number: the signal that trainkit received. failure, blamed: as in Verdict.
        """
        if self.stop is None:
            self.stop = Stop(time.monotonic(), why, number, failure, blamed)
            self.kill_at = time.monotonic() + self._grace

    def is_stuck(self, failed_at: float | None) -> bool:
        """Whether the launcher has had enough time to notice a failed rank. failed_at: by the monotonic clock."""
        patience = self._grace + (RESTART_SECONDS if self._may_restart else STUCK_SECONDS)
        return failed_at is not None and time.monotonic() - failed_at > patience

    def due(self, *, ranks_known: bool, ranks_alive: bool, launcher_runs: bool) -> list[Action]:
        """The actions that are due now. ranks_known: whether any rank has registered."""
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
        # TERM at once to a launcher that would restart the ranks; any other ends by itself with its ranks.
        if launcher_runs and (idle or self._may_restart):
            actions += self._once(Action.TERM_LAUNCHER)
        return actions

    def end_rest(self, *, ranks_alive: bool) -> list[Action]:
        """The actions for processes that outlive the launcher: ranks have the full grace time, others a short one."""
        now = time.monotonic()
        if ranks_alive or self._rest_since is None:
            self._rest_since = now
        # A process that ends by itself within a moment needs no signal.
        actions = self._once(Action.TERM_REST) if now - self._rest_since > SETTLE_SECONDS else []
        if actions:
            self.kill_at = min(self.kill_at, now + min(self._grace, REST_SECONDS))
        return actions

    def _once(self, action: Action) -> list[Action]:
        again = action in self._done
        self._done.add(action)
        return [] if again else [action]


IGNORED = ("INT", "TERM", "HUP", "QUIT", "TSTP", "TTIN", "TTOU", "USR1", "USR2", "PIPE")
QUICK, SLOW = 0.05, 0.2  # seconds between polls, before and after all ranks have registered
SUMMARY_SECONDS = 60.0  # for writing the summary of a run whose trainkit was killed
NOT_FOUND = -1  # stands for the pid of a command that could not be started


class Guardian:
    """One attempt, from the preparations to the last process."""

    def __init__(self, spec: Spec, trainkit: Channel, orders: Iterable[Mapping[str, Any]]) -> None:
        self._spec = spec
        self._trainkit = trainkit
        self._selector = selectors.DefaultSelector()
        self._ranks = RegisteredRanks(spec.attempt_dir, self._selector, spec.node, spec.ranks, spec.nodes)
        neighbours = {node: Neighbour(node, host, fd) for node, host, fd in spec.neighbours}
        self._control = Control(spec.node, neighbours, self._selector, spec.grace)
        guarded = spec.trainkit_pid if spec.keeps_stdin else 0
        limits = Limits(*spec.hang)  # type: ignore[arg-type]
        self._watch = Watch(limits, spec.attempt_dir, self._control, self._start_tool, guarded, spec.launcher)
        self._termination = Termination(spec.grace, may_restart=spec.max_restarts > 0)
        self._exits: dict[int, int] = {}  # pid -> exit code, minus the signal
        self._launcher_pid = 0
        self._memory_kills = memory_kills()
        self._introduced = False
        self._held: set[str] = set()
        self._survivors: tuple[int, ...] = ()
        self._killed_everything = False  # whether everything is to be killed at once
        self._state, self._ending = "starting", ""  # why the run ends, as in status.json
        self._obey(orders)

    def run(self) -> Verdict:
        """The whole attempt; its verdict is in status.json when this returns."""
        self._selector.register(wakeup([signal.SIGCHLD]), selectors.EVENT_READ, "child")
        self._selector.register(self._trainkit, selectors.EVENT_READ, "trainkit")
        self._save("starting")
        failed = self._prepare()
        if failed is None and self._termination.stop is None:
            argv, group = self._spec.argv, self._spec.foreground_group
            # A scheduler may send USR1 to every process of a job (scancel --signal), which would kill torchrun and the
            # other launchers with all ranks. Ignored, it stays so through exec, and each rank's wrapper restores it.
            ignore = (*self._spec.ignore, *PASSED_ON)
            self._launcher_pid = self._spawn(argv, (0, 1, 2), new_session=group is None, group=group, ignore=ignore)
            self._save("running")
            self._await(self._launcher_pid)
        self._ranks.poll()
        self._watch.see(self._ranks.records, self._ranks.alive())
        abandoned = self._ranks.alive() if self._launcher_pid and self._termination.stop is None else []
        self._end_rest()
        self._end_containers()
        self._ranks.poll()
        verdict = decide_verdict(self._observed(failed, abandoned))
        cleanup.remove_leftovers(self._ranks.records.values(), self._held)
        self._watch.finish()
        consequence = self._is_consequence(verdict)
        verdict = self._control.settle(
            verdict, consequence=consequence, wait=self._wait_for_others, record=self._record
        )
        self._trainkit.send({"event": "ended", **verdict._asdict()})
        return verdict

    def _record(self, verdict: Verdict) -> None:
        if self._spec.node == 0:
            save_paces(self._spec.attempt_dir, self._watch.paces(), self._control.kept())
        self._save("ended", verdict)
        if self._control.alone and not self._spec.node:
            self._write_summary()

    def _observed(self, failed: tuple[str, int] | None, abandoned: Sequence[int]) -> Evidence:
        return Evidence(
            launcher=self._spec.launcher,
            launcher_exit=self._exits.get(self._launcher_pid),
            records=tuple(self._ranks.records.values()),
            vanished=self._ranks.vanished,
            abandoned=abandoned,
            stop=self._termination.stop,
            expected_ranks=self._spec.ranks,
            nodes=self._spec.nodes,
            preparation=failed,
            memory_kills=memory_kills() - self._memory_kills,
            records_lost=self._ranks.obstacle() or unwritten(self._spec.attempt_dir, self._spec.node),
            container=self._spec.container,
        )

    def _write_summary(self) -> None:
        """trainkit's task at the end, if it has been killed; bounded, because no process waits for it."""
        argv = (sys.executable, "-P", "-m", "trainkit.runner.report.summary", self._spec.run_dir)
        pid, give_up = self._spawn(argv, (0, 1, 2), new_session=True), time.monotonic() + SUMMARY_SECONDS
        while pid not in self._exits and time.monotonic() < give_up:
            self._wait(QUICK)
        cleanup.kill_descendants()

    def _prepare(self) -> tuple[str, int] | None:
        """Run the preparations; title and exit code of one that failed."""
        own = f"node-{self._spec.node}." if self._spec.node else ""
        log, flags = f"{self._spec.attempt_dir}/logs/{own}prepare", os.O_WRONLY | os.O_CREAT | os.O_APPEND
        for title, argv, path in self._spec.preparations:
            lock = open_regular(path, os.O_RDWR | os.O_CREAT) if path else os.open(os.devnull, os.O_RDONLY)
            try:
                if path and not try_lock(lock):
                    self._trainkit.send({"event": "waiting", "title": title, "lock": path})
                while path and self._termination.stop is None and not try_lock(lock):
                    self._wait(SLOW)
                if self._termination.stop is not None:
                    return None
                self._trainkit.send({"event": "preparing", "title": title})
                nothing, run = os.open(os.devnull, os.O_RDONLY), run_of(self._spec.attempt_dir)
                streams = [nothing, *(open_regular(f"{log}.{name}", flags, below=run) for name in ("out", "err"))]
                try:
                    # The child inherits the lock, which stays locked while it runs, even without the guardian.
                    pid = self._spawn(argv, streams, new_session=True, ignore=PASSED_ON, inherit=(lock,))
                finally:
                    for fd in streams:
                        os.close(fd)
                code = self._await(pid)
            finally:
                os.close(lock)
            if code != 0 and self._termination.stop is None:
                return title, code
        return None

    def _spawn(self, argv: Sequence[str], streams: Sequence[int], **options: Any) -> int:
        try:
            return spawn(argv, os.environ, streams, open_files=self._spec.open_files, **options)
        except OSError as error:
            os.write(streams[2], f"cannot start {argv[0]}: {error.strerror}\n".encode("utf-8", "surrogateescape"))
            self._exits[NOT_FOUND] = 127  # as a shell exits
            return NOT_FOUND

    def _await(self, pid: int) -> int:
        watchers = (self._spec.trainkit_pid, os.getpid())
        guard = watch(pid, watchers, self._spec.grace) if pid not in self._exits else 0
        while pid not in self._exits:
            self._ranks.poll()
            # On several nodes the global number of this node's first rank is known only once it has registered.
            first = next((r.rank for r in self._ranks.records.values() if r.local_rank == 0), None)
            if first is not None and not self._introduced and self._spec.nodes > 1:
                self._introduced = True
                self._trainkit.send({"event": "main rank", "rank": first})
            failed = first_failure(list(self._ranks.records.values()), self._ranks.vanished)
            if self._termination.is_stuck(failed[0] if failed else None):
                self._termination.order(f"{self._spec.launcher} did not end the run after a rank had failed")
            if failed is None and self._termination.stop is None:
                self._watch_over()
            self._end_if_ordered()
            starting = len(self._ranks.records) < self._spec.ranks
            self._wait(QUICK if starting or self._termination.stop else SLOW)
        send_signal({guard} - self._exits.keys(), signal.SIGKILL)
        return self._exits[pid]

    def _watch_over(self) -> None:
        """Let the hang watch look at the ranks: print what it says, and end the run if it orders that."""
        before = self._watch.line
        launcher = 0 if self._launcher_pid in self._exits else self._launcher_pid
        self._watch.turn(self._ranks.records, self._ranks.alive(), self._exits, launcher)
        for said in self._watch.said:
            self._trainkit.say(said)
        self._watch.said.clear()
        if self._watch.line != before:
            self._save("running")
        if self._watch.order:
            self._termination.order(self._watch.order, failure="hang", blamed=self._watch.blamed)

    def _start_tool(self, argv: Sequence[str], streams: Sequence[int]) -> int:
        return spawn(argv, os.environ, streams, new_session=True)

    def _wait(self, seconds: float) -> None:
        """Wait until something happens: a message, an ended child, a rank that is gone, or the time to KILL."""
        until_kill = self._termination.kill_at - time.monotonic()
        for key, _ in self._selector.select(max(0.0, min(seconds, until_kill))):
            if key.data == "child":
                os.read(key.fd, 512)
            elif key.data == Control.NODES:
                pass  # read below
            elif key.data != "trainkit":
                self._ranks.poll()
            elif (orders := self._trainkit.receive()) is not None:
                self._obey(orders)
            else:
                self._selector.unregister(self._trainkit)
                self._control.alone = True
                self._termination.order(TRAINKIT_KILLED)
        self._hear_nodes()
        self._exits |= reap()  # with orphans that became children of this subreaper

    def _wait_for_others(self, seconds: float) -> None:
        """Wait at the end, while other nodes may still ask how the ranks here ended."""
        self._wait(seconds)
        if self._spec.node:
            self._watch.turn(self._ranks.records, (), self._exits)

    def _hear_nodes(self) -> None:
        """Handle the messages of the other nodes, and send them the state of this one."""
        self._control.turn()
        for said in self._control.said:
            self._trainkit.say(said)
        self._control.said.clear()
        for number in self._control.passed_on:
            self._ranks.signal(number)
        self._control.passed_on.clear()
        if self._control.order:
            self._termination.order(self._control.order)
        if self._control.kills_everything and not self._killed_everything:
            self._killed_everything, self._termination.kill_at = True, 0.0
        stop = self._termination.stop
        if stop is not None and not self._ending:
            self._ending = stop.why
            self._save(self._state)
        failed = first_failure(list(self._ranks.records.values()), self._ranks.vanished)
        if stop is not None and stop.why != self._control.order:
            self._control.ending(stop.why)
        # otherwise the launchers restart the ranks of all nodes
        elif failed is not None and not self._spec.max_restarts:
            self._control.ending(f"rank {failed[1]} failed")

    def _is_consequence(self, verdict: Verdict) -> bool:
        """Whether another node caused this node's end: by an order, or because a rank here has lost a peer."""
        stop = self._termination.stop
        if self._control.order and verdict.failure == "trainkit" and (stop is None or stop.why == self._control.order):
            return True
        return has_lost_peer(verdict, log_path(self._spec.attempt_dir, verdict.rank or 0, "err"))

    def _obey(self, orders: Iterable[Mapping[str, Any]]) -> None:
        for order in orders:
            if order["do"] == "stop":
                self._control.received = order["signal"]
                self._termination.order(order["why"], order["signal"], order["failure"])
            elif order["do"] == "kill":
                self._termination.kill_at = 0.0
                self._control.kill_everything()
            elif order["do"] == "signal":
                self._ranks.signal(order["signal"])
                self._control.pass_on(order["signal"])

    def _end_if_ordered(self) -> None:
        # Only while it runs: later its number may belong to another process.
        launcher = [self._launcher_pid] if self._launcher_pid and self._launcher_pid not in self._exits else []
        known, alive = bool(self._ranks.records), bool(self._ranks.alive())
        for action in self._termination.due(ranks_known=known, ranks_alive=alive, launcher_runs=bool(launcher)):
            self._carry_out(action, launcher)

    def _carry_out(self, action: Action, launcher: Sequence[int] = ()) -> None:
        if action is Action.TERM_RANKS:
            self._ranks.stop()
            awake(self._ranks.programs())
        elif action is Action.TERM_LAUNCHER:
            send_signal(launcher, signal.SIGTERM)
        elif action is not Action.KILL:
            left = descendants(os.getpid())
            self._held |= cleanup.held_by(left)  # a process that ends by TERM may leave as much behind as a killed one
            send_signal({*left, *launcher}, signal.SIGTERM)
        else:
            groups = [self._launcher_pid, *self._ranks.programs()]
            self._end_containers()
            if self._spec.container:
                self._ranks.signal(signal.SIGKILL)
            self._survivors, held = cleanup.kill_descendants(groups)
            self._held |= held
            self._exits |= reap()
            for pid in (self._launcher_pid, *self._survivors):  # processes that survive KILL are not waited for
                self._exits.setdefault(pid, -signal.SIGKILL)

    def _end_rest(self) -> None:
        """End the processes that outlive the launcher."""
        in_container = bool(self._spec.container)  # processes in a container need not descend from this one
        while (descendants(os.getpid()) or (in_container and self._ranks.alive())) and not self._survivors:
            self._ranks.poll()
            alive = bool(self._ranks.alive())
            if alive:
                self._termination.order(f"{self._spec.launcher} ended before its ranks")
            for action in self._termination.end_rest(ranks_alive=alive):
                self._carry_out(action)
            self._end_if_ordered()
            self._wait(QUICK)

    def _end_containers(self) -> None:
        wrappers, alive = [self._ranks.records[rank].wrapper_pid for rank in self._ranks.alive()], self._control.turn
        self._held |= cleanup.end_run_containers(self._spec, wrappers, os.environ, self._trainkit.say, alive)

    def _save(self, state: str, verdict: Verdict | None = None) -> None:
        self._state = state
        ranks = {str(r.rank): r.pid for r in self._ranks.records.values()}
        launcher = self._launcher_pid if self._launcher_pid > 0 else None
        pids = Pids.of(trainkit=self._spec.trainkit_pid, guardian=os.getpid(), launcher=launcher, ranks=ranks)
        write_status(self._spec, state, pids, verdict, self._survivors, hang=self._watch.line, why=self._ending)


def main(fd: int) -> NoReturn:
    """Entry point: the socket's descriptor; the environment is the ranks', standard streams are the launcher's."""
    for name in IGNORED:  # a terminal's signals go to trainkit
        signal.signal(getattr(signal, f"SIG{name}"), signal.SIG_IGN)
    become_subreaper()
    # If a launcher held the socket open, trainkit would not see its guardian's end.
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
        cleanup.end_containers(messages[0].get("end", ()), os.environ)
        # even a bug here must leave no process behind; its traceback is in the launcher's log
        cleanup.kill_descendants()
        raise
    os._exit(0)
