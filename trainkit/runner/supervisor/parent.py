"""trainkit's side of a run: start the guardian, pass signals and output on, and finish its work if it is killed."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from trainkit.files import open_regular
from trainkit.runner.nodes.control import BEAT_SECONDS, LOST_SECONDS, Control, Neighbour
from trainkit.runner.rank.streams import copy_window_size
from trainkit.runner.report.console import Stream, Terminal
from trainkit.runner.report.exit_status import KILLED, Verdict, write_status
from trainkit.runner.report.progress import Relay
from trainkit.runner.rundir.layout import AttemptLayout
from trainkit.runner.rundir.records import Pids
from trainkit.runner.supervisor.channel import Channel, Spec
from trainkit.runner.supervisor.cleanup import end_run_containers, kill_descendants, remove_leftovers
from trainkit.runner.supervisor.processes import (
    PASSED_ON,
    STOP,
    become_subreaper,
    descendants,
    handled,
    is_stopped,
    reason_of_signal,
    send_signal,
    signal_name,
    spawn,
)
from trainkit.runner.supervisor.registered_ranks import RegisteredRanks

TURN_SECONDS = 0.1
STALLED_SECONDS = 2.0  # after a stop: for a reader that does not take the output
# No site packages, no user folders, no working folder: the guardian needs the standard library and this package only.
BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from trainkit.runner.supervisor.guardian import main; main(int(sys.argv[2]))"
)


class Supervisor:
    """trainkit's side of one attempt on one node. environment: of the launcher and the ranks."""

    def __init__(
        self,
        spec: Spec,
        environment: Mapping[str, str],
        relay: Relay,
        console: Terminal,
        kept: Sequence[int],
        attempt: AttemptLayout,
    ) -> None:
        self._spec, self._environment, self._attempt = spec, environment, attempt
        self._relay, self._console = relay, console
        # Descriptors that the guardian inherits: the run counts as running, and keeps its GPUs, while either process
        # lives; and the connections to the other nodes, which the guardian uses while it lives, and then we do.
        self._kept = kept
        # A socket shows its end on the other side however a process ends, even by KILL.
        near, self._far = socket.socketpair()
        self._guardian = Channel(near)
        self._selector = selectors.DefaultSelector()
        self._verdict: Verdict | None = None
        self._terminal: int | None = None  # our end of the rank's pseudo-terminal
        self._connected = False  # to the guardian, once it has its spec
        self._stopped_by: int | None = None
        self._insists = False  # a second Ctrl-C
        self._announced = False
        self._guardian_pid = 0
        self._looked = self._goes_on = time.monotonic()  # when the guardian was last seen not to be stopped
        self._given_up = False

    def run(self, on_begin: Callable[[], None], on_start: Callable[[], None]) -> Verdict:
        """Start, follow to the end, and return the verdict.

        on_begin is called when signals end the run, before the guardian is started, on_start when it runs.
        """
        # If the guardian is killed, its children become ours; the children that we already have do not belong to the
        # run.
        become_subreaper()
        others = frozenset(descendants(os.getpid()))
        with handled((*STOP, *PASSED_ON, signal.SIGWINCH), self._on_signal):
            on_begin()
            self._guardian_pid = self._start()
            on_start()
            while self._connected:
                self._turn()
            code = os.waitstatus_to_exitcode(os.waitpid(self._guardian_pid, 0)[1])
            if self._verdict is None:
                self._verdict = self._finish_for_guardian(code, others)
            for _, _, line in self._spec.neighbours:
                with contextlib.suppress(OSError):  # already closed, with a lost node
                    os.close(line)
            if self._terminal is not None:
                while self._relay.pass_on(self._terminal):
                    pass
                os.close(self._terminal)
            self._relay.finish()
            self._guardian.close()
            self._selector.close()
        return self._verdict

    def _start(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        log = open_regular(self._attempt.launcher_log, flags, below=self._spec.run_dir)
        nothing = os.open(os.devnull, os.O_RDONLY)
        slave = self._open_terminal()
        out = slave if slave is not None and os.isatty(1) else log
        err = slave if slave is not None and os.isatty(2) else log
        foreground = self._spec.foreground_group is not None
        root = str(Path(__file__).resolve().parents[3])
        pid = spawn(
            (sys.executable, "-I", "-S", "-c", BOOT, root, str(self._far.fileno())),
            self._environment,
            (0 if self._spec.keeps_stdin else nothing, out, err),
            new_session=not foreground,
            group=0 if foreground else None,
            inherit=(self._far.fileno(), *self._kept),
        )
        self._far.close()
        for fd in (log, nothing, slave):
            if fd is not None:
                os.close(fd)
        self._selector.register(self._guardian, selectors.EVENT_READ, "guardian")
        self._guardian.send(self._spec._asdict())
        self._connected = True
        if self._stopped_by is not None:  # it came before the guardian was started
            number, self._stopped_by = self._stopped_by, None
            self._on_signal(number)
        return pid

    def _open_terminal(self) -> int | None:
        """A pseudo-terminal for the one foreground rank, so that it sees a terminal and trainkit sees its output."""
        names: Mapping[Stream, int] = {"out": 1, "err": 2}
        shown = [name for name, fd in names.items() if self._spec.keeps_stdin and os.isatty(fd)]
        # On several nodes the guardian reports which rank is this node's main rank.
        if self._spec.nodes == 1 and len(shown) < len(names):
            self._relay.follow_logs(0, [name for name in names if name not in shown])
        if not shown:
            return None
        import tty

        self._terminal, slave = os.openpty()
        # Raw: the real terminal already edits lines and generates signals.
        tty.setraw(slave)
        self._resize()
        os.set_blocking(self._terminal, False)
        self._selector.register(self._terminal, selectors.EVENT_READ, "terminal")
        return slave

    def _resize(self) -> None:
        if self._terminal is not None:
            copy_window_size(1 if os.isatty(1) else 2, self._terminal)

    def _on_signal(self, number: int, _frame: FrameType | None = None) -> None:
        """The signal handler. It sends the order itself, because the loop may be blocked in a write."""
        if number in PASSED_ON:
            self._order({"do": "signal", "signal": number})
        elif number == signal.SIGWINCH:
            self._resize()
        elif self._stopped_by is None:
            self._stopped_by = number
            self._console.abandon(STALLED_SECONDS)
            why, failure = reason_of_signal(number)
            self._order({"do": "stop", "signal": number, "why": why, "failure": failure})
        elif number == signal.SIGINT:
            self._insists = True
            self._order({"do": "kill"})

    def _order(self, order: Mapping[str, object]) -> None:
        if self._connected:  # the spec must be the first message
            self._guardian.send(order)

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
        if self._stopped_by is not None and not self._announced and (not self._spec.node or os.isatty(2)):
            self._announced = True  # printed by node 0 for all nodes, or where a user pressed Ctrl-C
            how = f"ranks get TERM, then KILL after {self._spec.grace:g} s (a second Ctrl-C kills at once)"
            self._console.say(f"{signal_name(self._stopped_by)}: ending the run; {how}")
        elif self._insists:
            self._insists = False
            self._console.say("killing every process of the run")
        if self._spec.neighbours or self._stopped_by is not None:
            self._give_up_stopped()
        self._relay.turn()

    def _give_up_stopped(self) -> None:
        """KILL a guardian that was stopped for so long that other nodes have given this one up: it can end nothing."""
        now = time.monotonic()
        if now - self._looked < BEAT_SECONDS:
            return
        if now - self._looked > 2 * BEAT_SECONDS or not is_stopped(self._guardian_pid):  # or we were stopped too
            self._goes_on = now
        self._looked = now
        if now - self._goes_on > LOST_SECONDS:
            self._given_up = True
            send_signal([self._guardian_pid], signal.SIGKILL)

    def _on_event(self, event: dict[str, Any]) -> None:
        kind = event.pop("event")
        if kind == "ended":
            self._verdict = Verdict(**event)
        elif kind == "said":
            self._console.say(event["text"])
        elif kind == "main rank" and self._spec.node == 0:
            self._relay.follow_logs(event["rank"], ("out", "err"))
        elif kind == "preparing":
            self._console.say(f"{event['title']} …  (log: {self._attempt.preparation_log})")
            self._relay.follow_preparation()
        elif kind == "waiting":
            self._console.say(f"{event['title']}: another run is doing this; waiting for {event['lock']}")

    def _finish_for_guardian(self, code: int, others: frozenset[int]) -> Verdict:
        """Take over after the guardian's death: as subreaper trainkit has inherited its children.

        End them in the same order.
        """
        if code < 0:
            how = f"stopped for {LOST_SECONDS:.0f} s" if self._given_up else "killed"
            why = f"trainkit's guardian process was {how} from outside"
            verdict = Verdict(KILLED, "guardian", why, signal=-code)
        else:
            bug = "this is a bug in trainkit: its guardian process failed; its traceback is in"
            verdict = Verdict(3, "trainkit", f"{bug} {self._attempt.launcher_log}")
        neighbours = {node: Neighbour(node, host, fd) for node, host, fd in self._spec.neighbours}
        line = selectors.DefaultSelector()
        control = Control(self._spec.node, neighbours, line, self._spec.grace)
        control.ending(verdict.why)

        def wait(seconds: float) -> None:
            line.select(seconds) if neighbours else time.sleep(seconds)
            ranks.poll()
            control.turn()
            for said in control.said:
                self._console.say(said)
            control.said.clear()

        # The guardian's children have become descendants of this process.
        ranks = RegisteredRanks(self._spec.attempt_dir, line, self._spec.node, self._spec.ranks, self._spec.nodes)
        ranks.poll()
        deadline = time.monotonic() + self._spec.grace
        ranks.stop()
        while ranks.alive() and time.monotonic() < deadline:
            wait(TURN_SECONDS)
            if self._insists:
                break
        records = ranks.records.values()
        wrappers = [ranks.records[rank].wrapper_pid for rank in ranks.alive()]
        inside = end_run_containers(self._spec, wrappers, self._environment, self._console.say, control.turn)
        survivors, held = kill_descendants(spare=others)
        remove_leftovers(records, held | inside)
        pids = Pids.of(os.getpid(), ranks={str(each.rank): each.pid for each in records})

        def record(found: Verdict) -> None:
            write_status(self._spec, "ended", pids, found, survivors)

        return control.settle(verdict, consequence=False, wait=wait, record=record)
