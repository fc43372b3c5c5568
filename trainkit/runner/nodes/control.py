"""The control connection: messages between the guardians of a run's nodes, and the verdict. Standard library only.

Every node has a connection to node 0, opened at the roll call. A node sends heartbeats, that its run is ending, and how
it ended; node 0 sends the order to end and the verdict. A node that sends nothing for a while, or whose connection
closes, is lost. The verdict is the first cause by node 0's clock, among those that are no consequence of another.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from trainkit.files import read_end
from trainkit.runner.nodes.connection import SEND_SECONDS, Connection, flush_all
from trainkit.runner.report.exit_status import KILLED, Verdict
from trainkit.text import join_names

BEAT_SECONDS = 5.0
LOST_SECONDS = 30.0  # without a message, after which a node counts as lost
# The same once the run is ending: Slurm sends KILL 30 s after TERM (its KillWait), and by then status.json is written.
LOST_AT_END_SECONDS = 15.0
PATIENCE = 15.0  # beyond the grace time, for the ends of all nodes once one has failed
LOOK_SECONDS = 0.2


# What gloo, NCCL and launchers print when a peer has gone: the peer has failed, not the rank that prints it.
_LOST_PEER = re.compile(
    r"connection (?:was )?(?:closed|reset|refused) by (?:remote )?peer|connection reset|socket closed|broken pipe"
    r"|ncclRemoteError|remote process exited|ncclSystemError|recvValue failed|RendezvousClosedError"
    r"|RendezvousConnectionError|failed to recv|DistNetworkError",
    re.IGNORECASE,
)
END_BYTES = 4096  # of a failed rank's log, where the reason stands …
ABORT_BYTES = 4 * END_BYTES  # … and after an abort C++ prints its frames below it
OWN, LAUNCHERS, CONSEQUENCE = range(3)  # how likely a failure is the cause of the others, the likeliest first


class Neighbour(NamedTuple):
    """Another node. fd: of the connection to it."""

    node: int
    host: str
    fd: int

    @property
    def name(self) -> str:
        return f"node {self.node} ({self.host})"


class Control:
    """This node's end of the control connection.

    neighbours: all others on node 0, node 0 elsewhere; none with one node. said: for node 0's console. A guardian calls
    `turn` when the selector reports an event whose `data` is `NODES`, and five times a second in any case: node 0 is
    not woken by messages, for the heartbeats of a thousand nodes would never let it sleep.
    """

    NODES = "nodes"

    def __init__(
        self, node: int, neighbours: Mapping[int, Neighbour], selector: selectors.BaseSelector, grace: float
    ) -> None:
        self.node = node
        self._node, self._neighbours, self._selector, self._grace = node, dict(neighbours), selector, grace
        self._host = os.uname().nodename
        self._lines = {node: Connection(socket.socket(fileno=each.fd)) for node, each in neighbours.items()}
        self._ready = selectors.DefaultSelector()
        for other, line in self._lines.items():
            os.set_inheritable(line.fileno(), False)  # a rank that inherited it would keep it open after the guardian
            self._ready.register(line, selectors.EVENT_READ, other)
            if node:
                selector.register(line, selectors.EVENT_READ, self.NODES)
        now = time.monotonic()
        self._heard, self._beat, self._turned = dict.fromkeys(self._lines, now), 0.0, now
        self._met: set[int] = set()  # nodes whose guardian has taken over this connection
        self._first: dict[int, float] = {}  # node -> when it was first known that its run is ending
        self._ends: dict[int, NodeEnd] = {}
        self._told = False  # whether the others know that this node's run is ending
        self._why = ""  # it is
        self.order = ""  # why another node wants the run to end
        self.said: list[str] = []
        self._lost: dict[str, list[str]] = {}  # how -> nodes lost in this way that are not reported yet
        self._posts: list[tuple[int, Mapping[str, Any]]] = []  # messages of the hang watches
        self._kept: dict[int, Mapping[str, Any]] = {}
        self._mine: NodeEnd | None = None  # as reported to node 0
        self._verdict: Verdict | None = None
        self.kills_everything = False  # whether everything is to be killed at once
        self.passed_on: list[int] = []  # signals for the ranks that node 0 has received
        self.received: int | None = None  # the signal that this node's trainkit has received
        self.alone = False  # whether trainkit is gone

    def turn(self) -> None:
        """Read what the others have sent, send a heartbeat, and notice nodes that are lost."""
        now = time.monotonic()
        if now - self._turned > 2 * BEAT_SECONDS:  # this node was suspended itself
            self._heard = dict.fromkeys(self._heard, now)
        self._turned = now
        for key, _ in self._ready.select(0):
            self._hear(key.data, now)
        limit = LOST_AT_END_SECONDS if self._why or self.order else LOST_SECONDS
        for node in [node for node in self._lines if now - self._heard[node] > limit]:
            self._lose(node, f": no heartbeat for {limit:.0f} s")
        if now - self._beat >= BEAT_SECONDS:
            self._beat = now
            self._tell({"beat": True})
        for line in self._lines.values():
            if line.unsent:
                line.flush()
        # In one line: a switch that fails takes hundreds of nodes with it.
        for how, names in self._lost.items():
            self.said.append(f"{join_names(names)} {'was' if len(names) == 1 else 'were'} lost{how}")
        self._lost.clear()

    @property
    def others(self) -> dict[int, str]:
        """The nodes that this one is connected to, by number, with their names."""
        return {node: self._neighbours[node].name for node in self._lines}

    @property
    def running(self) -> list[int]:
        """Connected nodes whose run has not ended yet."""
        return [node for node in self._lines if node not in self._ends]

    def post(self, message: Mapping[str, object]) -> None:
        """Send a message to the hang watches: from node 0 to all others, from another node to node 0's."""
        self._tell({"post": message})

    def taken(self) -> list[tuple[int, Mapping[str, Any]]]:
        """The messages of hang watches since the last call, each with its node."""
        found, self._posts = self._posts, []
        return found

    def keep(self, node: int, message: Mapping[str, Any]) -> None:
        """Keep a node's latest message."""
        self._kept[node] = message

    def kept(self) -> list[Mapping[str, Any]]:
        """The messages that were kept, and those that were not taken."""
        return [*self._kept.values(), *(message for _, message in self._posts)]

    def ending(self, why: str) -> None:
        """Tell the others, once, that this node's run is ending: a rank has failed, or trainkit has to stop."""
        if not self._told:
            self._told = True
            self._first.setdefault(self._node, time.monotonic())
            self._why = self._why or why or "it failed"
            self._tell({"ending": self._why})

    def pass_on(self, number: int) -> None:
        """Send a signal for the ranks, which node 0 has received for all, to the other nodes."""
        if self._node == 0:
            self._tell({"signal": number})

    def kill_everything(self) -> None:
        """Kill everything on all nodes at once."""
        if not self.kills_everything:
            self.kills_everything = True
            self._tell({"kill": True})

    def settle(
        self,
        verdict: Verdict,
        *,
        consequence: bool,
        wait: Callable[[float], None],
        record: Callable[[Verdict], None] = lambda _: None,
    ) -> Verdict:
        """The verdict on the whole run, which node 0 decides when all nodes have ended.

        wait: the guardian's. record: writes status.json, on node 0 before the others get the verdict: a scheduler may
        kill what is left when they have ended.
        """
        if self._neighbours:
            at = self._first.setdefault(self._node, time.monotonic())
            mine = NodeEnd(self._node, self._host, at, verdict, consequence, self.received)
            if verdict.failure is not None:
                self.ending(verdict.why)
            verdict = self._settle_all(mine, wait) if self._node == 0 else self._report(mine, wait)
        record(verdict)
        if self._node == 0 and self._lines:
            # If trainkit on node 0 is gone, another node has to print how the run ended.
            speaker = {"speaker": min(self._lines)} if self.alone else {}
            self._tell({"verdict": verdict._asdict(), **speaker})
            flush_all(self._lines.values(), SEND_SECONDS)
        return verdict

    def _settle_all(self, mine: NodeEnd, wait: Callable[[float], None]) -> Verdict:
        self._ends[0] = mine
        until = self._until()
        while len(self._ends) <= len(self._neighbours):
            until = min(until, self._until())
            if time.monotonic() > until:
                for node in set(self._neighbours) - set(self._ends):
                    self._lose(node, " and did not end in time")
                wait(0)
                break
            wait(LOOK_SECONDS)
        return decide_verdict_of_nodes([*self._ends.values()])

    def _report(self, mine: NodeEnd, wait: Callable[[float], None]) -> Verdict:
        self._mine = mine
        self._tell(_ended(mine))
        until = self._until()
        # Node 0 ends last: while it lives, others are still running.
        while self._verdict is None and self._lines and time.monotonic() < until:
            until = min(until, self._until())
            wait(LOOK_SECONDS)
        return self._verdict or mine.verdict

    def _until(self) -> float:
        """Until when to wait for the other nodes: without limit while none has failed."""
        return time.monotonic() + self._grace + PATIENCE if self._told or self.order else float("inf")

    def _hear(self, node: int, now: float) -> None:
        messages = self._lines[node].waiting_messages()
        try:
            for message in messages or ():
                self._heard[node] = now
                self._on_message(node, message)
        except (KeyError, TypeError, ValueError):
            self._lose(node, ": it sent an invalid message")
        if messages is None:
            self._lose(node, "")

    def _on_message(self, node: int, message: Mapping[str, Any]) -> None:
        if node not in self._met:
            self._met.add(node)
            if self._why:  # earlier messages may have been lost
                self._lines[node].send({"ending": self._why})
        if "ending" in message and self._node == 0:
            self._first.setdefault(node, time.monotonic())
            self._stop_all(node, f"{self._neighbours[node].name}: {message['ending']}")
        elif "ending" in message:
            self.order = self.order or str(message["ending"])
            if self._mine is not None:  # to a trainkit that takes over from its killed guardian
                self._lines[node].send(_ended(self._mine))
        elif "kill" in message:
            self.kill_everything()
        elif "signal" in message:
            self.passed_on.append(int(message["signal"]))
        elif "ended" in message:
            at = self._first.setdefault(node, time.monotonic())
            end = verdict_in(message["ended"])
            consequence, received = bool(message.get("consequence")), message.get("received")
            self._ends[node] = NodeEnd(node, self._neighbours[node].host, at, end, consequence, received)
            if end.failure is not None:
                self._stop_all(node, f"{self._neighbours[node].name}: {end.why}")
        elif "post" in message:
            self._posts.append((node, dict(message["post"])))
        elif "verdict" in message:
            self._verdict = verdict_in(message["verdict"])
            if message.get("speaker") == self._node and self._verdict.failure is not None:
                self.said.append(f"the run failed: {self._verdict.why}")

    def _stop_all(self, source: int, why: str) -> None:
        """On node 0: a node's run is ending; tell all others."""
        if not self.order and not self._told:
            self.order = self._why = why
            if source in self._lines:  # else it was lost, which is reported
                self.said.append(f"{why}; ending the run")
            for node, line in self._lines.items():
                if node != source:
                    line.send({"ending": why})

    def _lose(self, node: int, how: str) -> None:
        line = self._lines.pop(node, None)
        if line is not None:
            self._ready.unregister(line)
            if self._node:
                self._selector.unregister(line)
            line.close()
        if node in self._ends or self._verdict is not None:
            return
        lost = self._neighbours[node]
        why = f"{lost.name} was lost{how}"
        self._lost.setdefault(how, []).append(lost.name)
        if self._node == 0:
            # A silent node counts as lost from the moment its next heartbeat was due.
            missed = self._heard[node] + BEAT_SECONDS
            at = self._first.setdefault(node, min(missed, time.monotonic()) if how else time.monotonic())
            self._ends[node] = NodeEnd(node, lost.host, at, Verdict(KILLED, "node", why, node=node))
            self._stop_all(node, why)
        else:
            self.order = self.order or why

    def _tell(self, message: Mapping[str, object]) -> None:
        for line in self._lines.values():
            line.send(message)


def _ended(mine: NodeEnd) -> dict[str, object]:
    return {"ended": mine.verdict._asdict(), "consequence": mine.consequence, "received": mine.received}


class NodeEnd(NamedTuple):
    """How the run ended on one node. at: when node 0 first knew of it, by its monotonic clock.

    consequence: whether it was ordered to end, or its rank has only lost a peer. received: the signal that its trainkit
    received, also after the order to end.
    """

    node: int
    host: str
    at: float
    verdict: Verdict
    consequence: bool = False
    received: int | None = None


def verdict_in(message: Mapping[str, object]) -> Verdict:
    """The verdict in a message of another node. Raises TypeError or ValueError for something else."""
    found = Verdict(**message)  # type: ignore[arg-type]
    whole, texts = (found.exit_code, found.rank or 0, found.signal or 0), (found.failure or "", found.why)
    if not all(isinstance(each, int) for each in whole) or not all(isinstance(each, str) for each in texts):
        raise ValueError("no verdict")
    return found


def decide_verdict_of_nodes(ends: Sequence[NodeEnd]) -> Verdict:
    """The verdict on the run, from the verdict of each node, node 0's first."""

    def unlikely(end: NodeEnd) -> int:
        if end.consequence:
            return CONSEQUENCE
        # A launcher whose ranks have not failed has noticed another node's failure; but not one that was killed.
        return LAUNCHERS if end.verdict.failure == "launcher" and end.verdict.signal is None else OWN

    failures = [each for each in ends if each.verdict.failure is not None]
    if not failures:
        return Verdict(0)
    first = min(failures, key=lambda end: (unlikely(end), end.at, end.node))
    others = [each for each in ends if each.node]
    if len(others) > 1 and first.node and all(each.verdict.failure == "node" for each in others):
        mine = next(each for each in ends if not each.node)
        why = f"node 0 ({mine.host}) has lost all other nodes: most likely its own network failed"
        return first.verdict._replace(why=why, node=0, blamed=mine.host)
    everywhere = (
        first.verdict.failure in ("signal", "submitter")
        and sum(each.received == first.verdict.signal for each in ends) > 1
    )
    why = first.verdict.why if everywhere else located(first)
    blamed = first.host if first.verdict.failure == "node" else first.verdict.blamed
    return first.verdict._replace(why=why, blamed=blamed, node=first.node)


def located(end: NodeEnd) -> str:
    """The reason with its node: ``rank 1 (tk2) was ended by SIGKILL``."""
    rank, why = f"rank {end.verdict.rank} ", end.verdict.why
    if end.verdict.rank is not None and why.startswith(rank):
        return f"{rank}({end.host}) {why.removeprefix(rank)}"
    return why if end.verdict.failure in {"node", "hang"} else f"{why} (node {end.node}, {end.host})"


def has_lost_peer(verdict: Verdict, log: str) -> bool:
    """Whether a rank failed only because another one has gone. log: path of its standard error."""
    if verdict.rank is None or verdict.signal not in (None, signal.SIGABRT):  # NCCL's watchdog aborts the process
        return False
    end = read_end(log, END_BYTES if verdict.signal is None else ABORT_BYTES)
    return _LOST_PEER.search(end.decode("utf-8", "replace")) is not None
