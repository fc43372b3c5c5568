"""The control line: what the guardians of a run's nodes tell one another while it runs. Standard library only.

Every node has a connection to node 0, made at the roll call. Up it they say that they live, that their run is ending,
and how it ended; down come the order to end and the verdict. Who says nothing for a while, or whose connection closes,
is lost.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from trainkit.runner.nodes.line import SEND_SECONDS, Line, flush_all
from trainkit.runner.nodes.verdict import NodeEnd, judge_nodes, verdict_of
from trainkit.runner.report.exit_status import KILLED, Verdict
from trainkit.text import listed

BEAT_SECONDS = 5.0
LOST_SECONDS = 30.0  # without a word
# The same once the run is ending: Slurm sends KILL 30 s after TERM (its KillWait), and by then the account is written.
LOST_AT_END_SECONDS = 15.0
PATIENCE = 15.0  # beyond the grace time, for the ends of all nodes once one has failed
LOOK_SECONDS = 0.2


class Neighbour(NamedTuple):
    """Another node, by the descriptor of the connection to it."""

    node: int
    host: str
    fd: int

    @property
    def name(self) -> str:
        """As people are told of it."""
        return f"node {self.node} ({self.host})"


class Control:
    """This node's end of it. neighbours: on node 0 all others, elsewhere node 0; none where there is one node only.

    said: for people, on node 0's console. A guardian calls `turn` when the selector brings something (`data` is
    `NODES`), and five times a second in any case: node 0 is woken by nobody, for the beats of a thousand nodes would
    never let it sleep.
    """

    NODES = "nodes"

    def __init__(
        self, node: int, neighbours: Mapping[int, Neighbour], selector: selectors.BaseSelector, grace: float
    ) -> None:
        self.node = node
        self._node, self._neighbours, self._selector, self._grace = node, dict(neighbours), selector, grace
        self._host = os.uname().nodename
        self._lines = {node: Line(socket.socket(fileno=each.fd)) for node, each in neighbours.items()}
        self._ready = selectors.DefaultSelector()
        for other, line in self._lines.items():
            os.set_inheritable(line.fileno(), False)  # held open by a rank, it would not close with the guardian
            self._ready.register(line, selectors.EVENT_READ, other)
            if node:
                selector.register(line, selectors.EVENT_READ, self.NODES)
        now = time.monotonic()
        self._heard, self._beat, self._turned = dict.fromkeys(self._lines, now), 0.0, now
        self._met: set[int] = set()  # who has this connection in its guardian by now
        self._first: dict[int, float] = {}  # node -> when it was heard first that its run is ending
        self._ends: dict[int, NodeEnd] = {}
        self._told = False  # the others, that this node's run is ending
        self._why = ""  # it is
        self.order = ""  # why another node wants the run to end
        self.said: list[str] = []
        self._lost: dict[str, list[str]] = {}  # how -> who was lost so, and has not been said yet
        self._posts: list[tuple[int, Mapping[str, Any]]] = []  # about the watch over a run that hangs
        self._kept: list[Mapping[str, Any]] = []
        self._mine: NodeEnd | None = None  # as node 0 was told
        self._verdict: Verdict | None = None
        self.insists = False  # somebody wants everything killed at once
        self.passed_on: list[int] = []  # signals for the ranks, which node 0 was sent
        self.received: int | None = None  # the signal that this node's trainkit has received
        self.alone = False  # it is gone

    def turn(self) -> None:
        """Take in what the others say, say that this node lives, and notice who has gone."""
        now = time.monotonic()
        if now - self._turned > 2 * BEAT_SECONDS:  # this node stood still itself, as a suspended job does
            self._heard = dict.fromkeys(self._heard, now)
        self._turned = now
        for key, _ in self._ready.select(0):
            self._hear(key.data, now)
        limit = LOST_AT_END_SECONDS if self._why or self.order else LOST_SECONDS
        for node in [node for node in self._lines if now - self._heard[node] > limit]:
            self._lose(node, f": nothing was heard of it for {limit:.0f} s")
        if now - self._beat >= BEAT_SECONDS:
            self._beat = now
            self._tell({"beat": True})
        for line in self._lines.values():
            if line.unsent:
                line.flush()
        self._say_lost()

    @property
    def others(self) -> dict[int, str]:
        """The nodes that this one is connected to, with the names that people know them by."""
        return {node: self._neighbours[node].name for node in self._lines}

    @property
    def running(self) -> list[int]:
        """Those of them whose run has not ended yet."""
        return [node for node in self._lines if node not in self._ends]

    def post(self, message: Mapping[str, object]) -> None:
        """Tell the watches of the others something: on node 0 all of them, elsewhere node 0's."""
        self._tell({"post": message})

    def taken(self) -> list[tuple[int, Mapping[str, Any]]]:
        """What they have told since the last call, each with its node."""
        found, self._posts = self._posts, []
        return found

    def keep(self, message: Mapping[str, Any]) -> None:
        """Put something by that was told early."""
        self._kept.append(message)

    def kept(self) -> list[Mapping[str, Any]]:
        """What has been put by, and what nobody has taken yet."""
        return [*self._kept, *(message for _, message in self._posts)]

    def ending(self, why: str) -> None:
        """Tell the others, once, that this node's run is ending: a rank has failed, or trainkit was told to stop."""
        if not self._told:
            self._told = True
            self._first.setdefault(self._node, time.monotonic())
            self._why = self._why or why or "it failed"
            self._tell({"ending": self._why})

    def pass_on(self, number: int) -> None:
        """Tell the other nodes of a signal for the ranks, which node 0 was sent for all."""
        if self._node == 0:
            self._tell({"signal": number})

    def insist(self) -> None:
        """Have everything killed on all nodes at once."""
        if not self.insists:
            self.insists = True
            self._tell({"kill": True})

    def settle(
        self,
        verdict: Verdict,
        *,
        consequence: bool,
        wait: Callable[[float], None],
        record: Callable[[Verdict], None] = lambda _: None,
    ) -> Verdict:
        """The verdict on the whole run, which node 0 gives when all nodes have ended.

        wait: the guardian's. record: writes the account, on node 0 before the others hear of the verdict: a scheduler
        may kill what is left when they have ended.
        """
        if self._neighbours:
            at = self._first.setdefault(self._node, time.monotonic())
            mine = NodeEnd(self._node, self._host, at, verdict, consequence, self.received)
            if verdict.failure is not None:
                self.ending(verdict.why)
            verdict = self._settle_all(mine, wait) if self._node == 0 else self._report(mine, wait)
        record(verdict)
        if self._node == 0 and self._lines:
            # Without trainkit on node 0 another node has to say to people how the run has ended.
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
        return judge_nodes([*self._ends.values()])

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
        """Until when to wait for the other nodes: for ever while none has failed."""
        return time.monotonic() + self._grace + PATIENCE if self._told or self.order else float("inf")

    def _hear(self, node: int, now: float) -> None:
        """What a node has said by now."""
        messages = self._lines[node].waiting_messages()
        try:
            for message in messages or ():
                self._heard[node] = now
                self._on_message(node, message)
        except (KeyError, TypeError, ValueError):
            self._lose(node, ": it said what no trainkit says")
        if messages is None:
            self._lose(node, "")

    def _on_message(self, node: int, message: Mapping[str, Any]) -> None:
        if node not in self._met:
            self._met.add(node)
            if self._why:  # what was said before may have been lost
                self._lines[node].send({"ending": self._why})
        if "ending" in message and self._node == 0:
            self._first.setdefault(node, time.monotonic())
            self._stop_all(node, f"{self._neighbours[node].name}: {message['ending']}")
        elif "ending" in message:
            self.order = self.order or str(message["ending"])
            if self._mine is not None:  # to a trainkit that goes on for its guardian, which was killed
                self._lines[node].send(_ended(self._mine))
        elif "kill" in message:
            self.insist()
        elif "signal" in message:
            self.passed_on.append(int(message["signal"]))
        elif "ended" in message:
            at = self._first.setdefault(node, time.monotonic())
            end = verdict_of(message["ended"])
            consequence, received = bool(message.get("consequence")), message.get("received")
            self._ends[node] = NodeEnd(node, self._neighbours[node].host, at, end, consequence, received)
            if end.failure is not None:
                self._stop_all(node, f"{self._neighbours[node].name}: {end.why}")
        elif "post" in message:
            self._posts.append((node, dict(message["post"])))
        elif "verdict" in message:
            self._verdict = verdict_of(message["verdict"])
            if message.get("speaker") == self._node and self._verdict.failure is not None:
                self.said.append(f"the run failed: {self._verdict.why}")

    def _stop_all(self, source: int, why: str) -> None:
        """Node 0 has heard that a node's run is ending, and passes it on."""
        if not self.order and not self._told:
            self.order = self._why = why
            if source in self._lines:  # else it was lost, which is said
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
            # One that has fallen silent was lost when it should have been heard next.
            missed = self._heard[node] + BEAT_SECONDS
            at = self._first.setdefault(node, min(missed, time.monotonic()) if how else time.monotonic())
            self._ends[node] = NodeEnd(node, lost.host, at, Verdict(KILLED, "node", why, node=node))
            self._stop_all(node, why)
        else:
            self.order = self.order or why

    def _say_lost(self) -> None:
        """All at once: a switch that fails takes hundreds of nodes with it."""
        for how, names in self._lost.items():
            self.said.append(f"{listed(names)} {'was' if len(names) == 1 else 'were'} lost{how}")
        self._lost.clear()

    def _tell(self, message: Mapping[str, object]) -> None:
        for line in self._lines.values():
            line.send(message)


def _ended(mine: NodeEnd) -> dict[str, object]:
    return {"ended": mine.verdict._asdict(), "consequence": mine.consequence, "received": mine.received}
