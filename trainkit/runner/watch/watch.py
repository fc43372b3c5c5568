"""How long a rank's steps take, and how much of that is its own time; who is slower than the others."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from trainkit.decode import DecodeError, decode
from trainkit.files import publish, read_whole, remove_file
from trainkit.runner.nodes.control import Control
from trainkit.runner.rundir.records import DUMPS, ORDERS, PACES, Name, RankKey, RankRecord, Seconds, log_path, run_of
from trainkit.runner.supervisor.processes import descendants
from trainkit.runner.watch.dumping import Dump, Spawn, View
from trainkit.runner.watch.judge import STOPPED, Activity, Found, judge, state_of
from trainkit.runner.watch.question import Joins, Question, order
from trainkit.runner.watch.timing import LEAST_SECONDS, Limits, Standing, is_sure, median, stalled
from trainkit.stamps import CHECKPOINT, EVALUATION, START, STEPS, read_paces, read_page

FEW = 10  # steps of which nothing is said
SLOWER = 1.3  # times the median of all ranks
SHARE = 0.1  # of a step that the difference makes at least: less holds nobody up


class Pace(NamedTuple):
    """Medians of a rank's latest steps, in seconds. own: outside of what waits for other ranks; 0 where unknown."""

    host: Name
    step: Seconds
    own: Seconds


BY_RANK: Any = Mapping[RankKey, Pace]


def pace_of(host: str, page: bytes) -> Pace | None:
    """From a rank's page; None where it has made too few steps."""
    steps = read_paces(page) if page else []
    if len(steps) < FEW:
        return None
    return Pace(host, *(round(median([each[part] for each in steps]), 6) for part in (0, 1)))


def stragglers(paces: Mapping[int, Pace]) -> list[dict[str, Any]]:
    """Ranks whose own time for a step is over 1.3 times the median of all, the slowest first.

    Of an even number of ranks the lower median counts, so that of two ranks the slower one can be seen.
    """
    known = {rank: pace for rank, pace in paces.items() if pace.own > 0}
    if len(known) < 2:
        return []
    usual = median([pace.own for pace in known.values()])
    step = median([pace.step for pace in known.values()])
    slow = [
        {"rank": rank, "host": pace.host, "own_seconds": pace.own, "median_seconds": usual}
        for rank, pace in known.items()
        if pace.own > SLOWER * usual and pace.own - usual > SHARE * step
    ]
    return sorted(slow, key=lambda each: -float(str(each["own_seconds"])))


LOOK_SECONDS = 1.0
ANSWER_SECONDS = 12.0  # for the dumps of the other nodes
AGAIN_SECONDS = 5.0  # between two words of a node that stands still, should one have been lost
STOOD_SECONDS = 5.0  # between two turns: this process stood still itself
LAUNCHER = -1  # in the place of a rank's number
TOKEN = re.compile(rb"[0-9a-f]{1,64}")


class Rest(NamedTuple):
    """Of a node. still: none of its ranks moves; sure: they say so themselves; done: all have ended by themselves."""

    still: bool = False
    sure: bool = False
    done: bool = False


class Watch:
    """One node's part. limits: as in the plan. guarded: pid of trainkit where the run stops with it, else 0.

    launcher: what starts the ranks, for people.
    """

    def __init__(
        self, limits: Limits, attempt_dir: str, control: Control, spawn: Spawn, guarded: int, launcher: str
    ) -> None:
        self._limits, self._attempt, self._control = limits, attempt_dir, control
        self._spawn, self._guarded, self._launcher = spawn, guarded, launcher
        self._launcher_pid = 0
        self._views: dict[int, View] = {}
        self._alive: Collection[int] = ()
        self._activities: dict[int, Activity] = {}
        self._looks: dict[int, float] = {}  # rank -> when its activity is looked at next
        self._moved: dict[int, float] = {}
        self._questions: dict[int, Question] = {}
        self._joins: dict[int, Joins] = {}
        self._next = self._said_at = 0.0
        self._since = self._turned = self._ran = time.monotonic()  # since when the clocks count; when ranks last ran
        self._rest = Rest()
        self._others: dict[int, Rest] = {}
        self._dump: Dump | None = None
        self._round, self._asked, self._until = 0, "", 0.0
        self._answers: dict[int, list[Found]] | None = None  # on node 0, while a dump is made
        self._began = 0.0  # when the run last moved before it was reported
        self.said: list[str] = []  # for the console
        self.line = ""  # for status.json, while the run stands still
        self.order = ""  # why the run is to end …
        self.blamed = ""  # … and the host that holds it up

    def turn(
        self, records: Mapping[int, RankRecord], alive: Collection[int], ended: Collection[int], launcher: int = 0
    ) -> None:
        """Look after the ranks. alive: whose wrappers run; ended: children of the guardian that have ended.

        launcher: its pid; 0 while none runs.
        """
        self._launcher_pid, self._alive = launcher, alive
        self._hear()
        self._go_on(ended)
        now = time.monotonic()
        if now - self._turned > STOOD_SECONDS:  # so have the ranks, most likely: a job that was suspended goes on
            self._since = now
        self._turned = now
        if now >= self._next:
            self._next = now + LOOK_SECONDS
            self.see(records, alive)
            ranks = [each for rank in alive if (each := self._standing(rank, now)) is not None]
            self._note(ranks or self._without_ranks(now), now)
            if ranks or not launcher:
                self._ran = now
            if self._control.node == 0 and self._answers is None:
                self._decide()
        if self._answers is not None:
            self._conclude()

    def see(self, records: Mapping[int, RankRecord], alive: Collection[int]) -> None:
        """Take in new ranks, and those that the launcher has restarted. alive: as for `turn`."""
        for rank, record in records.items():
            known = self._views.get(rank)
            if known is None or known.record.wrapper_pid != record.wrapper_pid:
                if known is not None:
                    known.close()
                self._views[rank], self._joins[rank] = View(record, alive=rank in alive), Joins()
                logs = (log_path(self._attempt, rank, stream) for stream in ("out", "err"))
                self._activities[rank] = Activity(time.monotonic(), logs)
            else:
                known.record = record

    def paces(self) -> dict[int, Pace]:
        """Of the ranks of this node, also of those that have ended."""
        found = {rank: pace_of(view.record.host, view.bytes()) for rank, view in self._views.items()}
        return {rank: pace for rank, pace in found.items() if pace is not None}

    def tell_paces(self) -> None:
        """Tell node 0, at the end."""
        for question in self._questions.values():
            question.remove()
        if self._control.node:
            self._control.post({"paces": self.paces()})

    def _standing(self, rank: int, now: float) -> Standing | None:
        """What is known of a rank's rest; None for one that has ended."""
        view = self._views[rank]
        if view.record.ended is not None or not view.record.pid:
            return None
        data = view.bytes()
        page = read_page(data)
        if page is None:
            self._moved[rank] = max(self._since, self._active(rank, now))
            return Standing(rank, self._moved[rank])
        steps = [each[0] for each in read_paces(data)]
        standing = Standing(rank, max(self._since, page.at), page.phase, page.longest, steps)
        if page.phase in (START, STEPS, CHECKPOINT, EVALUATION):
            joins = self._joins[rank]
            joins.see(page.joined, now)
            order(view.record.opened(view.record.orders), "")
            at = max(page.at, joins.moved)
            standing = standing._replace(moved=max(self._since, at))
            if page.phase == START:
                standing = standing._replace(pause=joins.pause(self._limits.after), steady=joins.is_steady)
            # Between two steps of its own making a program may evaluate, or save: then it computes, writes, or says so.
            active, limit = self._active(rank, now, at), standing.limit(self._limits)
            if active > at and not (now - at > limit and self._waits(rank, at, limit, now)):
                standing = standing._replace(moved=max(self._since, active))
        self._moved[rank] = standing.moved
        return standing

    def _without_ranks(self, now: float) -> list[Standing]:
        """The launcher's rest, where one runs: before it has started a rank, and after all have ended."""
        if not self._launcher_pid:
            return []
        limits, self._moved[LAUNCHER] = self._limits, max(self._since, self._ran)
        if state_of(self._launcher_pid).letter in STOPPED:
            may = limits.after or LEAST_SECONDS
        else:  # to end, or to start
            may = max(limits.after or 0.0, LEAST_SECONDS if self._views else limits.start)
        return [Standing(LAUNCHER, self._moved[LAUNCHER], may=may)]

    def _waits(self, rank: int, since: float, limit: float, now: float) -> bool:
        """Whether a rank that computes has been in one collective for too long all the same."""
        record = self._views[rank].record
        question = self._questions.setdefault(rank, Question(os.path.join(self._attempt, f".flight-{rank}.json")))
        return question.waits(record.opened(record.orders), since, limit / 10, now) > limit

    def _active(self, rank: int, now: float, since: float = 0.0) -> float:
        if now >= self._looks.get(rank, 0.0):
            shortest = self._limits.start if self._limits.after is None else self._limits.after or self._limits.start
            self._looks[rank] = now + min(max(LOOK_SECONDS, shortest / 10), 10.0)
            self._activities[rank].look(descendants(self._views[rank].record.wrapper_pid), now, since)
        return self._activities[rank].moved

    def _note(self, ranks: list[Standing], now: float) -> None:
        """Whether this node stands still, and tell node 0 when that changes."""
        before, still = self._rest, self._limits.after != 0 and stalled(ranks, self._limits, now)
        if still and state_of(self._guarded).letter == "T":  # its user has stopped it, and the run with it
            self._since, still = now, False
        done = not still and bool(self._views) and not self._living()
        self._rest = Rest(still, is_sure(ranks), done)
        changed = (before.still, before.done) != (still, done) or (still and now - self._said_at > AGAIN_SECONDS)
        if self._control.node and changed:
            self._said_at = now
            self._control.post({"stalled": self._rest})

    def _hear(self) -> None:
        for node, message in self._control.taken():
            if "stalled" in message:
                self._others[node] = Rest(*message["stalled"])
            elif "dump" in message and self._control.node:
                self._round = int(message["dump"])
                self._begin()
            elif "dumped" in message and self._answers is not None and message["dumped"] == self._round:
                with contextlib.suppress(DecodeError):  # as if it had not answered
                    self._answers[node] = [*decode(tuple[Found, ...], message.get("ranks"), "ranks")]
            else:
                self._control.keep(message)

    def _decide(self) -> None:
        """On node 0: begin a dump, or take back what was said."""
        hangs, _ = self._whole()
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
            self._dump = Dump(os.path.join(self._attempt, DUMPS), self._living(), self._spawn)
        except OSError as error:  # a full disk, or no folder any more
            self.said.append(f"no dump of this node: {error.strerror}: {error.filename}")
            self._answer([])

    def _living(self) -> list[View]:
        """Ranks that run: of one whose wrapper has vanished nothing is looked into."""
        views = sorted(self._views.items())
        return [view for rank, view in views if view.record.ended is None and rank in self._alive]

    def _others_here(self, now: float) -> list[Found]:
        """Who makes no dump: ranks that have ended by themselves, and a launcher without ranks."""
        records = [view.record for _, view in sorted(self._views.items()) if view.record.ended is not None]
        found = [Found(each.rank, each.host, each.pid, ended=True) for each in records]
        if self._launcher_pid and not self._living():
            state, seconds = state_of(self._launcher_pid), now - self._moved.get(LAUNCHER, now)
            facts = (os.uname().nodename, self._launcher_pid, round(seconds, 1), None, 0, *state)
            found.append(Found(LAUNCHER, *facts, launcher=self._launcher))
        return found

    def _go_on(self, ended: Collection[int]) -> None:
        if self._dump is not None and self._dump.turn(ended):
            now = time.monotonic()
            found = self._dump.found(lambda rank: now - self._moved.get(rank, now))
            self._dump = None
            self._answer([*found, *self._others_here(now)])

    def _answer(self, found: list[Found]) -> None:
        if self._control.node:
            self._control.post({"dumped": self._round, "ranks": [each.as_data() for each in found]})
        elif self._answers is not None:
            self._answers[0] = found

    def _whole(self) -> tuple[bool, bool]:
        """Whether all nodes stand still whose ranks are not done, and whether that is sure."""
        nodes = [self._rest, *(self._others.get(node, Rest()) for node in self._control.running)]
        left = [each for each in nodes if not each.done]
        return bool(left) and all(each.still for each in left), all(each.sure for each in left)

    def _conclude(self) -> None:
        """On node 0, when all have answered or none will any more."""
        assert self._answers is not None
        waited = {0: "node 0", **self._control.others}
        missing = [name for node, name in waited.items() if node not in self._answers]
        if missing and time.monotonic() < self._until:
            return
        ranks = sorted((each for found in self._answers.values() for each in found), key=lambda each: each.rank)
        self._answers = None
        judged = judge(ranks, missing)
        line = f"hang: {judged.text}. Stacks: {os.path.relpath(self._dumps, self._run_dir)}"
        account = {"at": time.time(), "line": line, "ranks": [each.as_data() for each in ranks], "missing": missing}
        with contextlib.suppress(OSError):  # a full disk: it is said all the same
            name = "asked.json" if self._asked else "hang.json"
            account["asked"], self._asked = self._asked, ""
            publish(os.path.join(self._dumps, name), json.dumps(account, indent=2) + "\n", below=self._run_dir)
        hangs, sure = self._whole()
        if hangs and not account["asked"]:
            self.line, self._began = line, max([0.0, *self._moved.values()])
            self.said.append(line)
            if self._limits.ends and sure:
                self.order, self.blamed = line, judged.host

    @property
    def _run_dir(self) -> str:
        return run_of(self._attempt)

    @property
    def _dumps(self) -> str:
        return os.path.join(self._attempt, DUMPS)

    def _order(self) -> str:
        """What somebody has written who asks for a dump; empty where nobody has."""
        path = os.path.join(self._attempt, ORDERS, "dump")
        with contextlib.suppress(OSError):
            content = read_whole(path, 64, below=self._run_dir)
            remove_file(path, below=self._run_dir)
            return content.decode() if TOKEN.fullmatch(content) else ""
        return ""


def save_paces(attempt_dir: str, own: Mapping[int, Pace], kept: Iterable[Mapping[str, Any]]) -> None:
    """Write down how fast the ranks of all nodes were, on node 0. kept: what the other nodes have said of theirs."""
    found = dict(own)
    for message in kept:
        with contextlib.suppress(DecodeError):  # of a node that says something else
            found |= {int(rank): pace for rank, pace in decode(BY_RANK, message.get("paces", {})).items()}
    if len(found) > 1:
        with contextlib.suppress(OSError):  # a full disk: the summary lacks a line
            content = json.dumps({rank: found[rank] for rank in sorted(found)}) + "\n"
            publish(os.path.join(attempt_dir, PACES), content, below=run_of(attempt_dir))
