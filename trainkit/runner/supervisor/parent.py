"""trainkit's side of a run: start the guardian, pass signals and output on, and finish its work should it be killed."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit.runner.rank.streams import copy_window_size
from trainkit.runner.report.console import Console
from trainkit.runner.report.exit_status import KILLED, Verdict
from trainkit.runner.report.follow import Relay
from trainkit.runner.rundir.layout import AttemptLayout
from trainkit.runner.rundir.records import RankRecord, read_records
from trainkit.runner.rundir.status import Attempt, write_status
from trainkit.runner.supervisor.channel import Channel, Spec
from trainkit.runner.supervisor.cleanup import kill_descendants, remove_leftovers, send
from trainkit.runner.supervisor.process_tree import become_subreaper, descendants, is_alive
from trainkit.runner.supervisor.signals import PASSED_ON, STOP, Orders, handled, signal_name
from trainkit.runner.supervisor.spawn import SpawnOptions, Streams, spawn

TURN_SECONDS = 0.1
STALLED_SECONDS = 2.0  # after a stop, for a reader that does not take the output
# No site, no user folders, nothing from the working folder: the guardian needs the standard library and this package.
BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from trainkit.runner.supervisor.guardian import main; main(int(sys.argv[2]))"
)


@dataclass(frozen=True, slots=True)
class Job:
    """What the guardian is to do, and with which files and environment."""

    spec: Spec
    environment: Mapping[str, str]
    attempt: AttemptLayout
    keeps_stdin: bool  # one rank, started directly


class Supervisor:
    """One attempt, seen from trainkit."""

    def __init__(self, job: Job, relay: Relay, console: Console, locks: Sequence[int]) -> None:
        self._job = job
        self._relay = relay
        self._console = console
        # Descriptors that the guardian keeps too: the run counts as running, and has its cards, while either lives.
        self._locks = locks
        near, self._far = socket.socketpair()
        self._guardian = Channel(near)
        self._orders = Orders(self._pass_order, lambda: console.abandon(STALLED_SECONDS))
        self._selector = selectors.DefaultSelector()
        self._verdict: Verdict | None = None
        self._terminal: int | None = None
        self._connected = False  # to the guardian, which has its spec
        self._announced = False

    def run(self, each_turn: Callable[[], None]) -> Verdict:
        """Start, follow to the end, and return the verdict. each_turn is called about ten times a second."""
        become_subreaper()
        others = frozenset(descendants(os.getpid()))
        with handled((*STOP, *PASSED_ON, signal.SIGWINCH), self._orders.take):
            pid = self._start()
            while self._connected:
                self._turn()
                each_turn()
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if self._verdict is None:
                self._verdict = self._finish_for_guardian(code, others)
            self._drain()
        return self._verdict

    def _start(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        log = os.open(self._job.attempt.launcher_log, flags, 0o666)
        nothing = os.open(os.devnull, os.O_RDONLY)
        slave = self._open_terminal()
        out = slave if slave is not None and os.isatty(1) else log
        err = slave if slave is not None and os.isatty(2) else log
        foreground = self._job.spec.foreground_group is not None
        root = str(Path(__file__).resolve().parents[3])
        pid = spawn(
            (sys.executable, "-I", "-S", "-c", BOOT, root, str(self._far.fileno())),
            self._job.environment,
            Streams(0 if self._job.keeps_stdin else nothing, out, err),
            SpawnOptions(new_session=not foreground, group=0 if foreground else None),
            inherit=(self._far.fileno(), *self._locks),
        )
        self._far.close()
        for fd in (log, nothing, slave):
            if fd is not None:
                os.close(fd)
        self._selector.register(self._guardian, selectors.EVENT_READ, "guardian")
        self._guardian.send(self._job.spec._asdict())
        self._connected = True
        if self._orders.stopped_by is not None:  # it came before there was a guardian to ask
            number, self._orders.stopped_by = self._orders.stopped_by, None
            self._orders.take(number)
        return pid

    def _open_terminal(self) -> int | None:
        """A pseudo-terminal for the one foreground rank, so that it sees a terminal and trainkit sees its output."""
        if not self._job.keeps_stdin or not (os.isatty(1) or os.isatty(2)):
            if self._job.spec.nodes == 1:
                self._relay.follow_logs(0, ("out", "err"))
            return None
        import tty

        master, slave = os.openpty()
        self._terminal = master
        tty.setraw(slave)
        real = 1 if os.isatty(1) else 2
        copy_window_size(real, master)
        self._orders.on_resize = lambda: copy_window_size(real, master)
        os.set_blocking(master, False)
        self._selector.register(master, selectors.EVENT_READ, "terminal")
        if not os.isatty(1):
            self._relay.follow_logs(0, ("out",))
        elif not os.isatty(2):
            self._relay.follow_logs(0, ("err",))
        return slave

    def _turn(self) -> None:
        for key, _ in self._selector.select(TURN_SECONDS):
            if key.data == "terminal":
                if self._relay.pass_on(key.fd) is None:
                    self._selector.unregister(key.fd)
            elif (events := self._guardian.receive()) is None:
                self._connected = False
            else:
                for event in events:
                    self._on_event(event)
        self._announce()
        self._relay.turn()

    def _on_event(self, event: dict[str, Any]) -> None:
        kind = event.pop("event")
        if kind == "ended":
            self._verdict = Verdict(**event)
        elif kind == "main rank":
            self._relay.follow_logs(event["rank"], ("out", "err"))
        elif kind == "preparing":
            self._console.say(f"{event['title']} …  (log: {self._job.attempt.preparation_log})")
        elif kind == "waiting":
            self._console.say(f"{event['title']}: another run is at it; waiting for {event['lock']}")

    def _announce(self) -> None:
        if self._orders.stopped_by is None:
            return
        if not self._announced:
            self._announced = True
            name, grace = signal_name(self._orders.stopped_by), f"{self._job.spec.grace:g} s"
            self._console.say(
                f"{name}: ending the run; ranks get TERM, and KILL after {grace} (Ctrl-C once more kills at once)"
            )
        elif self._orders.insists:
            self._orders.insists = False
            self._console.say("killing every process of the run")

    def _drain(self) -> None:
        if self._terminal is not None:
            while self._relay.pass_on(self._terminal):
                pass
            os.close(self._terminal)
        self._relay.finish()
        self._guardian.close()
        self._selector.close()

    def _pass_order(self, order: Mapping[str, object]) -> None:
        if self._connected:  # the spec must be the first message
            self._guardian.send(order)

    def _finish_for_guardian(self, code: int, others: frozenset[int]) -> Verdict:
        """The guardian is gone; as subreaper trainkit has inherited its children. End them in the same order."""
        records: list[RankRecord] = []
        with contextlib.suppress(FileNotFoundError):
            records = list(read_records(str(self._job.attempt.root)))
        deadline = time.monotonic() + self._job.spec.grace
        send([r.wrapper_pid for r in records if r.ended is None and is_alive(r.wrapper_pid)], signal.SIGTERM)
        while any(is_alive(record.wrapper_pid) for record in records) and time.monotonic() < deadline:
            time.sleep(TURN_SECONDS)
            if self._orders.insists:
                break
        ended = kill_descendants(spare=others)
        remove_leftovers(records, ended.held)
        if code < 0:
            verdict = Verdict(KILLED, "guardian", "trainkit's guardian process was killed from outside", signal=-code)
        else:
            bug = "this is a bug in trainkit: its guardian process failed; its traceback is in"
            verdict = Verdict(3, "trainkit", f"{bug} {self._job.attempt.launcher_log}")
        pids = {"trainkit": os.getpid(), "ranks": {str(r.rank): r.pid for r in records}}
        write_status(Attempt(*self._job.spec.status), "ended", pids, verdict, ended.survivors)
        return verdict
