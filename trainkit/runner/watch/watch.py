"""The hang watch: if the run does not move, dump all ranks, name the one that blocks it, and end the run if planned."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Collection, Mapping
from typing import NamedTuple

from trainkit.decode import DecodeError, decode
from trainkit.files import publish, read_whole, remove_file
from trainkit.heartbeat import CHECKPOINT, EVALUATION, START, STEPS, read_heartbeat, read_paces
from trainkit.runner.nodes.control import Control
from trainkit.runner.rundir.records import DUMPS, ORDERS, RankRecord, log_path, run_of
from trainkit.runner.supervisor.processes import descendants
from trainkit.runner.watch.activity import (
    STOPPED,
    Activity,
    FlightRecordPoll,
    JoinedCollectives,
    request_flight_record,
    state_of,
)
from trainkit.runner.watch.dumping import Dump, RankView, Spawn
from trainkit.runner.watch.hang_cause import DumpedRank, hang_cause
from trainkit.runner.watch.timing import LEAST_SECONDS, Limits, Pace, PhaseTiming, is_sure, pace_of, save_paces, stalled

LOOK_SECONDS = 1.0
ANSWER_SECONDS = 12.0  # to wait for the dumps of the other nodes
SHARE_SECONDS = 10.0  # between two accounts of the paces: of eight thousand ranks one takes a tenth of a second
AGAIN_SECONDS = 5.0  # between two reports of a node that does not move: one may be lost
SUSPENDED_SECONDS = 5.0  # more than this between two turns: this process was suspended itself
LAUNCHER = -1  # stands for a rank's number
TOKEN = re.compile(rb"[0-9a-f]{1,64}")


class RemainingRanks(NamedTuple):
    """The ranks of a node that still run. still: none of them moves; sure: all have a heartbeat; done: none runs."""

    still: bool = False
    sure: bool = False
    done: bool = False


class Watch:
    """The watch of one node. guarded: pid of trainkit if Ctrl-Z suspends it with the run, else 0. launcher: its name.

    said: lines for the console. line: for status.json, while the run does not move. order: why the run must end.
    blamed: the host of the rank that blocks it.
    """

    def __init__(
        self, limits: Limits, attempt_dir: str, control: Control, spawn: Spawn, guarded: int, launcher: str
    ) -> None:
        self._limits, self._attempt, self._control = limits, attempt_dir, control
        self._spawn, self._guarded, self._launcher = spawn, guarded, launcher
        self._launcher_pid = 0
        self._views: dict[int, RankView] = {}
        self._alive: Collection[int] = ()
        self._activities: dict[int, Activity] = {}
        self._looks: dict[int, float] = {}  # rank -> when its activity is measured next
        self._moved: dict[int, float] = {}
        self._polls: dict[int, FlightRecordPoll] = {}
        self._joins: dict[int, JoinedCollectives] = {}
        self._next = self._said_at = self._share_at = 0.0
        # when the clocks started to count; when ranks last ran
        self._since = self._turned = self._ran = time.monotonic()
        self._remaining = RemainingRanks()
        self._others: dict[int, RemainingRanks] = {}
        self._dump: Dump | None = None
        self._round, self._asked, self._until = 0, "", 0.0
        self._answers: dict[int, list[DumpedRank]] | None = None  # on node 0, while a dump is made
        self._began = 0.0  # when the run last moved before it was reported
        self._run_dir, self._dumps = run_of(attempt_dir), os.path.join(attempt_dir, DUMPS)
        self.said: list[str] = []
        self.line = self.order = self.blamed = ""

    def turn(
        self, records: Mapping[int, RankRecord], alive: Collection[int], ended: Collection[int], launcher: int = 0
    ) -> None:
        """Look at the ranks. alive: ranks whose wrappers run; ended: children of the guardian that have ended.

        launcher: its pid; 0 while none runs.
        """
        self._launcher_pid, self._alive = launcher, alive
        self._hear()
        now = time.monotonic()
        if self._dump is not None and self._dump.turn(ended):
            found = self._dump.found(lambda rank: now - self._moved.get(rank, now))
            self._dump = None
            self._answer([*found, *self._not_dumped(now)])
        if now - self._turned > SUSPENDED_SECONDS:  # most likely the ranks were suspended too
            self._since = now
        self._turned = now
        if now >= self._next:
            self._next = now + LOOK_SECONDS
            self.see(records, alive)
            ranks = [each for rank in alive if (each := self._timing(rank, now)) is not None]
            self._note(ranks or self._launcher_timing(now), now)
            if ranks or not launcher:
                self._ran = now
            if self._control.node == 0 and self._answers is None:
                self._decide()
            if now >= self._share_at:
                self._share_at = now + SHARE_SECONDS
                self._share_paces()
        if self._answers is not None:
            self._conclude()

    def see(self, records: Mapping[int, RankRecord], alive: Collection[int]) -> None:
        """Begin to watch new and restarted ranks. alive: as for `turn`."""
        for rank, record in records.items():
            known = self._views.get(rank)
            if known is None or known.record.wrapper_pid != record.wrapper_pid:
                if known is not None:
                    known.close()
                self._views[rank], self._joins[rank] = RankView(record, alive=rank in alive), JoinedCollectives()
                logs = (log_path(self._attempt, rank, stream) for stream in ("out", "err"))
                self._activities[rank] = Activity(time.monotonic(), logs)
            else:
                known.record = record

    def paces(self) -> dict[int, Pace]:
        """The paces of this node's ranks, including those that have ended."""
        found = {rank: pace_of(view.record.host, read_paces(view.bytes())) for rank, view in self._views.items()}
        return {rank: pace for rank, pace in found.items() if pace is not None}

    def finish(self) -> None:
        """At the end: remove what asks ranks for their collectives, and share the paces once more."""
        for poll in self._polls.values():
            poll.remove()
        self._share_paces()

    def _share_paces(self) -> None:
        """Send the paces to node 0, which writes those of all nodes: heartbeats are seen on their own machine only."""
        if self._control.node:
            self._control.post({"paces": self.paces()})
        else:
            save_paces(self._attempt, self.paces(), self._control.kept())

    def _timing(self, rank: int, now: float) -> PhaseTiming | None:
        """None for a rank that has ended."""
        view = self._views[rank]
        if view.record.ended is not None or not view.record.pid:
            return None
        data = view.bytes()
        page = read_heartbeat(data)
        if page is None:
            self._moved[rank] = max(self._since, self._active(rank, now))
            return PhaseTiming(rank, self._moved[rank])
        steps = [each[0] for each in read_paces(data)]
        timing = PhaseTiming(rank, max(self._since, page.at), page.phase, page.longest, steps)
        if page.phase in (START, STEPS, CHECKPOINT, EVALUATION):
            joins = self._joins[rank]
            joins.see(page.joined, now)
            request_flight_record(view.record.opened(view.record.orders), "")
            at = max(page.at, joins.moved)
            timing = timing._replace(moved=max(self._since, at))
            if page.phase == START:
                timing = timing._replace(pause=joins.pause(self._limits.after), steady=joins.is_steady)
            # Between two steps a program may evaluate or save: then it uses the processor or a disk.
            active, limit = self._active(rank, now, at), timing.limit(self._limits)
            if active > at and not (now - at > limit and self._waits(rank, at, limit, now)):
                timing = timing._replace(moved=max(self._since, active))
        self._moved[rank] = timing.moved
        return timing

    def _launcher_timing(self, now: float) -> list[PhaseTiming]:
        """The timing of a launcher without ranks: before it has started any, or after all have ended."""
        if not self._launcher_pid:
            return []
        limits, self._moved[LAUNCHER] = self._limits, max(self._since, self._ran)
        if state_of(self._launcher_pid).letter in STOPPED:
            may = limits.after or LEAST_SECONDS
        else:  # it has this long to end, or to start ranks
            may = max(limits.after or 0.0, LEAST_SECONDS if self._views else limits.start)
        return [PhaseTiming(LAUNCHER, self._moved[LAUNCHER], may=may)]

    def _waits(self, rank: int, since: float, limit: float, now: float) -> bool:
        """Whether a rank has been in one collective for too long, although it uses the processor."""
        record = self._views[rank].record
        question = self._polls.setdefault(rank, FlightRecordPoll(os.path.join(self._attempt, f".flight-{rank}.json")))
        return question.waits(record.opened(record.orders), since, limit / 10, now) > limit

    def _active(self, rank: int, now: float, since: float = 0.0) -> float:
        if now >= self._looks.get(rank, 0.0):
            shortest = self._limits.start if self._limits.after is None else self._limits.after or self._limits.start
            self._looks[rank] = now + min(max(LOOK_SECONDS, shortest / 10), 10.0)
            self._activities[rank].look(descendants(self._views[rank].record.wrapper_pid), now, since)
        return self._activities[rank].moved

    def _note(self, ranks: list[PhaseTiming], now: float) -> None:
        """Decide whether this node moves, and tell node 0 when that changes."""
        before, still = self._remaining, self._limits.after != 0 and stalled(ranks, self._limits, now)
        if still and state_of(self._guarded).letter == "T":  # the user has suspended trainkit together with the run
            self._since, still = now, False
        done = not still and bool(self._views) and not self._living()
        self._remaining = RemainingRanks(still, is_sure(ranks), done)
        changed = (before.still, before.done) != (still, done) or (still and now - self._said_at > AGAIN_SECONDS)
        if self._control.node and changed:
            self._said_at = now
            self._control.post({"stalled": self._remaining})

    def _hear(self) -> None:
        for node, message in self._control.taken():
            if "stalled" in message:
                self._others[node] = RemainingRanks(*message["stalled"])
            elif "dump" in message and self._control.node:
                self._round = int(message["dump"])
                self._begin()
            elif "dumped" in message and self._answers is not None and message["dumped"] == self._round:
                with contextlib.suppress(DecodeError):  # an invalid answer counts as none
                    self._answers[node] = [*decode(tuple[DumpedRank, ...], message.get("ranks"), "ranks")]
            else:
                self._control.keep(node, message)

    def _decide(self) -> None:
        """On node 0: begin a dump, or report that the run moves again."""
        hangs, _ = self._hangs()
        if self.line and not hangs:
            seconds = time.monotonic() - self._began
            self.said.append(f"the run moves again, after {seconds:.0f} s")
            self.line = ""
        elif (hangs and not self.line) or (asked := self._order()):
            self._asked = "" if hangs and not self.line else asked
            self._round += 1
            self._answers, self._until = {}, time.monotonic() + ANSWER_SECONDS
            self._control.post({"dump": self._round})
            self._begin()

    def _begin(self) -> None:
        try:
            self._dump = Dump(self._dumps, self._living(), self._spawn)
        except OSError as error:  # a full disk, or a removed folder
            self.said.append(f"no dump of this node: {error.strerror}: {error.filename}")
            self._answer([])

    def _living(self) -> list[RankView]:
        """The running ranks; a rank whose wrapper has vanished is not inspected."""
        views = sorted(self._views.items())
        return [view for rank, view in views if view.record.ended is None and rank in self._alive]

    def _not_dumped(self, now: float) -> list[DumpedRank]:
        """Ranks that have ended by themselves, and a launcher without ranks."""
        records = [view.record for _, view in sorted(self._views.items()) if view.record.ended is not None]
        found = [DumpedRank(each.rank, each.host, each.pid, ended=True) for each in records]
        if self._launcher_pid and not self._living():
            state, seconds = state_of(self._launcher_pid), now - self._moved.get(LAUNCHER, now)
            facts = (os.uname().nodename, self._launcher_pid, round(seconds, 1), None, 0, *state)
            found.append(DumpedRank(LAUNCHER, *facts, launcher=self._launcher))
        return found

    def _answer(self, found: list[DumpedRank]) -> None:
        if self._control.node:
            self._control.post({"dumped": self._round, "ranks": [each.as_data() for each in found]})
        elif self._answers is not None:
            self._answers[0] = found

    def _hangs(self) -> tuple[bool, bool]:
        """Whether no node with remaining ranks moves, and whether heartbeats prove it."""
        nodes = [self._remaining, *(self._others.get(node, RemainingRanks()) for node in self._control.running)]
        left = [each for each in nodes if not each.done]
        return bool(left) and all(each.still for each in left), all(each.sure for each in left)

    def _conclude(self) -> None:
        """On node 0: once all have answered, or time is up, write the dump and report a hang."""
        assert self._answers is not None
        waited = {0: "node 0", **self._control.others}
        missing = [name for node, name in waited.items() if node not in self._answers]
        if missing and time.monotonic() < self._until:
            return
        ranks = sorted((each for found in self._answers.values() for each in found), key=lambda each: each.rank)
        self._answers = None
        cause = hang_cause(ranks, missing)
        line = f"hang: {cause.text}. Stacks: {os.path.relpath(self._dumps, self._run_dir)}"
        account = {"at": time.time(), "line": line, "ranks": [each.as_data() for each in ranks], "missing": missing}
        with contextlib.suppress(OSError):  # a full disk: the hang is reported nevertheless
            name = "asked.json" if self._asked else "hang.json"
            account["asked"], self._asked = self._asked, ""
            publish(os.path.join(self._dumps, name), json.dumps(account, indent=2) + "\n", below=self._run_dir)
        hangs, sure = self._hangs()
        if hangs and not account["asked"]:
            self.line, self._began = line, max([0.0, *self._moved.values()])
            self.said.append(line)
            if self._limits.ends and sure:
                self.order, self.blamed = line, cause.host

    def _order(self) -> str:
        """The token of a user's request for a dump; empty if there is none."""
        path = os.path.join(self._attempt, ORDERS, "dump")
        with contextlib.suppress(OSError):
            content = read_whole(path, 64, below=self._run_dir)
            remove_file(path, below=self._run_dir)
            return content.decode() if TOKEN.fullmatch(content) else ""
        return ""
