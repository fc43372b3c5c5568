"""One run as `watch` reads it, again and again, from outside: nothing is written, no signal is sent."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from trainkit.cli.diagnostics import one_line
from trainkit.decode import whole
from trainkit.errors import MachineError
from trainkit.files import parse_json, read_end, read_json
from trainkit.heartbeat import PHASES
from trainkit.runner.report.history import History, trainer_curves
from trainkit.runner.report.progress import last_lines
from trainkit.runner.report.summary import own_results
from trainkit.runner.rundir.layout import AttemptLayout, RunLayout
from trainkit.runner.rundir.listing import read_plan, read_status
from trainkit.runner.rundir.records import RankRecord, Status, read_records
from trainkit.runner.watch.heartbeats import Heartbeats, RankBeat
from trainkit.runner.watch.timing import pace_of, saved_paces, stragglers
from trainkit.schedulers.jobs.records import submitted
from trainkit.schedulers.jobs.run_state import RunState, state_of
from trainkit.text import format_duration, format_seconds, pluralize

HERE_SECONDS, QUEUE_SECONDS = 2.0, 15.0  # between two looks at the state; a scheduler is asked more seldom
RESULT_SECONDS = 10.0  # between two looks at the files that Trainer writes
CARDS_BYTES = 1 << 14  # of the end of cards.jsonl: a sample of sixteen GPUs takes two thousand
LINES = 60  # of a log
PAGE = os.sysconf("SC_PAGE_SIZE")


class Memory(NamedTuple):
    """Memory of a GPU, or of the ranks. Bytes; limit, foreseen: 0 if unknown. busy: utilization in percent."""

    name: str
    used: int
    limit: int = 0
    foreseen: int = 0
    busy: int | None = None


class Rank(NamedTuple):
    """A rank. step, own: medians of its latest steps in seconds, 0 if unknown. memory: resident bytes, 0 if unknown."""

    number: int
    host: str
    doing: str
    step: float = 0.0
    own: float = 0.0
    memory: int = 0
    is_straggler: bool = False


class LiveRun:
    """One run, and what the latest look has found. log: the last lines of the shown rank; log_of: their file."""

    def __init__(self, layout: RunLayout) -> None:
        self.layout = layout
        self.name, self.short_id = one_line(layout.name), one_line(layout.short_id)
        self.state, self.status = RunState("unknown"), Status()
        self.history = History(layout.metrics)
        self.memory: list[Memory] = []
        self.ranks: list[Rank] = []
        self.log: list[str] = []
        self.log_of = ""
        self.looks = 0  # how often it was read
        self.shown_rank: int | None = None  # whose log is shown; None for the one that failed, or rank 0
        self._plan = plan = None
        with contextlib.suppress(MachineError):  # damaged, or of another version: less is known then
            self._plan = plan = read_plan(layout)
        self.world_size = plan.topology.world_size if plan else 1
        self._foresight = plan and plan.foresight
        self._cards = {each.uuid: f"GPU {each.index}" for each in plan.cards} if plan else {}
        self._attempt: AttemptLayout | None = None
        self._beats: Heartbeats | None = None
        self._beating = False
        self._next_state = self._next_results = 0.0
        self._records: dict[int, RankRecord] = {}
        self._log_seen: tuple[Path, int] | None = None

    def read(self) -> None:
        """Look at everything that may have changed."""
        self.read_state()
        self.read_files()

    def read_state(self) -> None:
        """Its state, now and then: a scheduler may take seconds to answer."""
        attempts = self.layout.attempts
        if attempts and (self._attempt is None or attempts[-1].root != self._attempt.root):
            self._attempt = attempts[-1]
            if self._beats:
                self._beats.close()
            self._beats, self._records, self._log_seen, self._next_state = Heartbeats(self._attempt), {}, None, 0.0
        if (now := time.monotonic()) < self._next_state:
            return
        if self.layout.root.is_dir():
            self.state, self.status = state_of(self.layout), read_status(self.layout) or Status()
        else:
            self.state = RunState("lost", "its directory is gone, or cannot be looked into")
        if self._attempt:
            # Of thousands of ranks these are thousands of files: heartbeats say more, where there are any.
            with contextlib.suppress(OSError):
                self._records = {each.rank: each for each in read_records(str(self._attempt.root))}
        self._next_state = now + (QUEUE_SECONDS if self.state.job else HERE_SECONDS)
        is_over = self.state.is_over
        if now >= self._next_results or (is_over and self._next_results < math.inf):  # at its end once more
            self._next_results = math.inf if is_over else now + RESULT_SECONDS
            self._read_own_results()

    def _read_own_results(self) -> None:
        """Steps and losses of a program that writes no metrics of trainkit's, by the files it has of its own."""
        plan, started = self._plan, self.status.started or 0.0
        if plan is None or plan.program.kind == "builtin":
            return
        found = own_results(plan, self.layout, started)
        steps, total = (whole(found.get(name)) for name in ("steps", "total_steps"))
        progress = self.history.progress
        self.history.progress = replace(progress, step=max(progress.step, steps or 0), total=total or progress.total)
        self.history.curves |= trainer_curves(plan, self.layout, started)

    def read_files(self) -> None:
        """Its metrics, heartbeats, memory and log."""
        now = time.monotonic()
        beats = self._beats.read() if self._beats and not self.state.is_over else {}
        self._beating = bool(beats)
        self.history.read()
        if 0 in beats:
            self.history.progress = self.history.progress.beat(beats[0], now)
        self.ranks = self._ranks_by(beats, now)
        self.memory = [*self._memory()]
        self.read_log()
        self.looks += 1

    def _ranks_by(self, beats: Mapping[int, RankBeat], now: float) -> list[Rank]:
        paces = saved_paces(str(self._attempt.root)) if self._attempt else {}
        for rank, (_, host, _, steps) in beats.items():
            if pace := pace_of(host, steps):
                paces[rank] = pace
        slow = {each["rank"] for each in stragglers(paces)}
        ranks = []
        for rank in sorted({*self._records, *paces, *beats}):
            record, beat, pace = self._records.get(rank), beats.get(rank), paces.get(rank)
            host = next(each.host for each in (beat, record, pace) if each)
            step, own = (pace.step, pace.own) if pace else ((beat.seconds_per_step or 0.0) if beat else 0.0, 0.0)
            memory = _resident(beat.state.pid) if beat else 0
            ranks.append(Rank(rank, host, self._doing(record, beat, now), step, own, memory, rank in slow))
        return ranks

    def _doing(self, record: RankRecord | None, beat: RankBeat | None, now: float) -> str:
        """The phase and for how long; of a rank that has ended how it did."""
        if beat and not self.state.is_over:
            return f"{PHASES[beat.state.phase]} {format_seconds(max(0.0, now - beat.state.at))}"
        if record and record.ended is not None:
            return f"signal {record.signal}" if record.signal is not None else f"exit code {record.code}"
        if self.state.is_over:
            return "ended"
        return "no heartbeat" if record and record.host == os.uname().nodename else "on another host"

    def _memory(self) -> Iterator[Memory]:
        known = self._foresight
        limit, foreseen = (known.limit, known.total) if known else (0, 0)
        if self._cards:
            for card in self._latest_cards():
                name, used, busy = (card.get(key) for key in ("uuid", "memory_bytes", "utilization"))
                if name in self._cards and isinstance(used, int):
                    yield Memory(self._cards[name], used, limit, foreseen, busy if isinstance(busy, int) else None)
        elif resident := [each.memory for each in self.ranks if each.memory]:
            of_host = (known.host_limit, known.host) if known else (0, 0)
            yield Memory(f"of {pluralize(len(resident), 'rank')}", sum(resident), *of_host)
        elif curve := self.history.curves.get("memory_bytes"):
            peak = max((each for each in curve.values if each is not None), default=0)
            yield Memory("of rank 0, peak", int(peak), limit, foreseen)

    def _latest_cards(self) -> list[Mapping[str, Any]]:
        """The latest sample; of a run that has ended the peaks."""
        peaks = read_json(self.layout.summary).get("gpu_memory_occupied") if self.state.is_over else None
        if isinstance(peaks, dict):
            return [{"uuid": uuid, "memory_bytes": used} for uuid, used in peaks.items()]
        for line in reversed(read_end(self.layout.cards, CARDS_BYTES).splitlines()):
            with contextlib.suppress(ValueError, AttributeError, TypeError):  # incomplete
                return [each for each in parse_json(line).get("cards") or () if isinstance(each, Mapping)]
        return []

    def read_log(self) -> None:
        """The log that was written last: of the shown rank (its errors if it failed), launcher, preparations."""
        attempt, rank = self._attempt, self.log_rank
        if attempt is None:
            return
        output, errors = (attempt.log(rank, stream) for stream in ("out", "err"))
        failed = self.state.is_over and rank == self.status.rank
        groups = (
            [errors] if failed else [],  # its output may be as new, and says less
            [output, errors],
            [attempt.launcher_log, attempt.preparation_log, attempt.preparation_output],
        )
        for group in groups:
            found = [(each, size, at) for each in group for size, at in _size_and_time(each)]
            if found:
                path, size, _ = max(found, key=lambda each: each[2])
                if self._log_seen != (path, size):
                    self._log_seen = (path, size)
                    self.log = [one_line(line.expandtabs()) for line in last_lines(path, LINES)]
                    self.log_of = f"{path.parent.parent.parent.name}/{path.parent.parent.name}/{path.parent.name}"
                    self.log_of = f"{self.log_of}/{path.name}"
                return
        self.log, self.log_of, self._log_seen = [], "", None

    @property
    def log_rank(self) -> int:
        """The rank whose log is shown."""
        failed = self.status.rank if self.state.is_over else None
        return next((each for each in (self.shown_rank, failed) if each is not None), 0)

    @property
    def without_curves(self) -> str:
        """Why it has no curves."""
        kind = self._plan.program.kind if self._plan else "builtin"
        if kind == "hf" and not self.state.is_over:
            return "no values yet: Trainer writes its log with a checkpoint, and at the end"
        if kind not in ("builtin", "hf"):
            return "no curves: only the built-in trainer and Trainer log metrics"
        return "no values" if self.state.is_over else "no values yet"

    @property
    def outlook(self) -> str:
        """The next event, or what the run waits for; of a run that is over its exit code, duration and reason."""
        state, progress = self.state, self.history.progress
        if not self.looks:
            return "reading its files"
        if state.is_over:
            code = f"exit code {state.exit_code}" if state.exit_code is not None else ""
            took = self.status.started and self.status.ended and self.status.ended - self.status.started
            parts = (code, f"after {format_duration(took)}" if took else "", state.why)
            return one_line(", ".join(filter(None, parts)))
        if self.history.refusal:
            return one_line(self.history.refusal)
        if state.word in ("queued", "requeued"):
            return one_line(f"waits in the queue{f': {state.why}' if state.why else ''}")
        if state.word == "unknown":
            return one_line(state.why)
        if following := progress.following:
            return f"next: {following}"
        if not progress.step:
            return self._waits_for()
        return ""

    def _waits_for(self) -> str:
        """What a run without a step is doing."""
        if doing := next((each.doing for each in self.ranks if each.doing), ""):
            # Heartbeats of another user or machine cannot be read, so that the ranks may well have done some.
            what = "no step yet" if self._beating else "its step is not known here"
            return f"{what}; rank {self.ranks[0].number}: {doing}"
        if self._attempt is not None:
            return "no step yet: the ranks are being started"
        known = submitted(self.layout.root)
        if known and not known[0].shares_folder:
            return f"its files are in its pods: `trainkit logs {self.short_id} -f` shows their output"
        return "no step yet: it starts"


def _resident(pid: int) -> int:
    """Bytes of a process in memory; 0 where that is not known."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
    except (OSError, ValueError, IndexError):
        return 0


def _size_and_time(path: Path) -> Iterator[tuple[int, float]]:
    """Of a file; nothing for one that is missing or empty."""
    with contextlib.suppress(OSError):
        found = path.lstat()
        if found.st_size:
            yield found.st_size, found.st_mtime
